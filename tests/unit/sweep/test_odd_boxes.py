"""Boxes that behave as the protocol allows and few do: slow, unreliable, forgetful, with odd names."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from benchmarks.simulator.box import QUIET, Life, SimulatedBox, Truth
from benchmarks.simulator.tasks import Task, task
from tests.support.bench_samples import the_book
from tests.support.made_sweep import a_sample, begun_search
from tunerd.measure.life import Texts
from tunerd.measure.pairs import class_ms
from tunerd.profile.arm import (
    Arm,
    Boot,
    Family,
    Policy,
    Preempted,
    Refused,
    Request,
    Sample,
    ServerDied,
    Space,
    as_samples,
)
from tunerd.profile.workload import RequestClass, Workload
from tunerd.records import plain, read
from tunerd.sweep.box import composed
from tunerd.sweep.challenge import Challenge, Result, carried
from tunerd.sweep.limits import TELLING_CALLS, Limits
from tunerd.sweep.night import Server, TimeUp
from tunerd.sweep.observations import BLOCK, TOOL, WARM_UP, prompt_name, text_of
from tunerd.sweep.search import Finalist, Search
from tunerd.sweep.tuner import Outcome

HOUR_S = 3600.0
OFF = Arm("mainline", "off", 0, 0.0, 1024, "q8_0", 512, 2048, 4)


def two_arms(margins: tuple[int, ...] = (2048,)) -> Task:
    """A box on which twice the threads are much faster, and nothing else may change but the margin."""
    one = task("12G", "agent", None)
    family = Family((0,), (0.0,), margins, ("q8_0",), (512,), (2048,), (4, 8))
    space = Space({("mainline", "off"): family})
    return replace(one, space=space, incumbent=replace(OFF, fit_mib=2048))


Starts = Callable[["Odd", Arm, Boot], Boot]
Asked = Callable[["Odd", Life, Request], None]
Answers = Callable[["Odd", Life, Request, dict[str, Any]], dict[str, Any]]


@dataclass
class Odd(SimulatedBox):
    """What a test makes of a start, of a request before it is answered, and of an answer."""

    starts: Starts = lambda _box, _arm, boot: boot
    asked: Asked = lambda _box, _life, _request: None
    answers: Answers = lambda _box, _life, _request, answer: answer
    n_odd: int = 0
    is_proving: bool = False

    def restart(self, arm: Arm) -> Boot:
        return self.starts(self, arm, super().restart(arm))

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        life = self._life
        assert life is not None
        self.is_proving |= "-v1." in request.prompt_id
        self.asked(self, life, request)
        return self.answers(self, life, request, dict(super().measure(request, arm)))

    def dies(self) -> NoReturn:
        self._life = None
        raise ServerDied("crash")


def failing(failure: str, *threads: int, n: int = 10**9, only_proving: bool = False) -> Starts:
    """Starts with so many threads fail, so often."""

    def starts(box: Odd, arm: Arm, boot: Boot) -> Boot:
        if arm.threads not in threads or box.n_odd >= n or (only_proving and not box.is_proving):
            return boot
        box.n_odd += 1
        return Boot(False, 30.0, failure)

    return starts


def seen(**changes: Any) -> Starts:
    """Of every start this is seen."""
    return lambda _box, _arm, boot: replace(boot, **changes)


def ending_after(n_starts: int) -> Starts:
    """Its user wants it back after so many starts."""

    def starts(box: Odd, _arm: Arm, boot: Boot) -> Boot:
        if box.n_restarts > n_starts:
            raise Preempted
        return boot

    return starts


def night(one: Task, box: SimulatedBox, hours: float = 1.0, **options: Any) -> Outcome:
    return one.night(hours, box=box, **options)


def searching(
    workload: Workload | None = None, *, margins: tuple[int, ...] = (2048,), **odd: Any
) -> tuple[Task, Search]:
    """A search on the box of two arms, and where its night asks for this workload."""
    one = two_arms(margins)
    one = replace(one, workload=workload or one.workload)
    return one, begun_search(one, Odd(one.card, QUIET, **odd))


def paired(search: Search, candidate: Arm) -> Result:
    """What pairs of it and what serves come to."""
    served = search.incumbent
    return Challenge(search.night, search.limits, Policy(), served, candidate, 1).run()


def faster(one: Task) -> Arm:
    return replace(one.incumbent, threads=8)


def test_a_driver_written_elsewhere_needs_no_names_of_this_package() -> None:
    """Another object with the attributes of a Boot that it knows, steps of a path as triples, a space with nothing pinned."""
    told = ("ok", "seconds", "failure", "vram_free_mib")

    def starts(_box: Odd, _arm: Arm, boot: Boot) -> Any:
        return SimpleNamespace(**{name: getattr(boot, name) for name in told})

    one = two_arms()
    one = replace(one, space=Space(families=one.space.families, pinned={}))
    outcome = night(one, Odd(one.card, starts=starts))
    assert outcome.arm == faster(one)
    seconds, starts_until, arm = outcome.evidence.path[-1]
    assert (seconds > 0, starts_until > 0, arm) == (True, True, faster(one))
    kept = outcome.evidence.to_json()["path"][-1]
    assert kept == {"seconds": seconds, "restarts": starts_until, "arm": plain(arm)}
    with pytest.raises(ValueError, match=r"speculation.n_max: what is pinned is a range of one"):
        replace(one.space, pinned={"speculation.n_max": 2})


def test_one_that_leads_alone_is_challenged_with_races_with_nobody_and_is_promoted() -> None:
    one = two_arms()
    outcome = night(one, one.box())
    assert outcome.arm == faster(one)
    starts = [row.purpose for row in outcome.evidence.samples if row.event == "boot"]
    assert "race" not in starts
    assert starts.count("verdict") == 2 * len(outcome.evidence.challenges[-1].pairs)


@pytest.mark.parametrize(("tells_steps", "most"), [(True, 1), (False, 6)])
def test_a_start_is_asked_for_several_drafts_only_where_steps_do_not_tell_of_others(
    *, tells_steps: bool, most: int
) -> None:
    one = task("12G", "agent", 1)
    box = Odd(one.card, QUIET, tells_steps=tells_steps, starts=ending_after(16))
    evidence = night(one, box, 24.0).evidence
    drafts = defaultdict[str, set[tuple[int, float]]](set)
    for row in evidence.samples:
        if row.purpose == BLOCK:
            drafts[row.process].add((row.n_max, row.p_min))
    assert max(map(len, drafts.values())) == most


def test_an_engine_for_which_drafting_does_not_pay_by_its_own_steps_is_started_without() -> None:
    """And the other one, whose steps say that it lags without drafts as well, is not."""
    one = task("16G", "chat", 2)
    dear = {
        name: replace(engine, specs={
            kind: replace(spec, round_ms=8 * spec.round_ms, token_ms=8 * spec.token_ms)
            for kind, spec in engine.specs.items()
        })
        for name, engine in one.card.engines.items()
    }  # fmt: skip
    card = replace(one.card, engines=dear)
    evidence = night(replace(one, card=card), Odd(card, QUIET), 0.4).evidence
    starts = [row.arm.family for row in evidence.samples if row.event == "boot"]
    assert ("ik", "off") in starts[:5]
    assert ("mainline", "off") not in starts


@pytest.mark.parametrize(
    ("card", "mix", "ubatch"), [("24G", "deep", 2048), ("12G", "agent", 2048), ("16G", "chat", 512)]
)
def test_a_first_look_reads_in_large_batches_where_prompts_take_most_of_a_start(
    card: str, mix: str, ubatch: int
) -> None:
    one = task(card, mix, 1)
    rows = night(one, Odd(one.card, QUIET, starts=ending_after(4))).evidence.samples
    probes = [row.arm for row in rows if row.event == "boot" and row.purpose == "probe"]
    assert {arm.ubatch for arm in probes} == {ubatch}


@pytest.mark.parametrize(("mix", "is_looked_at"), [("agent", False), ("chat", True)])
def test_what_leads_is_looked_at_without_drafts_unless_looks_are_dear_and_no_lookup_makes_up_for_them(
    mix: str, *, is_looked_at: bool
) -> None:
    """By its own steps: the look costs a short night of long prompts a third of a pair."""
    one = task("16G", mix, 1)
    rows = night(one, Odd(one.card, QUIET, starts=ending_after(4))).evidence.samples
    starts = [(row.purpose, row.arm.spec) for row in rows if row.event == "boot"]
    assert starts[:2] == [("incumbent", "mtp"), ("probe", "mtp")]
    assert (("probe", "off") in starts) is is_looked_at


# Time


def slower(box: Odd, _life: Life, _request: Request) -> None:
    """Loads as quickly as any until its pairs begin, then takes ten times as long."""
    if box.is_proving:
        box.card = replace(box.card, load_s=(400.0, 500.0))


@pytest.mark.parametrize("seconds", [1900, 2300, 2700])
def test_starts_that_become_slow_in_the_middle_of_the_proof_end_it_without_a_verdict(
    seconds: float,
) -> None:
    one = two_arms()
    outcome = night(one, Odd(one.card, QUIET, asked=slower), seconds / HOUR_S)
    assert outcome.verdict == "inconclusive"
    assert outcome.arm is one.incumbent
    assert outcome.evidence.challenges[-1].outcome == "open"


# Names


def test_a_night_that_goes_on_with_the_same_generator_gives_processes_and_texts_new_names() -> None:
    one = two_arms()
    cut = night(one, Odd(one.card, starts=ending_after(3)))
    history: list[Sample] = list(cut.evidence.samples)
    resumed = night(one, one.box(2), history=history)
    assert history
    assert not {row.process for row in history} & {row.process for row in resumed.evidence.samples}
    asked = {row.request.prompt_id for row in history if row.request is not None}
    again = {row.request.prompt_id for row in resumed.evidence.samples if row.request is not None}
    assert not asked & again


def test_classes_that_look_alike_are_told_apart_by_the_names_of_their_prompts() -> None:
    alike = RequestClass(0.5, "code", 0, 1000, 300)
    workload = Workload((alike, replace(alike, weight=0.3), RequestClass(0.2, "chat", 0, 400, 200)))
    for at, one in enumerate(workload.classes):
        request = Request(
            one.kind, prompt_name("a-s0", at), one.cached_tokens, one.new_tokens, one.n_predict
        )
        assert text_of(workload, request, "a-s0") == at
        assert text_of(workload, replace(request, prompt_id=f"{request.prompt_id}r"), "a-s0") == at


def test_an_arm_with_lists_among_its_values_survives_json() -> None:
    arm = replace(OFF, extra=frozenset({("x.y", ("a", "b"))}))
    assert read(Arm, json.loads(json.dumps(plain(arm)))) == arm


# Failures


def dying(box: Odd, life: Life, _request: Request) -> None:
    """The faster arm dies in one of seven requests of the pairs."""
    if box.is_proving and life.arm.threads == 8:
        box.n_odd += 1
        if box.n_odd % 7 == 0:
            box.dies()


def test_an_arm_that_dies_in_the_middle_of_a_request_is_not_promoted_however_fast() -> None:
    one = two_arms()
    outcome = night(one, Odd(one.card, asked=dying))
    assert outcome.verdict != "promote"
    challenge = outcome.evidence.challenges[0]
    assert challenge.outcome == "failed"
    assert "crash" in challenge.reasons[0]


@pytest.mark.parametrize(("n_failing", "outcome"), [(1, "promote"), (2, "failed")])
def test_one_start_may_fail_for_reasons_of_the_machine_and_not_two(
    n_failing: int, outcome: str
) -> None:
    one = two_arms()
    starts = failing("crash", 8, n=n_failing, only_proving=True)
    assert night(one, Odd(one.card, QUIET, starts=starts)).evidence.challenges[0].outcome == outcome


def test_where_what_serves_does_not_start_the_reason_says_so() -> None:
    one = two_arms()
    outcome = night(one, Odd(one.card, starts=failing("hang", 4)))
    assert outcome.verdict == "inconclusive"
    assert outcome.evidence.reasons == ("what serves could not be measured: hang, hang, hang",)


def test_what_serves_without_room_leaves_its_own_kind_of_speculation_to_be_tried() -> None:
    one = task("12G", "agent", None)
    drafts = Family((2, 4), (0.0,), tuple(range(0, 4097, 512)), ("q8_0",), (512,), (2048,), (8,))
    one = replace(
        one, space=Space({("mainline", "mtp"): drafts}),
        incumbent=replace(OFF, spec="mtp", n_max=2, fit_mib=0, threads=8),
    )  # fmt: skip
    outcome = night(one, one.box(), 0.5)
    assert [row.failure for row in outcome.evidence.samples[:3]] == ["oom", "oom", "oom"]
    assert outcome.evidence.arms
    assert outcome.verdict == "inconclusive"


def test_one_arm_that_hangs_again_and_again_condemns_no_whole_family() -> None:
    one = two_arms()
    one = replace(one, incumbent=replace(one.incumbent, threads=6))
    outcome = night(one, Odd(one.card, starts=failing("hang", 6)))
    assert {row.arm.threads for row in outcome.evidence.arms} == {4, 8}


def shrinking(box: Odd, arm: Arm, boot: Boot) -> Boot:
    """Its engine fits the context to the card: the faster arm gets less of it."""
    is_less = boot.n_ctx and arm.threads == 8
    return replace(boot, n_ctx=box.card.context - 4096) if is_less else boot


def test_an_arm_whose_context_is_smaller_is_not_promoted_however_fast() -> None:
    one = two_arms()
    outcome = night(one, Odd(one.card, QUIET, starts=shrinking))
    assert outcome.verdict != "promote"
    assert not outcome.evidence.challenges
    context = one.card.context
    why = f"its context would be {context - 4096} instead of {context}"
    assert {row.arm.threads: row.reason for row in outcome.evidence.arms} == {4: "", 8: why}


def test_what_refuses_a_class_of_the_workload_is_not_started_all_night() -> None:
    one = two_arms()

    def asked(_box: Odd, life: Life, request: Request) -> None:
        if life.arm == faster(one) and request.kind == "code" and request.new_tokens:
            raise Refused("status 400")

    outcome = night(one, Odd(one.card, QUIET, asked=asked))
    assert outcome.verdict == "keep"
    starts = [sample.arm.threads for sample in outcome.evidence.samples if sample.event == "boot"]
    assert starts == [4, 8, 8, 8]
    reasons = {left.reason for left in outcome.evidence.left_out}
    assert "the server refuses a class of the workload" in reasons


def test_the_context_that_counts_is_what_serves_gets() -> None:
    one = two_arms()
    search = begun_search(one, Odd(one.card, QUIET, starts=shrinking), 4096)
    learner = search.learner
    search.start(one.incumbent, "incumbent")
    server = search.start(faster(one), "explore")
    assert learner.context == one.card.context
    assert search.fill(server) is not None, "filled as far as its own context goes"
    rows = learner.observations.memory_of(faster(one).family, learner.context)
    assert max(row.share for row in rows if row.arm == faster(one)) > 0.95


def test_there_is_room_where_two_errors_of_what_a_full_context_left_are_to_spare() -> None:
    """By one fill that was lucky, 102 MiB seemed to stay where it was 86."""
    one, search = searching()
    arm = faster(one)
    search.fill(search.start(arm, "explore"))
    found = search.limits.headroom(arm)
    assert found is not None
    assert found.was_filled

    def has_room(spare_sds: float) -> bool:
        wanted = round(found.free_mib - spare_sds * found.sd_mib)
        policy = Policy(headroom_mib=wanted)
        return Limits(search.learner, search.grid, policy, one.incumbent).has_room(arm)

    assert [has_room(sds) for sds in (1.5, 2.5)] == [False, True]


@pytest.mark.parametrize(
    ("lucks", "margins", "steps"),
    [
        ((0, -30, -30), tuple(range(0, 4097, 64)), [(512, 112), (640, 210)]),
        ((0, 0, 0), (512, 608), [(512, 112), (608, 208)]),  # no further than to the largest
    ],
)
def test_a_margin_that_left_too_little_grows_by_so_much_that_an_unlucky_load_has_room(
    lucks: tuple[int, ...], margins: tuple[int, ...], steps: list[tuple[int, int]]
) -> None:
    """A fill takes minutes: nights of an hour filled three and four times, and had none left for their pairs."""
    loads = iter(lucks)

    def starts(box: Odd, arm: Arm, boot: Boot) -> Boot:
        box.n_odd = next(loads)
        return replace(boot, vram_free_mib=arm.fit_mib - 200 + box.n_odd)

    def answers(box: Odd, life: Life, _: Request, answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "vram_free_min_mib": life.arm.fit_mib - 400 + box.n_odd}

    one, search = searching(margins=margins, starts=starts, answers=answers)
    finalist = Finalist(search)
    found = finalist.prepare(replace(faster(one), fit_mib=512))
    assert [(step.fit_mib, step.free_mib) for step in finalist.steps] == steps
    assert found is not None
    assert found.fit_mib == steps[-1][0]
    fills = [sample for sample in search.night.samples if sample.purpose == "fill"]
    assert len(fills) == 1, "with a smaller margin it was full already"


def test_a_context_that_took_all_there_was_is_filled_again_with_a_larger_margin() -> None:
    """How much more it would have taken nobody saw, so that a load with more margin does not tell what is left."""

    def starts(_box: Odd, arm: Arm, boot: Boot) -> Boot:
        return replace(boot, vram_free_mib=arm.fit_mib)

    def answers(_box: Odd, life: Life, _: Request, answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "vram_free_min_mib": max(life.arm.fit_mib - 700.0, 0.0)}

    one, search = searching(margins=tuple(range(0, 4097, 64)), starts=starts, answers=answers)
    found = Finalist(search).prepare(replace(faster(one), fit_mib=512))
    assert found is not None
    assert found.fit_mib >= 700 + search.limits.headroom_mib


@pytest.mark.parametrize(("free_mib", "is_slower"), [(2040, True), (9000, False)])
def test_a_larger_cache_is_thought_to_cost_speed_where_weights_make_room_for_it(
    free_mib: int, is_slower: bool
) -> None:
    one, search = searching(starts=seen(vram_free_mib=free_mib))
    assert search.measure(one.incumbent, "incumbent")
    arms = [one.incumbent, replace(one.incumbent, kv="f16")]
    usual, larger = search.learner.predictions(arms)[0].tolist()
    assert larger - usual > 0.05 if is_slower else larger == pytest.approx(usual, abs=1e-3)


def test_a_larger_cache_costs_a_family_without_starts_nothing_where_all_fits() -> None:
    """Where nothing moves for its relatives, nothing moves for what drafts nothing either."""
    one = task("12G", "agent", None)
    search = begun_search(one, Odd(one.card, QUIET, starts=seen(vram_free_mib=9000)))
    assert one.incumbent.drafts
    assert search.measure(one.incumbent, "incumbent")
    off = replace(OFF, engine=one.incumbent.engine)
    usual, larger = (search.learner.without_drafts(replace(off, kv=kv)) for kv in ("q8_0", "f16"))
    assert larger == pytest.approx(usual, abs=1e-3)


def test_a_context_that_is_shared_out_is_full_when_all_slots_are() -> None:
    one = two_arms()
    context = one.card.context // 2
    box = Odd(one.card, QUIET, starts=seen(n_ctx=context))
    search = begun_search(one, box, context, n_slots=2)
    server = search.start(one.incumbent, "incumbent")

    def fullest() -> float:
        rows = search.learner.observations.memory_of(one.incumbent.family, context)
        return max(row.share for row in rows)

    assert server.ask(Request("code", "one", 0, context - 1000, 8), "fill") is not None
    assert 0.4 < fullest() < 0.6, "of one slot alone"
    assert search.fill(server) is not None
    assert fullest() > 0.95
    asked = [row.request for row in search.night.samples if row.purpose == "fill"]
    assert [one.concurrency for one in asked if one is not None] == [1, 2]


def forgets(engine: str) -> Asked:
    """An engine reads every prefix anew."""

    def asked(_box: Odd, life: Life, _request: Request) -> None:
        if life.arm.engine == engine:
            life.checkpoints = ()

    return asked


@pytest.mark.parametrize("n_void", [0, 1])
def test_an_engine_that_was_not_disturbed_and_finds_no_prefix_is_known_until_the_night_is_cut(
    n_void: int,
) -> None:
    """One that goes on finds out anew, and knows which engines tell their steps."""
    one = task("12G", "agent", None)
    box = Odd(one.card, QUIET, asked=forgets("mainline"),
              answers=lambda _box, _life, _request, answer: {**answer, "n_void": n_void})  # fmt: skip
    first = begun_search(one, box).night
    Server(first, one.incumbent, "explore").block()
    assert first.broken_caches == (set() if n_void else {("mainline", False)})
    again = begun_search(one, Odd(one.card, QUIET)).night
    again.recall(as_samples(plain(each) for each in first.samples))
    assert not again.broken_caches
    assert again.tells_steps("mainline")


@pytest.mark.parametrize(("others", "while_searching", "proving"), [
    ([RequestClass(1, "chat", 42_000, 1_200, 500)], (42_000, 1_241), (42_000, 1_241)),
    ([RequestClass(1, "chat", n, 600, 500) for n in (42_000, 60_000)], (42_000, 1_241), (0, 43_241)),
    ([RequestClass(1, "chat", 4_000, 1_200, 500)], (0, 43_241), (0, 43_241)),
    ([RequestClass(1, "chat", 0, 20_000, 500)], (42_985, 256), (0, 43_241)),
    ([], (0, 43_241), (0, 43_241)),
], ids=["a prefix as long is read anyway", "with a longer one", "a short one is", "another long prompt", "alone"])  # fmt: skip
def test_a_long_prompt_is_read_once_and_a_proof_reads_all_of_it(
    others: list[RequestClass], while_searching: tuple[int, int], proving: tuple[int, int]
) -> None:
    long = RequestClass(1, "chat", 0, 43_241, 500)
    one, search = searching(Workload((long, *others)))
    night = search.night

    def split(*, exact: bool) -> tuple[int, int]:
        asked = night.request(one.incumbent, long, "a", exact=exact)
        return asked.cached_tokens, asked.new_tokens

    assert (split(exact=False), split(exact=True)) == (while_searching, proving)
    longer = RequestClass(1, "chat", 10_000, 33_241, 500)
    assert night.request(one.incumbent, longer, "a", exact=True).cached_tokens == 10_000
    beside = replace(long, concurrency=4)
    assert night.request(one.incumbent, beside, "a", exact=False).cached_tokens == 0
    night.broken_caches.add(("mainline", False))
    assert split(exact=False) == (0, 43_241), "no prefix is found there"


LONG = RequestClass(1, "chat", 0, 21_200, 64)
BEHIND = Workload((LONG, RequestClass(1, "chat", 20_000, 600, 64)))


def finds_prefixes(
    _box: Odd, _life: Life, asked: Request, answer: dict[str, Any]
) -> dict[str, Any]:
    """It read no prefix, for it knew them all."""
    return answer if asked.new_tokens else {**answer, "prompt_n": 8, "prompt_ms": 5.0}


def test_a_sweep_shows_the_whole_turn_of_a_prompt_that_was_read_in_two_parts() -> None:
    prompts = LONG, RequestClass(1, "code", 20_000, 600, 64)
    one = replace(two_arms(), workload=Workload(prompts))
    outcome = night(one, Odd(one.card, QUIET))
    shown = {(turn.arm, turn.kind): turn.wall_s for turn in outcome.evidence.turns}
    truth = Truth(one.card)
    for asked in prompts:
        whole_s = truth.turn_ms(one.incumbent, Workload((asked,))) / 1000
        assert shown[str(one.incumbent), asked.kind] == pytest.approx(whole_s, rel=0.05)


def goes_back(_box: Odd, life: Life, request: Request) -> None:
    """A recurrent model may go back to a checkpoint some way before the prefix's end."""
    if request.new_tokens:
        life.checkpoints = (18_432,) if life.checkpoints else ()


