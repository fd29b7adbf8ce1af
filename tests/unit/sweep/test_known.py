"""What is known from elsewhere: published laws, what the server in service answered, what other boxes tell."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator.box import Truth
from benchmarks.simulator.tasks import Task, task
from tests.support.bench_samples import logged
from tests.support.folders import DATA, ROOT
from tests.support.made_sweep import narrow, simulated_night
from tunerd.engine.log import LoggedRequest
from tunerd.profile.arm import Arm, Request, Sample
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep.known import (
    Known,
    Law,
    Study,
    Told,
    best_now,
    compare_drafts,
    known_by,
    known_of,
    published,
    samples_of,
)
from tunerd.sweep.laws import (
    N_PROMPT_TERMS,
    N_STEP_TERMS,
    Counts,
    StepRow,
    StepTable,
    by_length,
    fit_acceptance,
    fit_steps,
    n_parameters,
)
from tunerd.sweep.learner import Learner
from tunerd.sweep.night import Night, Server
from tunerd.sweep.observations import acceptance_of

SERVES = Arm("mainline", "mtp", 3, 0.75, 512, "q8_0", 512, 2048, 8)
WORKLOAD = Workload((RequestClass(3, "code", 0, 300, 100), RequestClass(1, "chat", 0, 500, 300)))


def in_service(one: Task) -> tuple[LoggedRequest, ...]:
    """What a box logs of requests that are about as long as the workload's."""
    box, rng, found = one.box(seed=5, tells_steps=False), np.random.default_rng(5), []
    for life in range(3):
        box.restart(one.incumbent)
        for at in range(20):
            like = one.workload.classes[
                rng.choice(len(one.workload.classes), p=one.workload.shares)
            ]
            new, predicted = (round(size * math.exp(rng.normal(0, 0.4)))
                              for size in (like.new_tokens, like.n_predict))  # fmt: skip
            asked = Request(like.kind, f"{life} {at}", like.cached_tokens, new, predicted)
            told = box.measure(asked)
            found.append(LoggedRequest(
                told["prompt_n"], told["prompt_ms"], told["predicted_n"], told["predicted_ms"],
                told["cache_n"], told.get("draft_n"), told.get("draft_n_accepted"), 1,
            ))  # fmt: skip
    return tuple(found)


def error(one: Task, known: Mapping[tuple[str, str], Known]) -> float:
    """How far off other settings of drafts are believed to be, after one start of what serves (log, rms)."""
    learner, truth = learned(one, known=known, tells_steps=False), Truth(one.card)
    arms = [
        one.incumbent,
        *(one.incumbent.with_draft(n, p) for n in (1, 2, 4, 8) for p in (0.0, 0.9)),
    ]
    beliefs = np.array([belief.mean for belief in learner.beliefs(arms) if belief is not None])
    real = np.log([truth.turn_ms(arm, one.workload) for arm in arms])
    return float(np.sqrt(np.mean(np.square((beliefs - beliefs[0]) - (real - real[0])))))


def test_what_was_served_tells_which_other_settings_would_be_faster() -> None:
    one = task("12G", "agent", 1)
    law = known_by(in_service(one), one.incumbent, one.workload)
    assert law is not None
    assert error(one, {one.incumbent.family: law}) < 0.6 * error(one, {})


def test_a_request_counts_for_the_class_that_it_is_most_like_if_it_was_alone() -> None:
    kinds = [one.request.kind for one in samples_of(
        [logged(290, 120), logged(450, 250), logged(40, 300, cached_n=450), logged(400, 20),
         logged(290, 120, concurrency=2), logged(290, 120, cached_n=None), replace(logged(290, 120), prompt_n=10**400),
         logged(290, 120, 10**400, 1), logged(290, 120, 200, 130)], SERVES, WORKLOAD,
    ) if one.request is not None]  # fmt: skip
    assert kinds == ["code", "chat", "chat", "code"]


def test_a_server_that_was_asked_nothing_leaves_what_was_known() -> None:
    before = Known()
    assert known_by([], SERVES, WORKLOAD, before) is before
    assert known_by([logged(300, 1)], SERVES, WORKLOAD) is None


