"""`tunerd report`: gathers what a report is made of, and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.results import damage_messages, run_of
from tunerd.core.evidence import RunEvidence, StoredRun, Validity
from tunerd.core.result import ActionResult, Message, warning
from tunerd.core.sample import Sample
from tunerd.errors import HostError, UsageError
from tunerd.system.files import Files
from tunerd.system.store import EvidenceStore, open_to_read

_LOOK_BACK = 200


def gather_evidence(
    ctx: Context, numbers: Sequence[int]
) -> tuple[tuple[RunEvidence, ...], tuple[Message, ...]]:
    """Everything that is kept of some runs, oldest first, and what of it cannot be read.

    Args:
        ctx: Where.
        numbers: The runs; none for the newest ones that together have measured every suite once.

    Raises:
        UsageError: there is no such run, or nothing was measured yet.
    """
    store = open_to_read(ctx.paths.evidence)
    if store is None:
        raise UsageError("nothing was measured yet", hint="tunerd bench")
    with store:
        runs = _named(store, numbers) if numbers else _newest(store)
        if not runs:
            raise UsageError("nothing was measured yet", hint="tunerd bench")
        found = [_evidence(store, run) for run in runs]
        damage = damage_messages(store)
    return tuple(sorted(found, key=lambda one: one.run.record.started_s)), damage


def check_validity(
    ctx: Context, evidence: Sequence[RunEvidence]
) -> dict[tuple[int, str], Validity]:
    """For each run and arm, whether it still holds on this machine."""
    from tunerd.actions.results import StalenessCheck

    check = StalenessCheck(ctx)
    return {
        (one.run.number, arm.name): check.of(arm, one.run.record)
        for one in evidence
        for arm in one.run.record.arms
    }


def made_report(
    html: str, evidence: Sequence[RunEvidence], messages: Sequence[Message] = ()
) -> ActionResult:
    """The page about some runs, not yet written anywhere."""
    payload = {"runs": [one.run.number for one in evidence], "html": html}
    return ActionResult("report", payload, (*messages, *_messages(evidence)))


def write_report(path: Path, made: ActionResult) -> ActionResult:
    """Write the page that `made_report` gave, here or in the daemon.

    Raises:
        HostError: it cannot be written.
    """
    if not path.parent.is_dir():
        raise HostError(f"no such folder: `{path.parent}`", hint="make it first, or choose another")
    Files().write(path, str(made.payload["html"]).encode())
    payload = {
        "path": str(path.resolve()),
        "bytes": path.stat().st_size,
        "runs": made.payload["runs"],
    }
    return ActionResult("report", payload, made.messages)


def _messages(evidence: Sequence[RunEvidence]) -> list[Message]:
    empty = [str(one.run.number) for one in evidence if one.run.n_samples == 0]
    if not empty:
        return []
    return [warning("no-samples", f"without samples: run {', '.join(empty)}")]


def _named(store: EvidenceStore, numbers: Sequence[int]) -> list[StoredRun]:
    return [run_of(store, number) for number in dict.fromkeys(numbers)]


def _newest(store: EvidenceStore) -> list[StoredRun]:
    """The newest runs, each of which has a suite that no newer one has."""
    covered: set[str] = set()
    chosen = []
    for run in store.runs(limit=_LOOK_BACK):
        suites = {f"{run.record.kind} {suite}" for suite in run.record.suites}
        if run.n_samples and not suites <= covered:
            covered |= suites
            chosen.append(run)
    return chosen


def _evidence(store: EvidenceStore, run: StoredRun) -> RunEvidence:
    by_arm: dict[str, list[Sample]] = {arm.name: [] for arm in run.record.arms}
    for arm, sample in store.arm_samples(run.number):
        by_arm[arm].append(sample)
    return RunEvidence(
        run=run,
        samples={arm: tuple(samples) for arm, samples in by_arm.items()},
        summaries=store.summaries(run.number),
        verdicts=store.verdicts(run.number),
    )