@pytest.mark.parametrize(
    ("odd", "asks_whole"),
    [({}, False), ({"asked": goes_back}, False), ({"answers": finds_prefixes}, True)],
    ids=["with the time that its prefix took", "with what was read of it again once", "asked for whole"],
)  # fmt: skip
def test_a_long_prompt_behind_a_prefix_counts_whole_however_its_prefix_is_read(
    odd: dict[str, Any], *, asks_whole: bool
) -> None:
    def proved(workload: Workload, **odd: Any) -> tuple[float, bool]:
        """Time of the long prompt in a proof, the server fresh; and whether it was asked for whole."""
        one, search = searching(workload, **odd)
        found = Server(search.night, one.incumbent, "verdict").block(exact=True)[0].prompt_ms
        sizes = [row.request.new_tokens for row in search.night.samples if row.request]
        return found or 0.0, LONG.new_tokens in sizes

    alone_ms, _ = proved(Workload((LONG,)))
    behind_ms, is_whole = proved(BEHIND, **odd)
    assert behind_ms == pytest.approx(alone_ms, rel=0.02)
    assert is_whole is asks_whole


def test_a_pair_whose_first_side_shows_that_prompts_are_asked_whole_is_not_measured_again() -> None:
    one, search = searching(BEHIND, answers=finds_prefixes)
    result = paired(search, faster(one))
    starts = [row for row in search.night.samples if row.event == "boot"]
    assert len(starts) == 2 * len(result.pairs)
    (kept,) = carried(search.night.samples, one.incumbent, BEHIND)
    assert kept.pairs == result.pairs


