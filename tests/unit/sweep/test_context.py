"""The largest context that holds a speed, on simulated boxes whose cache grows with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from benchmarks.simulator.box import QUIET, Noise, SimulatedBox, Truth
from benchmarks.simulator.tasks import Task, task
from tests.support.made_sweep import begun_search
from tunerd.profile.arm import CONTEXT_SIZE, Arm, Boot, Extra, Policy, Refused, Request, Space
from tunerd.sweep.context import Floor, sizes_between
from tunerd.sweep.tuner import Outcome, sentence_of

SERVED = 131072
LARGER = {"12G": 4.0, "24G": 1.0}
SIZES = sizes_between(32768, 262144)


def context(size: int) -> Extra:
    return frozenset({(CONTEXT_SIZE, size)})


Starts = Callable[[Arm, Boot], Boot]
Asked = Callable[["GrowingBox", Request], None]
Answers = Callable[[Request, dict[str, Any]], None]


@dataclass
class GrowingBox(SimulatedBox):
    """Its cache grows with the context that an arm asks for, and is larger than that of the published models.

    A test may make something else of a start, of a request before it is answered, and of an answer.
    """

    starts: Starts = lambda _arm, boot: boot
    asked: Asked = lambda _box, _request: None
    answers: Answers = lambda _request, _answer: None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole = self.card

    def restart(self, arm: Arm) -> Boot:
        share = arm.context_size / SERVED
        kv_mib = {
            kv: LARGER[self.whole.name] * mib * share for kv, mib in self.whole.kv_mib.items()
        }
        self.card = replace(self.whole, context=arm.context_size, kv_mib=kv_mib)
        self.truth = Truth(self.card)
        return self.starts(arm, super().restart(arm))

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        self.asked(self, request)
        answer = dict(super().measure(request, arm))
        self.answers(request, answer)
        return answer


@dataclass(frozen=True)
class Scene:
    one: Task

    def truly_tok_s(self, size: int) -> float:
        """Speed of the workload at a size, without noise."""
        box = GrowingBox(self.one.card)
        arm = replace(self.one.incumbent, extra=context(size))
        box.restart(arm)
        tokens = decode_ms = 0.0
        for one in self.one.workload.classes:
            prompt_ms = box.truth.prompt_ms(arm, one.new_tokens, one.cached_tokens)
            token_ms = (box.truth.class_ms(arm, one) - prompt_ms) / (one.n_predict - 1)
            tokens += one.weight * one.n_predict
            decode_ms += one.weight * one.n_predict * token_ms
        return 1000 * tokens / decode_ms

    def night(
        self,
        wanted_tok_s: float,
        *,
        hours: float = 4.0,
        noise: Noise = QUIET,
        may_change_output: bool = False,
        rejected: tuple[tuple[Arm, str], ...] = (),
        **odd: Any,
    ) -> Outcome:
        policy = Policy(
            may_change_output=may_change_output, at_least_tok_s=wanted_tok_s, rejected=rejected
        )
        return self.one.night(hours, box=GrowingBox(self.one.card, noise, **odd), policy=policy)


def scene(name: str, mix: str) -> Scene:
    one = task(name, mix, 1)
    start = replace(one.incumbent, fit_mib=1280, extra=context(SERVED))
    own = one.space.families[start.family]
    family = replace(
        own, fit_mib=tuple(range(1280, 4097, 64)), n_max=(start.n_max,), p_min=(start.p_min,), ubatch=(start.ubatch,), batch=(start.batch,),
        threads=(start.threads,), kv=(start.kv,), extra=tuple(map(context, SIZES)),
    )  # fmt: skip
    return Scene(replace(one, incumbent=start, space=Space({start.family: family})))


def refuses(sizes: range) -> Starts:
    """A build refuses some contexts."""
    refused = Boot(ok=False, seconds=1.0, failure="refused")
    return lambda arm, boot: refused if arm.context_size in sizes else boot


@pytest.fixture
def here() -> Scene:
    return scene("12G", "agent")


@pytest.mark.parametrize(
    "sizes", [range(0), range(SERVED + 1), range(163841, 1 << 24)],
    ids=["every size serves", "small ones are refused, which says nothing of larger ones",
         "large ones are refused while smaller ones serve"],
)  # fmt: skip
def test_the_largest_context_that_holds_the_speed_is_found_and_proved(
    here: Scene, sizes: range
) -> None:
    outcome = here.night(here.truly_tok_s(163840) * 0.97, starts=refuses(sizes))
    assert outcome.verdict == "promote", outcome.evidence.reasons
    assert outcome.arm.context_size == 163840
    assert outcome.evidence.challenges[-1].outcome == "promote"
    assert outcome.evidence.restarts < 30


@pytest.mark.parametrize("share", [0.97, 1.03])
def test_under_noise_no_context_is_taken_that_does_not_hold_the_speed(
    here: Scene, share: float
) -> None:
    wanted = here.truly_tok_s(SERVED) * share
    outcome = here.night(wanted, noise=Noise())
    assert outcome.verdict in {"promote", "keep"}
    if outcome.verdict == "promote":
        assert here.truly_tok_s(outcome.arm.context_size) > wanted


@pytest.mark.parametrize(
    ("size", "share", "more", "why"),
    [
        (SERVED, 0.97, 0.5, ("no larger context holds",)),
        (SIZES[0], 1.5, 0.0, ("no context holds", "tok/s, too slow")),
    ],
)
def test_what_serves_stays_where_no_larger_context_holds_the_speed(
    here: Scene, size: int, share: float, more: float, why: tuple[str, ...]
) -> None:
    outcome = here.night(here.truly_tok_s(size) * share + more)
    assert (outcome.verdict, outcome.arm) == ("keep", here.one.incumbent), outcome.evidence.reasons
    said = sentence_of(outcome, here.one.incumbent, "agent")
    assert all(one in said for one in why)


def test_a_smaller_context_is_what_holds_a_speed_that_the_present_one_does_not(here: Scene) -> None:
    wanted = here.truly_tok_s(SERVED) * 1.04
    assert here.truly_tok_s(SIZES[0]) > 1.03 * wanted
    outcome = here.night(wanted)
    assert outcome.verdict == "promote", outcome.evidence.reasons
    assert SIZES[0] <= outcome.arm.context_size < SERVED


@pytest.mark.parametrize(("n_moods", "why"), [(1, ""), (10**9, "what serves has more context")])
def test_less_context_than_serves_is_not_taken_because_a_request_failed(
    here: Scene, n_moods: int, why: str
) -> None:
    """The larger ones are too slow, the smaller ones are not, and neither is what serves."""
    moods = iter(range(n_moods))

    def asked(box: GrowingBox, request: Request) -> None:
        is_one = request.new_tokens == 1500 and box.card.context == SERVED
        if is_one and next(moods, None) is not None:
            raise Refused("cut off")  # which is the machine's mistake and not its own

    speed = (here.truly_tok_s(SERVED) * here.truly_tok_s(163840)) ** 0.5
    outcome = here.night(speed, asked=asked)
    assert outcome.arm.context_size == SERVED
    assert outcome.verdict == ("inconclusive" if why else "keep")
    assert why in "; ".join(outcome.evidence.reasons)


def test_a_context_that_runs_out_of_memory_is_not_taken_however_fast_it_is() -> None:
    """On the 24 GB card everything must lie on it: more context is as fast until it does not fit."""
    here = scene("24G", "deep")
    found = here.night(here.truly_tok_s(SERVED) * 0.5, hours=12.0).arm
    box = GrowingBox(here.one.card)
    box.restart(found)
    assert box.truth.headroom_mib(found) > 0


def test_a_night_that_is_too_short_proves_nothing_and_deploys_nothing(here: Scene) -> None:
    outcome = here.night(here.truly_tok_s(SERVED) * 0.9, hours=0.2)
    assert (outcome.verdict, outcome.arm) == ("inconclusive", here.one.incumbent)
    assert "time ran out" in outcome.evidence.reasons[0]


def test_a_proof_of_a_speed_takes_the_time_of_its_starts_and_not_of_another_side(
    here: Scene,
) -> None:
    one = here.one
    box = GrowingBox(one.card, QUIET)
    search = begun_search(one, box)
    search.measure(one.incumbent, "incumbent")
    start_s = search.night.usual_process_s(one.incumbent)
    box.sleep(search.night.remaining_s - 4.5 * start_s)
    policy = Policy(at_least_tok_s=0.8 * here.truly_tok_s(SERVED), min_gain=0.0)
    nobody = replace(one.incumbent, engine="")
    result = Floor(search.night, search.limits, policy, nobody, one.incumbent, 1).run()
    assert (result.outcome, len(result.pairs)) == ("promote", 4), result.reasons
    speed, told = result.reasons[0].split(" ", 1)
    assert float(speed) == pytest.approx(here.truly_tok_s(SERVED), rel=0.05)
    assert told == "tok/s over 4 starts"


def test_sizes_are_a_quarter_of_a_power_of_two_apart_and_end_at_the_trained_one() -> None:
    assert sizes_between(8192, 20000) == (8192, 10240, 12288, 14336, 16384, 20000)


def test_a_server_that_gives_less_context_than_it_is_asked_for_wins_nothing(here: Scene) -> None:
    outcome = here.night(
        50.0, starts=lambda _arm, boot: replace(boot, n_ctx=min(boot.n_ctx or 0, 65536))
    )
    assert outcome.verdict == "keep" or outcome.arm.context_size <= 65536


def test_a_speed_is_told_without_the_first_token_which_no_time_covers(here: Scene) -> None:
    """The 16 tokens behind a full context seemed to come at 42.7 tok/s."""

    def answers(request: Request, answer: dict[str, Any]) -> None:
        decode_ms = 25.0 * (request.n_predict - 1)  # the first comes with its prompt
        wall_ms = answer["prompt_ms"] + decode_ms
        answer.update(steps=None, predicted_ms=decode_ms, wall_ms=wall_ms)

    reasons = here.night(39.0, answers=answers).evidence.reasons
    assert "40.0 tok/s, 40.0 with a full context" in reasons[-1], reasons


def test_answers_without_their_speed_prove_nothing(here: Scene) -> None:
    def answers(request: Request, answer: dict[str, Any]) -> None:
        if "-v" in request.prompt_id:  # it is proved
            del answer["predicted_ms"]

    outcome = here.night(here.truly_tok_s(163840) * 0.9, answers=answers)
    assert outcome.verdict == "keep", outcome.evidence.reasons


def test_an_arm_that_failed_in_service_is_not_proved_again(here: Scene) -> None:
    bad = replace(here.one.incumbent, extra=context(163840))
    outcome = here.night(
        here.truly_tok_s(163840) * 0.96, rejected=((bad, "taken back in service"),)
    )
    assert outcome.verdict == "keep", outcome.evidence.reasons
    assert not any(row.arm == bad for row in outcome.evidence.samples)


def test_what_was_proved_stays_when_the_time_ends_among_other_cache_types(here: Scene) -> None:
    ((family, own),) = here.one.space.families.items()
    here = Scene(replace(here.one, space=Space({family: replace(own, kv=("q8_0", "q4_0"))})))
    outcome = here.night(here.truly_tok_s(163840) * 0.96, hours=1.0, may_change_output=True)
    proved = [one for one in outcome.evidence.challenges if one.outcome == "promote"]
    assert proved
    assert outcome.verdict == "promote", outcome.evidence.reasons
    assert outcome.arm == proved[-1].candidate
