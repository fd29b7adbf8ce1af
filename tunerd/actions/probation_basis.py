"""What was measured of a server, so that its service can be held against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from tunerd.actions.context import Context
from tunerd.actions.fingerprint import FingerprintReader
from tunerd.actions.live import read_live_unit
from tunerd.actions.sweep_record import reading
from tunerd.core.evidence import ArmRecord
from tunerd.core.fingerprint import Fingerprint, holds
from tunerd.core.fingerprint_arguments import without_secrets
from tunerd.core.generation import Generation, Outcome
from tunerd.core.guards.measured import depth_of
from tunerd.core.probation import Basis, cache_ram_mib
from tunerd.core.sample import Sample
from tunerd.system.store import EvidenceStore

_LOOK_BACK = 200
_LEAST_SAMPLES = 3
_LEAST_ANSWER = 16


def basis_of(ctx: Context, generation: Generation) -> Basis:
    """What was measured of exactly this server; speeds are None where too little was."""
    own, previous = _measured(ctx, generation)
    has_gpu = bool(ctx.gpu.read().gpus)
    return Basis(
        slowest_tok_s=_slowest(own),
        deepest_tokens=max((depth_of(sample) for sample in own), default=0),
        n_samples=len(own),
        previous_tok_s=_slowest(previous),
        headroom_mib=ctx.settings.sweep.headroom_mib if has_gpu else None,
        cache_ram_mib=cache_ram_mib(generation.argv),
    )


def _measured(ctx: Context, generation: Generation) -> tuple[list[Sample], list[Sample]]:
    """Usable samples of this server, and of the one that it replaced."""
    live = read_live_unit(ctx)
    if live.argv is None:
        return [], []
    now = FingerprintReader(ctx).of(live.argv, live.environment).fingerprint
    replaced = replaced_by(ctx, generation)
    # As it is kept with what was measured of it; one that was made by hand has none.
    before = None if replaced is None else without_secrets(replaced.argv) or None
    with reading(ctx) as store:
        if store is None:
            return [], []
        own = _usable(store, lambda arm: _is_same(arm.fingerprint, now))
        return own, [] if before is None else _usable(store, lambda arm: arm.argv == before)


def replaced_by(ctx: Context, generation: Generation) -> Generation | None:
    """What served the same unit before; None where nothing of tunerd's did."""
    for entry in ctx.generations.entries():
        one = entry.generation
        is_older = one.number < generation.number and one.unit == generation.unit
        if is_older and entry.ending.outcome is Outcome.SERVING:
            return one
    return None


def _usable(store: EvidenceStore, wanted: Callable[[ArmRecord], bool]) -> list[Sample]:
    found: list[Sample] = []
    for run in store.runs(limit=_LOOK_BACK):
        for arm in run.record.arms:
            if wanted(arm):
                found += store.samples(run.number, arm=arm.name)
    return [one for one in found if one.is_usable and (one.n_predicted or 0) >= _LEAST_ANSWER]


def _slowest(samples: Sequence[Sample]) -> float | None:
    """The lowest mean decode speed over the kinds of text that were asked often enough."""
    rates: dict[str, list[float]] = {}
    for one in samples:
        speed = one.timings.decode_tok_s if one.timings is not None else None
        if speed is not None and one.concurrency == 1:
            rates.setdefault(one.kind, []).append(speed)
    means = [fmean(values) for values in rates.values() if len(values) >= _LEAST_SAMPLES]
    return min(means, default=None)


def _is_same(then: Fingerprint, now: Fingerprint) -> bool:
    """The same server on the same machine, whatever it was asked."""
    return holds(
        replace(then, workload_sha256=None, tunerd_version=None),
        replace(now, workload_sha256=None, tunerd_version=None),
    ) is True  # fmt: skip