def test_both_sides_of_a_pair_are_asked_alike_though_one_engine_finds_no_prefix() -> None:
    """That shows in the middle of the first pair, which is measured again; both engines are the same in all else."""
    one = two_arms()
    card = replace(one.card, engines=dict.fromkeys(("mainline", "ik"), one.card.engines["mainline"]), quirk_sd=0.0)  # fmt: skip
    mix = Workload((RequestClass(1, "chat", 0, 9_000, 64), RequestClass(0.005, "chat", 8_300, 600, 64)))  # fmt: skip
    one = replace(one, workload=mix)
    search = begun_search(one, Odd(card, QUIET, asked=forgets("ik")))
    result = paired(search, replace(one.incumbent, engine="ik"))
    assert len(result.pairs) > 1
    for pair in result.pairs:
        assert class_ms(pair.a)[0] == pytest.approx(class_ms(pair.b)[0], rel=0.001)
    (found,) = carried(search.night.samples, one.incumbent, mix)
    assert found.pairs == result.pairs
    lives = list(dict.fromkeys(sample.process for sample in search.night.samples))
    first = [sample for sample in search.night.samples if sample.process in lives[:2]]
    assert not carried(first, one.incumbent, mix), "cut before it was measured again"


def test_a_pair_that_fits_into_the_night_is_measured_whole() -> None:
    """Its second side was cut off where a third more than usual would not have fitted: gains of 57 and 53 % were lost."""
    one, search = searching(Workload((RequestClass(1, "chat", 0, 300, 4000),)))
    candidate = replace(one.incumbent, engine="ik")
    assert search.measure(one.incumbent, "incumbent")
    assert search.measure(candidate, "explore")
    pair_s = sum(map(search.night.usual_process_s, (one.incumbent, candidate)))
    search.night.box.sleep(search.night.remaining_s - 1.05 * pair_s)
    assert len(paired(search, candidate).pairs) == 1


