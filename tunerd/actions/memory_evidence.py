"""What loads showed of memory estimates: kept after each load, used by the next plan of the same server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunerd.actions.context import Context
from tunerd.actions.live import specifiers_of
from tunerd.core.fingerprint import Fingerprint
from tunerd.core.memory_correction import MemoryCorrection
from tunerd.core.memory_parts import Estimate
from tunerd.core.memory_report import parse_report
from tunerd.core.result import Message, note
from tunerd.core.unit_environment import environment_of
from tunerd.core.unit_file import parse_unit
from tunerd.errors import TunerdError

# Lines from a start that hold what an engine says of its load.
LOAD_LINES = 5000


def correction_of(
    ctx: Context, argv: Sequence[str], unit_text: str
) -> tuple[MemoryCorrection | None, tuple[Message, ...]]:
    """What the newest load of this very server showed, and why it cannot be told if so.

    A plan goes on without it: a damaged store is no reason to plan nothing.
    """
    if not ctx.paths.evidence.exists():
        return None, ()
    from tunerd.system.store import open_to_read  # most plans are of boxes without a store

    try:
        store = open_to_read(ctx.paths.evidence)
        if store is None:
            return None, ()
        with store:
            return store.memory_correction(_fingerprint(ctx, argv, unit_text)), ()
    except TunerdError as problem:
        text = f"what earlier loads took cannot be read: {problem.message}"
        return None, (note("memory-evidence", text, problem.hint),)


def remember_load(
    ctx: Context, argv: Sequence[str], unit_text: str, calculated: Estimate, lines: Sequence[str]
) -> tuple[Message, ...]:
    """Keep what a load showed of its estimate; a server serves whether that can be kept or not.

    Args:
        ctx: Where.
        argv: The command that was loaded.
        unit_text: Of its unit.
        calculated: The estimate, as it is without any correction.
        lines: What the engine wrote while it loaded.
    """
    report = parse_report(lines)
    if not report.buffers:
        return ()
    from tunerd.system.store import EvidenceStore

    try:
        fingerprint = _fingerprint(ctx, argv, unit_text)
        ctx.files.make_folder(ctx.paths.evidence.parent)
        with EvidenceStore(ctx.paths.evidence) as store:
            store.add_memory_observation(
                fingerprint, calculated.parts, report, observed_s=ctx.clock.now_s()
            )
    except TunerdError as problem:
        text = f"what this load took could not be kept: {problem.message}"
        return (note("memory-evidence", text, problem.hint),)
    return ()


def _fingerprint(ctx: Context, argv: Sequence[str], unit_text: str) -> Fingerprint:
    from tunerd.actions.fingerprint import FingerprintReader

    return FingerprintReader(ctx).of(argv, _environment(ctx, unit_text)).fingerprint


def _environment(ctx: Context, unit_text: str) -> Mapping[str, str]:
    return dict(environment_of(parse_unit(unit_text), specifiers_of(ctx, ctx.unit)).pairs)
