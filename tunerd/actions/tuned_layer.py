"""Reads and writes what promotions found: `STATE/tuned/PROFILE.toml`, and what stands beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunerd.actions.context import Context
from tunerd.core.profile_check import nest
from tunerd.core.sweep import Arm
from tunerd.core.sweep.sample import arm_from_json, plain
from tunerd.core.tuned import FailedArm, TunedRecord, tuned_from_json


def tuned_path(ctx: Context, profile: str) -> Path:
    """Where the tuned layer of a profile is."""
    return ctx.paths.tuned_dir / f"{profile}.toml"


def read_tuned(ctx: Context, profile: str) -> TunedRecord | None:
    """Where the tuned layer of a profile comes from; None where there is none that says so."""
    if not tuned_path(ctx, profile).exists():
        return None
    data = ctx.files.read_json(_record_path(ctx, profile))
    return tuned_from_json(data) if data is not None else None


def write_tuned(ctx: Context, record: TunedRecord) -> None:
    """Make this the tuned layer of its profile; the record is there before the layer is.

    Raises:
        HostError: it cannot be written.
    """
    ctx.files.make_folder(ctx.paths.tuned_dir)
    before = read_tuned(ctx, record.profile)
    if before is not None and before.sweep != record.sweep:
        ctx.files.write_json(_previous_path(ctx, record.profile), before.to_json())
    ctx.files.write_json(_record_path(ctx, record.profile), record.to_json())
    ctx.files.write(tuned_path(ctx, record.profile), _toml(record).encode())
    ctx.files.remove(_declined_path(ctx, record.profile))


def take_out_tuned(ctx: Context, record: TunedRecord, *, by_hand: bool) -> None:
    """Take the layer in force away; the one before it holds again.

    What a person took away (`by_hand`) is put aside, where `read_declined` finds it.

    Raises:
        HostError: it cannot be written.
    """
    data = ctx.files.read_json(_previous_path(ctx, record.profile))
    before = tuned_from_json(data) if data is not None else None
    put_back_tuned(ctx, record.profile, before)
    ctx.files.remove(_previous_path(ctx, record.profile))
    if by_hand:
        ctx.files.write_json(_declined_path(ctx, record.profile), record.to_json())


def read_declined(ctx: Context, profile: str) -> TunedRecord | None:
    """The layer that a person took out of force last; None where there is none."""
    data = ctx.files.read_json(_declined_path(ctx, profile))
    return tuned_from_json(data) if data is not None else None


def put_back_tuned(ctx: Context, profile: str, before: TunedRecord | None) -> None:
    """Make the tuned layer what it was before a promotion that did not last.

    Raises:
        HostError: it cannot be written.
    """
    if before is not None:
        write_tuned(ctx, before)
        return
    ctx.files.remove(tuned_path(ctx, profile))
    ctx.files.remove(_record_path(ctx, profile))


def failed_arms(
    ctx: Context, profile: str, identities: Mapping[str, str | None]
) -> Iterator[tuple[Arm, str]]:
    """Arms that failed in service on builds that are still the same, with the reason."""
    for failed in _failures(ctx, profile):
        arm = arm_from_json(failed.arm)
        if arm.engine in identities and identities[arm.engine] == failed.engine_sha256:
            by_hand = failed.sweep is not None
            yield arm, failed.reason if by_hand else f"it failed in service: {failed.reason}"


def forget_failure(ctx: Context, profile: str, arm: Arm) -> None:
    """Let an arm take part in sweeps again.

    Raises:
        HostError: it cannot be written.
    """
    known = _failures(ctx, profile)
    rows = [one.to_json() for one in known if one.arm != plain(arm.canonical())]
    if len(rows) < len(known):
        ctx.files.write_json(_failed_path(ctx, profile), {"failed": rows})


def remember_failure(
    ctx: Context,
    profile: str,
    arm: Arm,
    engine_sha256: str | None,
    reason: str,
    *,
    sweep: int | None = None,
) -> None:
    """Keep an arm out of later sweeps; `sweep` is that which proved it, where a person took it back.

    Raises:
        HostError: it cannot be written.
    """
    failed = FailedArm(plain(arm.canonical()), engine_sha256, reason, ctx.clock.now_s(), sweep)
    known = [one for one in _failures(ctx, profile) if one.arm != failed.arm]
    ctx.files.make_folder(ctx.paths.tuned_dir)
    rows = [one.to_json() for one in (*known, failed)]
    ctx.files.write_json(_failed_path(ctx, profile), {"failed": rows})


def _failures(ctx: Context, profile: str) -> list[FailedArm]:
    data = ctx.files.read_json(_failed_path(ctx, profile)) or {}
    return [FailedArm(**row) for row in data.get("failed", [])]


def _record_path(ctx: Context, profile: str) -> Path:
    return ctx.paths.tuned_dir / f"{profile}.evidence.json"


def _previous_path(ctx: Context, profile: str) -> Path:
    return ctx.paths.tuned_dir / f"{profile}.previous.json"


def _declined_path(ctx: Context, profile: str) -> Path:
    return ctx.paths.tuned_dir / f"{profile}.declined.json"


def _failed_path(ctx: Context, profile: str) -> Path:
    return ctx.paths.tuned_dir / f"{profile}.failed.json"


def _toml(record: TunedRecord) -> str:
    import tomlkit

    document = tomlkit.document()
    day = datetime.fromtimestamp(record.promoted_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    for line in (
        f"Found by sweep {record.sweep} and promoted on {day}: {record.sentence}",
        f"Valid for engine {record.engine}; what it rests on stands in {record.profile}.evidence.json.",
        "`tunerd apply --untuned` leaves this file out; removing it forgets what was found.",
    ):
        document.add(tomlkit.comment(line))
    nested: dict[str, Any] = nest(dict(sorted(record.values.items())))
    for table, values in nested.items():
        document.add(table, tomlkit.item(values))
    return tomlkit.dumps(document)