def test_an_engine_that_turns_out_to_find_no_prefix_does_not_take_a_night_past_its_end() -> None:
    lives = list[Life]()
    mix = Workload((LONG, replace(LONG, kind="code"), replace(LONG, kind="math")))

    def asked(_box: Odd, life: Life, _request: Request) -> None:
        lives.extend([life] if life not in lives else [])
        if len(lives) > 1:
            life.checkpoints = ()

    one, search = searching(mix, asked=asked)
    assert search.measure(one.incumbent, "incumbent")
    before_s = search.night.process_s(one.incumbent)
    search.night.box.sleep(search.night.remaining_s - before_s - 1.0)
    with pytest.raises(TimeUp):
        search.measure(one.incumbent, "explore")
    assert search.night.remaining_s > 0


def test_what_drafts_nothing_is_asked_for_few_tokens_while_searching() -> None:
    one, search = searching(Workload((RequestClass(1, "chat", 0, 300, 900),)))
    drafts = replace(one.incumbent, spec="mtp", n_max=4)
    lengths = [
        search.night.request(arm, one.workload.classes[0], "a", exact=exact).n_predict
        for arm in (one.incumbent, drafts)
        for exact in (False, True)
    ]
    assert lengths == [128, 900, 512, 900]


def test_a_long_night_asks_for_whole_answers_while_it_searches() -> None:
    lengths = []
    for hours in (1.0, 2.0):
        search = begun_search(task("16G", "chat", 1), Odd(task("16G", "chat", 1).card, QUIET))
        search.night.budget_s = hours * HOUR_S
        drafts = replace(search.incumbent, spec="mtp", n_max=4)
        classes = search.night.workload.classes
        lengths.append(
            [search.night.request(drafts, c, "a", exact=False).n_predict for c in classes]
        )
    assert lengths == [[512, 600, 512], [c.n_predict for c in classes]]


