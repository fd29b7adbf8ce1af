"""Sweeps in a store that ran on made boxes: real search, real records, no time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.simulator.tasks import Task, task
from tests.support.bench_samples import sweep_event
from tests.support.local_box import Box as LocalBox
from tunerd.app import Context
from tunerd.engine.conditions import FingerprintReader
from tunerd.engine.fingerprint import Fingerprint
from tunerd.measure.answer import ClientTimes, Sample, Timings
from tunerd.measure.evidence import ArmRecord, RunOutcome, RunRecord, SummaryRecord, VerdictRecord
from tunerd.measure.store import EvidenceStore
from tunerd.measure.target import arm_record
from tunerd.profile.arm import OFF, Arm, Boot, Box, Policy, Request, Space
from tunerd.profile.arm import Sample as SweepSample
from tunerd.sweep.known import Study
from tunerd.sweep.learner import Learner
from tunerd.sweep.limits import Limits
from tunerd.sweep.night import Night
from tunerd.sweep.plan import SweepRequest, plan_arm, prepare
from tunerd.sweep.record import KIND, SweepKeeper
from tunerd.sweep.search import Search
from tunerd.sweep.space import build_grid
from tunerd.sweep.tuner import Outcome, tune

_HOUR_S = 3600.0
_NOT_KNOWN = "0" * 64


@cache
def simulated_night(hours: float | None = None) -> tuple[Task, Outcome]:
    """A night on a simulated box, and what it came to; without `hours` a short one that tries little."""
    one = task("12G", "agent", 1)
    if hours is None:
        one, hours = narrow(one), 0.75
    return one, one.night(hours)


def narrow(one: Task) -> Task:
    """A box whose space has no cache types and threads, and is searched in a second or two."""
    families = {
        key: replace(one_of, kv=("q8_0",), threads=(8,))
        for key, one_of in one.space.families.items()
    }
    return replace(one, space=Space(families))


def begun_search(one: Task, box: Box, context: int = 131_072, n_slots: int = 1) -> Search:
    """A search that has seen nothing yet, for single steps of it."""
    policy = Policy()
    grid = build_grid(one.space, one.incumbent, policy)
    learner = Learner(one.workload, context, n_slots=n_slots)
    night = Night(box, one.workload, learner, _HOUR_S, np.random.default_rng(1), None)
    limits = Limits(learner, grid, policy, one.incumbent)
    return Search(night, grid, limits, policy, one.incumbent, Study())


def a_sample(arm: Arm, purpose: str, request: Request, **told: Any) -> SweepSample:
    """A request that took a second."""
    usual: dict[str, Any] = {"event": "request", "process": "p/1", "at_s": 0.0, "seconds": 1.0}
    return SweepSample(arm=arm, purpose=purpose, request=request, **usual | told)


def put_sweep(box: LocalBox) -> int:
    """Store one that proves a winner; its number."""
    ctx = box.context
    ctx.files.make_folder(ctx.paths.evidence.parent)
    with EvidenceStore(ctx.paths.evidence) as store:
        return put_night(ctx, store, ctx.clock.now_s() - 4 * _HOUR_S)


def put_night(
    ctx: Context,
    store: EvidenceStore,
    started_s: float,
    *,
    hours: float | None = None,
) -> int:
    """Store the simulated night once, by the calls by which a real one is; its number."""
    one, outcome = simulated_night(hours)
    record = RunRecord(
        kind=KIND, suites=("workload",), started_s=started_s, target="a box", seed=1,
        unit=ctx.unit, profile="plain", model_name="designed", workload="coding-agent",
    )  # fmt: skip
    number = store.add_run(record)
    store.add_summary(number, SummaryRecord(KIND, "sweep plan", None, {"request": {}}))
    keeper = SweepKeeper(ctx, store, number)
    measured: dict[Arm, list[Sample]] = {}
    for sample in outcome.evidence.samples:
        if sample.event == "boot":
            keeper.arm(sample.arm, _arm_record(sample.arm), _NOT_KNOWN)
        elif "wall_ms" in (sample.answer or {}):  # else the server died of it
            measured.setdefault(sample.arm, []).append(_request(sample))
        keeper.event(sample)
    for arm, samples in measured.items():
        keeper.samples(arm, samples)
    incumbent = one.incumbent
    keeper.result(outcome, incumbent, "coding-agent")
    keeper.end(RunOutcome.DONE, None)
    return number


N_SAMPLES = 40


def put_small_nights(store: EvidenceStore, n: int) -> None:
    """Sweeps of a few requests, one every 30 days from 1970 on: each challenged what served, once, and every other was stopped."""
    made = Sample(
        suite="workload", case="code", kind="code", prompt_id="p", process="p", position=1,
        at_s=0.0, n_predict=50, concurrency=1, timings=Timings(predicted_n=50), client=None,
        energy_j=100.0, details={"filler": list(range(300))},
    )  # fmt: skip
    for night in range(n):
        at_s = night * 30 * 24 * _HOUR_S
        arms = (ArmRecord(name="live", fingerprint=Fingerprint()),)
        record = RunRecord(
            kind=KIND, suites=("workload",), started_s=at_s, target="a box", arms=arms
        )
        number = store.add_run(record)
        plan = {"basis": "same", "generation": 0}
        store.add_summary(number, SummaryRecord(KIND, "sweep plan", None, plan))
        for pair in (None, (night + 1, 1), None):
            store.add_sweep_event(number, sweep_event("p", pair))
        store.add_samples(number, [made] * N_SAMPLES, arm="live")
        if night % 2:
            store.add_verdict(number, VerdictRecord(outcome="keep", sentence="what serves stays"))
        outcome = RunOutcome.DONE if night % 2 else RunOutcome.STOPPED
        store.end_run(number, outcome, ended_s=at_s + 60.0)


def _arm_record(arm: Arm) -> ArmRecord:
    argv = ("/opt/engine/llama-server", "-m", "/models/made.gguf", "--ctx-size", "32768",
            "--spec-draft-n-max", str(arm.n_max))  # fmt: skip
    return ArmRecord(name=str(arm), fingerprint=Fingerprint(), engine=arm.engine, argv=argv)


def _request(sample: SweepSample) -> Sample:
    """What the box answered, as a measurement stores it."""
    request, answer = sample.request, dict(sample.answer or {})
    assert request is not None
    names = {one.name for one in fields(Timings)}
    timings = Timings(**{name: value for name, value in answer.items() if name in names})
    return Sample(
        suite="workload", case=request.kind, kind=request.kind, prompt_id=request.prompt_id,
        process=sample.process, position=1, at_s=sample.at_s, n_predict=request.n_predict,
        concurrency=request.concurrency, timings=timings,
        client=ClientTimes(answer["wall_ms"], None),
    )  # fmt: skip


@dataclass
class DraftingCosts:
    """A box on which nothing that is drafted is right, so that drafting, but for one kind, makes a server slower.

    It tells times of its own, with some noise in them, and serves whatever it is started with.
    """

    context_tokens: int
    token_ms: float = 2.5
    drafted_token_ms: float = 5.0
    per_request: Collection[str] = ()
    fast: str = OFF
    _now_s: float = 0.0
    _arm: Arm | None = None
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def check(self) -> None:
        """Nobody wants it back."""

    def restart(self, arm: Arm) -> Boot:
        self._arm = arm
        self._now_s += 2.0
        return Boot(ok=True, seconds=2.0)

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        running = arm or self._arm
        assert running is not None
        factor = float(np.exp(self._rng.normal(0.0, 0.01)))
        n, n_prompt = request.n_predict, request.cached_tokens + request.new_tokens
        each_ms = self.token_ms if running.spec == self.fast else self.drafted_token_ms
        prompt_ms, predicted_ms = 0.05 * n_prompt * factor, each_ms * n * factor
        self._now_s += (prompt_ms + predicted_ms) / 1000
        answer = {"cache_n": 0, "prompt_n": n_prompt, "prompt_ms": prompt_ms, "predicted_n": n,
                  "predicted_ms": predicted_ms, "wall_ms": prompt_ms + predicted_ms}  # fmt: skip
        if running.drafts:
            answer |= {"draft_n": n * running.n_max, "draft_n_accepted": 0}
        return answer | ({"tool_ok": True} if request.kind == "tool" else {})


def put_proposal(
    ctx: Context, *, token_ms: float = 2.5, is_proved: bool = True, variables: Mapping[str, str] | None = None,
    fast: str = OFF, **fingerprint: Any,
) -> int:  # fmt: skip
    """Store a sweep of what serves that proves it faster without drafts, or with this kind of them; its number.

    The engine that serves must be one for which that is so, for a promotion measures it again. One that
    needs so long for a token was measured; `variables` and `fingerprint` say under which other conditions.
    """
    prepared = prepare(ctx, SweepRequest(budget_s=2 * _HOUR_S, seed=3), proves=False)
    costs = (token_ms, 2 * token_ms) if is_proved else (2 * token_ms, token_ms)
    box = DraftingCosts(prepared.policy.context_tokens or 1024, *costs, fast=fast)
    incumbent = prepared.base.arm
    outcome = tune(
        box, prepared.space.space, prepared.workload, incumbent, 2 * _HOUR_S,
        np.random.default_rng(3), policy=prepared.policy,
    )  # fmt: skip
    assert (outcome.verdict == "promote") == is_proved, outcome.evidence.reasons
    with EvidenceStore(ctx.paths.evidence) as store:
        keeper, reader = SweepKeeper.begin(ctx, store, prepared), FingerprintReader(ctx)
        for arm in {one.arm.canonical() for one in outcome.evidence.arms}:
            plan = plan_arm(ctx, prepared, arm)
            record, _ = arm_record(reader, str(arm), plan.command.argv, variables or {})
            told = replace(record.fingerprint, **fingerprint)
            keeper.arm(arm, replace(record, fingerprint=told), prepared.shape.sha256)
        for sample in outcome.evidence.samples:
            keeper.event(sample)
        keeper.result(outcome, incumbent, prepared.shape.name)
        keeper.end(RunOutcome.DONE, None)
    return keeper.number
