"""What was measured of the server that serves now, whether it holds, and what speculation costs here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tunerd.actions.context import Context
from tunerd.actions.doctor_server import ServerReading
from tunerd.actions.fingerprint import FingerprintReader
from tunerd.actions.workloads import workload_sha256_now
from tunerd.core.doctor.break_even import DEFAULT_UBATCH, break_even, lacking
from tunerd.core.doctor.facts import NO_GRAPHS, EvidenceFacts, KeptControl
from tunerd.core.doctor.graphs import control_from_record
from tunerd.core.evidence import ArmRecord, StoredRun
from tunerd.core.fingerprint import Fingerprint, changes, holds
from tunerd.core.fingerprint_arguments import arguments_sha256, compared_arguments
from tunerd.core.flags import owner_of
from tunerd.core.sample import Sample
from tunerd.system.store import EvidenceStore, open_to_read

_N_RUNS = 200
# What may differ between a server and the same server without speculation: the kind itself, and
# the room that its memory takes.
_MAY_DIFFER = ("speculation.", "memory.")


@dataclass(frozen=True, slots=True)
class _Serving:
    """The server that serves, as evidence is compared with it."""

    argv: tuple[str, ...]
    arguments: str | None
    fingerprint: Fingerprint
    problems: tuple[str, ...]


def read_evidence(ctx: Context, reading: ServerReading | None) -> EvidenceFacts | None:
    """What is stored of the server; None where nothing says what serves.

    Raises:
        HostError: the store is damaged or cannot be read.
    """
    store = open_to_read(ctx.paths.evidence)
    if store is None:
        return EvidenceFacts(n_runs=0)
    with store:
        runs = store.runs(limit=_N_RUNS)
        total = store.count_runs()
        live = reading.live if reading is not None else None
        if reading is None or live is None or not live.argv or not runs:
            damage = tuple(one.text for one in store.damage)
            return EvidenceFacts(n_runs=total, damage=damage)
        now = FingerprintReader(ctx).of(live.argv, live.environment)
        arguments = arguments_sha256(live.argv, live.environment)
        serving = _Serving(live.argv, arguments, now.fingerprint, now.problems)
        facts = _newest(ctx, EvidenceFacts(n_runs=total), runs, serving)
        facts = replace(facts, graphs=_kept_control(store, runs, serving))
        settings = reading.facts.settings
        n_ubatch = settings.serving.n_ubatch if settings is not None else None
        drafting = list(_samples(store, runs, serving, without=False))
        plain = list(_samples(store, runs, serving, without=True))
        return replace(
            facts,
            break_even=break_even(drafting, plain, n_ubatch or DEFAULT_UBATCH),
            no_break_even=lacking(drafting, plain),
            damage=tuple(one.text for one in store.damage),
        )


def _newest(
    ctx: Context, facts: EvidenceFacts, runs: Sequence[StoredRun], serving: _Serving
) -> EvidenceFacts:
    """The newest run of this very command line, and whether it still counts."""
    for run in runs:
        for arm in run.record.arms:
            if not _is_same(arm, serving) or not run.n_samples:
                continue
            then = arm.fingerprint
            workload = workload_sha256_now(ctx, run.record, then.workload_sha256)
            now = replace(serving.fingerprint, workload_sha256=workload)
            found = changes(then, now)
            texts = tuple(one.text for one in found if not one.is_remark)
            return replace(
                facts,
                newest_run=run.number,
                holds=holds(then, now),
                changes=(*texts, *serving.problems),
            )
    return facts


def _kept_control(
    store: EvidenceStore, runs: Sequence[StoredRun], serving: _Serving
) -> KeptControl | None:
    """The newest control run without CUDA graphs of this very command line.

    What it was measured on need not be what is asked of the server now: graphs matter to each step.
    """
    for run in runs:
        arm = next((one for one in run.record.arms if _is_same(one, serving)), None)
        if arm is None or not any(NO_GRAPHS in one.environment for one in run.record.arms):
            continue
        controls = (control_from_record(one) for one in store.summaries(run.number))
        control = next((one for one in controls if one is not None), None)
        if control is None:
            continue
        then = arm.fingerprint
        now = replace(serving.fingerprint, workload_sha256=then.workload_sha256)
        texts = tuple(one.text for one in changes(then, now) if not one.is_remark)
        return KeptControl(run.number, control, holds(then, now), (*texts, *serving.problems))
    return None


def _is_same(arm: ArmRecord, serving: _Serving) -> bool:
    own = arguments_sha256(arm.argv, arm.environment) if arm.argv is not None else None
    return own is not None and own == serving.arguments


def _samples(
    store: EvidenceStore, runs: Sequence[StoredRun], serving: _Serving, *, without: bool
) -> Iterator[Sample]:
    """Samples of the server as it serves, or of it without speculation, that still count.

    Without: also of its own command line, for an engine may leave speculation out by request.
    """
    for run in runs:
        for arm in run.record.arms:
            is_one = _is_same(arm, serving) or (without and _is_without(arm, serving))
            if not is_one or not _counts(arm, serving):
                continue
            yield from store.samples(run.number, arm=arm.name)


def _is_without(arm: ArmRecord, serving: _Serving) -> bool:
    return arm.argv is not None and _base(arm.argv) == _base(serving.argv)


def _base(argv: Sequence[str]) -> list[list[str]]:
    """The arguments that a server has with speculation and without."""
    return [
        group
        for group in compared_arguments(argv)
        if not (owner_of(group[0]) or "").startswith(_MAY_DIFFER)
    ]


def _counts(arm: ArmRecord, serving: _Serving) -> bool:
    """Whether engine, model, driver and card are those of now, whatever the arguments."""
    then = replace(
        arm.fingerprint,
        workload_sha256=None,
        arguments_sha256=serving.fingerprint.arguments_sha256,
    )
    return holds(then, serving.fingerprint) is True