def test_a_short_night_asks_for_whole_answers_where_prompts_take_most_of_a_start() -> None:
    """There they cost little, and what drafts one kind finds at an answer's beginning another finds at its end."""
    one = task("24G", "deep", 1)
    search = begun_search(one, Odd(one.card, QUIET))
    classes = one.workload.classes

    def asked(arm: Arm) -> list[int]:
        return [search.night.request(arm, c, "a", exact=False).n_predict for c in classes]

    assert asked(one.incumbent) == [c.n_predict for c in classes]
    assert max(asked(replace(one.incumbent, spec="ngram"))) < max(asked(one.incumbent))


def test_each_start_of_an_arm_that_may_lead_is_asked_tool_calls_until_it_has_a_winners() -> None:
    asked = list[Request]()
    one, search = searching(
        asked=lambda _box, _life, each: asked.append(each),
        answers=lambda _box, _life, each, answer: {**answer, "tool_ok": True if not each.ignore_eos else None},
    )  # fmt: skip
    search.measure(one.incumbent, "incumbent")
    n_usual, counts = len([each for each in asked if not each.ignore_eos]), list[int]()
    assert n_usual == 1, "whether it makes any"
    for _ in range(6):
        search.measure(replace(faster(one), kv="q4_0"), "explore")
        counts.append(sum(not each.ignore_eos for each in asked) - n_usual)
    assert counts == [16, 32, 48, 64, 80, 80]


