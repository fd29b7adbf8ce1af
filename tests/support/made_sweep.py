"""A sweep in a store that ran on a simulated box: real search, real records, no time."""

from __future__ import annotations

import numpy as np

from benchmarks.simulator.tasks import task
from tests.support.local_box import Box
from tunerd.actions.sweep_record import KIND, SweepKeeper
from tunerd.core.evidence import RunOutcome, RunRecord, SummaryRecord
from tunerd.core.sweep import Arm, tune
from tunerd.system.store import EvidenceStore

_HOUR_S = 3600.0


def put_sweep(box: Box) -> int:
    """Store one that proves a winner; its number."""
    ctx = box.context
    one = task("12G", "agent", 1)
    outcome = tune(
        one.box(), one.space, one.workload, one.incumbent, 4 * _HOUR_S, np.random.default_rng(1)
    )
    record = RunRecord(
        kind=KIND, suites=("workload",), started_s=ctx.clock.now_s() - 4 * _HOUR_S, target="a box",
        seed=1, unit=ctx.unit, profile="plain", model_name="designed", workload="coding-agent",
        tunerd_version="test",
    )  # fmt: skip
    with EvidenceStore(ctx.paths.evidence) as store:
        number = store.add_run(record)
        store.add_summary(number, SummaryRecord(KIND, "sweep plan", None, {"request": {}}))
        keeper = SweepKeeper(ctx, store, number)
        for sample in outcome.evidence.samples:
            keeper.event(sample)
        incumbent = one.incumbent
        assert isinstance(incumbent, Arm)
        keeper.result(outcome, incumbent, "coding-agent")
        keeper.end(RunOutcome.DONE, None)
    return number