@pytest.mark.parametrize("ms", [1e200, 0.0])
def test_times_that_no_request_takes_are_no_prior(ms: float) -> None:
    asked = [logged(290, 120, 60, 40), logged(480, 250, 90, 60)] * 5
    forged = replace(logged(290, 120, 60, 40), predicted_ms=ms)
    found, without = (known_by(one, SERVES, WORKLOAD) for one in ([*asked, forged], asked))
    assert found is not None
    assert without is not None
    assert found.step is not None
    assert without.step is not None
    assert found.step.tolist() == without.step.tolist()


# Whether drafts are alike


def answered(kind: str, drafted: int, accepted: int, *, n: int = 100, arm: Arm = SERVES) -> Sample:
    told = {"predicted_n": n, "predicted_ms": 1000.0, "draft_n": drafted,
            "draft_n_accepted": accepted}  # fmt: skip
    return Sample(
        event="request", process="p", arm=arm, purpose="block", at_s=0.0, seconds=1.0,
        request=Request(kind, "one", 0, 300, 100), n_max=arm.n_max, p_min=arm.p_min, answer=told,
    )  # fmt: skip


def test_a_class_counts_by_its_weight_and_its_length() -> None:
    samples = [answered("code", 90, 90), answered("chat", 30, 0), answered("chat", 60, 0, n=200)]
    # Of a turn 300 tokens are code, with 270 drafts all right, and 300 are chat, with 90 all wrong.
    assert acceptance_of(samples, SERVES, WORKLOAD) == pytest.approx(270 / 360)
    of_other_settings = answered("chat", 30, 0, arm=replace(SERVES, n_max=6))
    assert acceptance_of([answered("code", 90, 90), of_other_settings], SERVES, WORKLOAD) is None


@pytest.mark.parametrize(
    ("here", "n", "agrees", "told"),
    [
        (62, 100, True, "62% of the drafts of what serves were accepted in the sweep, and 60% in service (100 requests"),
        (80, 100, False, "differ from the workload's"),
        (80, 10, None, ""),
        (None, 100, None, ""),
    ],
)  # fmt: skip
def test_five_points_tell_whether_texts_are_alike(
    here: int | None, n: int, agrees: bool | None, told: str
) -> None:
    samples = [] if here is None else [answered(kind, 100, here) for kind in ("code", "chat")]
    found = compare_drafts(samples, [logged(300, 100, 40, 24)] * n, SERVES, WORKLOAD)
    assert (None if found is None else found["agrees"]) is agrees
    assert told in ("" if found is None else found["text"])


# What is best by now


@pytest.mark.parametrize(("right", "moves"), [(1.0, False), (0.3, True)])
def test_texts_of_which_less_is_right_move_the_best_to_shorter_drafts(
    right: float, moves: bool
) -> None:
    one, outcome = simulated_night()
    families = [{"engine": "mainline", "speculation": "mtp", "n_max": [1, 2, 3, 4, 6], "p_min": [0.0, 0.75]}]  # fmt: skip
    requests = [
        replace(request, accepted_n=round((request.accepted_n or 0) * right))
        for request in in_service(one)
    ]

    def best(asked: Sequence[LoggedRequest], then: float | None = None) -> Any:
        return best_now(asked, outcome.evidence.models, one.incumbent, families, one.workload, then)

    found = best(requests)
    assert found.has_moved is moves
    assert not best(requests, then=found.gain).has_moved, "it was so when the sweep ended"
    assert best(requests[:3]) is None, "too few"
    if moves:
        assert "mtp 1/" in found.arm or "no speculation" in found.arm


# Published laws


@cache
def shipped() -> dict[str, Any]:
    return tomllib.loads((ROOT / "profiles/laws/qwen3.6-35b-a3b-mtp.toml").read_text())