def test_a_few_tool_calls_let_an_arm_lead_and_all_of_them_let_it_be_deployed() -> None:
    one, search = searching()
    arm = replace(one.incumbent, kv="q4_0")
    request = Request("tool", "a", 0, 200, 32, ignore_eos=False)

    def after(n_calls: int) -> tuple[bool, bool]:
        for _ in range(n_calls):
            search.night.answered(a_sample(arm, "tool", request, answer={"tool_ok": True}))
        search.learner.refresh()
        return search.limits.is_output_screened(arm), search.limits.is_output_proven(arm)

    few = search.limits.screening_calls
    assert after(few - 1) == (False, False)
    assert after(1) == (True, False)
    assert after(Policy().tool_calls - few) == (True, True)


def test_a_warm_up_that_hung_or_died_makes_none_after_it_dear() -> None:
    one, search = searching()
    it, arm, asked = search.night, one.incumbent, Request("", "", 0, 64, 16)
    before_s = it.usual_start_s(arm)
    for seconds, failure in ((1.5, ""), (1.7, ""), (300.0, ""), (120.0, "hang"), (1.6, "")):
        it.answered(a_sample(arm, WARM_UP, asked, seconds=seconds, failure=failure))
    assert it.usual_s(arm, WARM_UP, 5.0) == pytest.approx(1.65)
    assert it.usual_start_s(arm) == pytest.approx(before_s - 5.0 + 1.65)
    assert it.start_s(arm) == pytest.approx(it.load_s(arm) + 5.0)
    assert it.usual_s(replace(arm, engine="other"), WARM_UP, 5.0) == 5.0, "of another engine"


# Tools


def with_tools(usual: float, faster: float) -> Outcome:
    """A night on a box on which calls break at a rate for all, and at another for the faster arm."""

    def answers(box: Odd, life: Life, _request: Request, answer: dict[str, Any]) -> dict[str, Any]:
        rate = faster if life.arm.threads == 8 else usual
        is_call = "tool_ok" in answer
        return answer | ({"tool_ok": bool(box._rng.random() >= rate)} if is_call else {})

    one = two_arms()
    chat = Workload((RequestClass(1.0, "chat", 0, 500, 200),))
    return night(replace(one, workload=chat), Odd(one.card, answers=answers))


def test_an_arm_that_breaks_tool_calls_is_not_promoted_though_others_like_it_do_not() -> None:
    outcome = with_tools(0.0, 0.2)
    assert outcome.verdict != "promote"
    assert any("tool calls broke" in one.reason for one in outcome.evidence.left_out)


def test_the_context_of_a_finalist_that_is_known_to_break_tool_calls_is_not_filled() -> None:
    one, search = searching()
    arm, request = faster(one), Request("tool", "a", 0, 200, 32, ignore_eos=False)
    search.measure(one.incumbent, "incumbent")
    search.night.answered(a_sample(arm, "tool", request, answer={"tool_ok": False}))
    search.learner.refresh()
    search.learn_usual_tools()

    assert Finalist(search).prepare(arm) is None
    assert [row for row in search.night.samples if row.purpose == "fill"] == []