@pytest.mark.parametrize("at", [0, 1])
def test_what_is_shipped_is_fitted_to_what_was_published(at: int) -> None:
    table = tomllib.loads((DATA / "surfaces/rtx-4070-super-builds.toml").read_text())
    cell, law = table["tables"][0]["cells"][at], shipped()["laws"][at]
    assert cell["engine"] == law["engine"]
    texts = [list(law["alpha"]).index(one["kind"]) for one in table["classes"]]
    steps = [191 - right for _, right in cell["drafts"]]
    seen = np.array([[n, 1, *drafts] for n, drafts in zip(steps, cell["drafts"], strict=True)])
    counts = [
        Counts(text, 3, 0.75, int(one[1]), float(one[0]), float(one[2]), float(one[3]))
        for text in sorted(set(texts))
        for one in [seen[np.array(texts) == text].sum(axis=0)]
    ]
    fitted = fit_acceptance(counts, len(law["alpha"]))
    assert fitted.parameters == pytest.approx([*law["alpha"].values(), *law["others"]], abs=1e-3)
    rows = []
    for text, n, (drafted, _), tok_s in zip(
        texts, steps, cell["drafts"], cell["tok_s"], strict=True
    ):
        usual = fitted.drafts(3, 0.75).drafted[text]
        share = np.minimum(usual * drafted / n / usual.sum(), 1.0)
        rows.append(StepRow("", 191_000 / tok_s / n, n, by_length(share), 1 - share[-1], 0.16, 3))
    step = fit_steps(StepTable(rows))
    assert step is not None
    assert step.mean[:4] / step.mean[0] == pytest.approx(law["step"], abs=1e-3)
    assert step.mean[-2:] / step.mean[0] == pytest.approx(law["beside"], abs=1e-3)


def test_published_laws_are_of_their_build_and_steps_of_their_card_alone() -> None:
    workload = Workload((RequestClass(1, "math", 0, 9, 9), RequestClass(1, "tool", 0, 9, 9)))
    engines = {"mine": "mainline", "bee": "bee"}
    here = published(shipped(), engines, ["NVIDIA GeForce RTX 4070 SUPER"], workload)
    elsewhere = published(shipped(), engines, ["NVIDIA GeForce RTX 5090"], workload)
    assert set(here) == set(elsewhere) == {("mine", "mtp")}
    law = here["mine", "mtp"]
    assert law.acceptance is not None
    assert law.acceptance.parameters[:2].tolist() == pytest.approx([1.971, 1.6356])
    assert law.step is not None
    assert elsewhere["mine", "mtp"].step is None


# What boxes of one class tell each other

HOUR_S = 3600.0
MTP = ("mainline", "mtp")


@dataclass
class Meeting(Study):
    """A study in memory: what others told is given, what this box does is kept."""

    known: Mapping[tuple[str, str], Known] = field(default_factory=dict)
    theirs: list[Told] = field(default_factory=list)
    taken: frozenset[Arm] = frozenset()
    claimed: list[Arm] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    seeds: tuple[Arm, ...] = ()
    laws: Mapping[tuple[str, str], Law] = field(default_factory=dict)
    winner: Arm | None = None

    def news(self) -> Sequence[Told]:
        news, self.theirs = self.theirs, []
        return news

    def claim(self, arm: Arm) -> bool:
        self.claimed.append(arm)
        return arm not in self.taken

    def tell(self, told: Told) -> None:
        self.told.append(told)

    def end(self, laws: Mapping[tuple[str, str], Law], winner: Arm | None) -> None:
        self.laws, self.winner = laws, winner


def learned(
    one: Task, *, known: Mapping[tuple[str, str], Known] = {}, tells_steps: bool = True
) -> Learner:
    """What a box knows that has measured what serves, and nothing else."""
    learner = Learner(one.workload, 131_072, known)
    it = Night(
        one.box(tells_steps=tells_steps),
        one.workload,
        learner,
        HOUR_S,
        np.random.default_rng(1),
        None,
    )
    Server(it, one.incumbent, "incumbent").block()
    learner.refresh()
    return learner


def believed(learner: Learner, *arms: Arm) -> list[float]:
    return [one.mean for one in learner.beliefs(arms) if one is not None]


def test_what_another_box_gained_with_an_arm_is_believed_the_more_for_its_neighbours_than_for_others() -> (
    None
):
    one = task("12G", "agent", 1)
    learner = learned(one)
    here = one.incumbent
    deep, near = replace(here, n_max=8), replace(here, n_max=7)
    before = believed(learner, here, deep, near)
    told = [Told(replace(here, n_max=2), here, 0.0, "two"), Told(deep, here, -0.2, "two")]
    learner.hear(told)
    after = believed(learner, here, deep, near)
    moved = np.subtract(before, after)
    assert moved[1] > moved[2] > 0.005
    assert moved[1] > abs(moved[0])