@pytest.mark.parametrize("refuses", [False, True], ids=["answers otherwise", "refuses"])
def test_a_build_that_makes_no_tool_call_where_what_serves_does_is_not_promoted(
    refuses: bool,
) -> None:
    """Whether a model makes any, a box learns by the first one: the candidate is asked before what serves."""
    one, made = two_arms(), set[Arm]()

    def told(_box: Odd, life: Life, request: Request, answer: dict[str, Any]) -> dict[str, Any]:
        answer.pop("tool_ok", None)
        if request.ignore_eos:
            return answer
        if life.arm != faster(one):
            made.add(life.arm)
        elif refuses:
            raise Refused("status 500")
        is_whole = True if life.arm in made else (False if made else None)
        return answer if is_whole is None else {**answer, "tool_ok": is_whole}

    outcome = night(one, Odd(one.card, QUIET, answers=told))
    assert outcome.verdict == "keep", outcome.evidence.reasons
    assert made == {one.incumbent}


def test_a_model_that_makes_no_tool_calls_costs_a_few_requests_and_no_start() -> None:
    def told(_box: Odd, _life: Life, _request: Request, answer: dict[str, Any]) -> dict[str, Any]:
        answer.pop("tool_ok", None)
        return answer

    one = two_arms()
    outcome = night(one, Odd(one.card, QUIET, answers=told))
    assert outcome.arm == faster(one)
    rows = [row for row in outcome.evidence.samples if row.purpose in {TOOL, "tools"}]
    starts = [row.purpose for row in outcome.evidence.samples if row.event == "boot"]
    assert len(rows) == TELLING_CALLS + starts.count("finalist")


def test_a_model_that_breaks_some_calls_anyway_keeps_no_faster_arm_out() -> None:
    assert with_tools(0.1, 0.1).verdict == "promote"


def test_tool_calls_are_asked_in_a_way_that_a_real_server_offers_tools() -> None:
    outcome = with_tools(0.0, 0.0)
    calls = [row.request for row in outcome.evidence.samples if row.purpose == "tool"]
    assert len(calls) >= Policy().tool_calls
    assert calls[0] is not None
    sent, _ = composed(Texts(the_book(), seed=1), calls[0], 0)
    assert sent[0].has_tools


# Caches


def test_an_engine_without_a_cache_of_prompts_leaves_the_others_their_warm_ones() -> None:
    one = two_arms()
    families = {("ik", "off"): one.space.families["mainline", "off"], **one.space.families}
    outcome = night(replace(one, space=Space(families)), Odd(one.card, asked=forgets("ik")), 2.0)
    cold: dict[str, list[bool]] = {"ik": [], "mainline": []}
    for row in outcome.evidence.samples:
        if row.purpose == "block" and row.answer is not None and row.request is not None:
            cold[row.arm.engine].append(row.answer["prompt_n"] > row.request.new_tokens + 64)
    assert all(cold["ik"])
    assert cold["mainline"]
    assert not any(cold["mainline"])
    assert outcome.arm == faster(one)


class OwnSlots(SimulatedBox):
    """Requests at once are answered by slots that share nothing."""

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        if request.concurrency == 1:
            return super().measure(request, arm)
        assert self._life is not None
        held, self._life.checkpoints = self._life.checkpoints, ()
        try:
            return super().measure(request, arm)
        finally:
            self._life.checkpoints = held


def test_slots_that_share_nothing_do_not_cost_single_requests_their_warm_prefix() -> None:
    one = two_arms()
    crowd = RequestClass(0.5, "chat", 2000, 500, 200, concurrency=4)
    workload = Workload((*one.workload.classes, crowd))
    outcome = night(replace(one, workload=workload), OwnSlots(one.card))
    alone = [
        row.answer["prompt_n"] <= row.request.new_tokens + 64
        for row in outcome.evidence.samples
        if row.purpose == "block" and row.answer and row.request and row.request.concurrency == 1
    ]
    assert alone
    assert all(alone)
    crowded = [
        row.request.prompt_id.endswith("r")
        for row in outcome.evidence.samples
        if row.request is not None and row.request.concurrency > 1
    ]
    assert sum(crowded) == 1