def test_a_family_begins_with_the_laws_that_other_boxes_fitted() -> None:
    one, other = task("12G", "agent", 1), task("12G", "agent", 2)
    theirs = learned(other).models[MTP]
    assert theirs.acceptance is not None
    assert theirs.costs is not None
    laws = theirs.costs.shared
    known = {MTP: Known(replace(theirs.acceptance, spread=0.01), laws.step, laws.prompt)}
    alone, told = learned(one), learned(one, known=known)
    own, taught = alone.models[MTP].acceptance, told.models[MTP].acceptance
    assert own is not None
    assert taught is not None
    texts = len(one.workload.classes)
    off_own = np.abs(own.parameters - theirs.acceptance.parameters)[:texts]
    off_taught = np.abs(taught.parameters - theirs.acceptance.parameters)[:texts]
    assert off_taught.max() < 0.05 < off_own.max()


def test_an_arm_that_another_box_tries_is_left_to_it_and_the_next_is_tried() -> None:
    one = task("12G", "agent", 1)

    def night(study: Meeting) -> list[Arm]:
        outcome = narrow(one).night(0.5, study=study)
        rows = outcome.evidence.samples
        return [row.arm for row in rows if row.event == "boot" and row.purpose == "explore"]

    free = Meeting()
    alone = night(free)
    first = alone[0]
    beside = Meeting(taken=frozenset({first.canonical(), first}))
    left = night(beside)
    assert first not in left
    for study, tried in ((free, alone), (beside, left)):
        assert len(tried) > 1
        assert study.told
        assert all(one.control == study.told[0].control for one in study.told)
        assert {arm.canonical() for arm in tried} <= {each.arm for each in study.told}


def test_a_night_tells_its_laws_and_its_winner_and_another_begins_with_them() -> None:
    one, other = task("12G", "agent", 1), task("12G", "agent", 2)
    first = Meeting()
    won = narrow(one).night(0.5, study=first)
    assert won.verdict == "promote"
    assert first.winner == won.arm
    texts = len(one.workload.classes)
    assert all(law.is_sound(texts) for law in first.laws.values())
    assert set(first.laws) == {row.arm.family for row in won.evidence.arms}
    second = Meeting(known_of(first.laws.items(), texts), seeds=(first.winner,))
    outcome = narrow(other).night(0.5, study=second)
    boots = [row for row in outcome.evidence.samples if row.event == "boot"]
    assert [row.purpose for row in boots[:2]] == ["incumbent", "seed"]
    assert boots[1].arm == first.winner


@pytest.mark.parametrize(
    "changed",
    [
        {"step": ()},
        {"prompt": (1.0,)},
        {"acceptance": (1.0,)},
        {"step": (float("nan"),) * N_STEP_TERMS},
        {"step": (-1.0,) * N_STEP_TERMS},
        {"prompt": (1e300,) * N_PROMPT_TERMS},
    ],
)
def test_laws_that_cannot_be_any_are_left_out(changed: Mapping[str, Any]) -> None:
    sound = Law((1.0,) * N_STEP_TERMS, (1.0,) * N_PROMPT_TERMS, (0.5,) * n_parameters(2))
    assert sound.is_sound(2)
    broken = replace(sound, **changed)
    step = known_of([(MTP, sound), (MTP, broken)], 2)[MTP].step
    assert step is not None
    assert step.tolist() == [1.0] * N_STEP_TERMS
    assert known_of([(MTP, broken)], 2) == {}


def test_what_boxes_know_together_is_as_sure_as_they_agree() -> None:
    def of(acceptance: float) -> Law:
        return Law((1.0,) * N_STEP_TERMS, (1.0,) * N_PROMPT_TERMS, (acceptance,) * n_parameters(2))

    def spread(*values: float) -> float:
        drafter = known_of([(MTP, of(value)) for value in values], 2)[MTP].acceptance
        assert drafter is not None
        return float(drafter.spread)

    assert spread(1.0, 1.0) < spread(0.8, 1.2) < spread(0.0, 3.0) == 0.3
