"""Tuned layers beside what serves: each is in force where what it was promoted with serves, and what came after that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tunerd.app import Context
from tunerd.errors import HostError, TunerdError
from tunerd.production.journal import SwapRecord
from tunerd.records import Unreadable, read, read_or_none
from tunerd.result import Message, note, warning
from tunerd.units.generations import Generation

if TYPE_CHECKING:
    from tunerd.profile.files import TunedRecord


def settle_tuned(ctx: Context, record: SwapRecord) -> tuple[Message, ...]:
    """Bring the tuned layers into line with a committed swap while its record stands; what a person should know.

    So recovery does it again where it was cut short. Where it fails, as on a damaged file, that is told, or whoever
    asked tries again and says so: it undoes no swap that serves.
    """
    if record.reason == "rollback":
        try:
            is_any = ctx.paths.tuned_dir.exists()
            return tuple(_by_hand(ctx, record.old_sha256, record.new_sha256)) if is_any else ()
        except (HostError, Unreadable, OSError) as error:
            return (warning("tuned", f"the tuned layer may still be in force: {error}",
                            "`tunerd apply --untuned` leaves it out"),)  # fmt: skip
    if record.tuned is None:
        return ()
    from tunerd.profile import files  # brings the schema
    from tunerd.profile.arm import Arm

    tuned = read_or_none(files.TunedRecord, record.tuned)
    with contextlib.suppress(TunerdError, Unreadable):
        if tuned is not None and record.reason == "promote":
            _put_in_force(ctx, replace(tuned, generation=record.generation))
        elif tuned is not None and (arm := read_or_none(Arm, tuned.arm)) is not None:
            why = "it was taken back"
            files.take_back_tuned(ctx, tuned.profile, tuned.sweep, arm, tuned.engine_sha256, why)
    return ()


def _by_hand(ctx: Context, left: str | None, reached: str | None) -> Iterator[Message]:
    """After a rollback by hand from the unit with one hash to that with the other."""
    from tunerd.profile.files import read_declined, read_tuned

    known = {entry.generation.number: entry.generation for entry in ctx.generations.entries()}
    for profile in {one.profile: None for one in known.values() if one.profile is not None}:
        layer, declined = read_tuned(ctx, profile), read_declined(ctx, profile)
        if layer is not None and _went(known, layer, left, reached):
            yield _decline(ctx, layer)
        elif declined is not None and _went(known, declined, reached, left):
            _put_in_force(ctx, declined)
            yield note("tuned", f"what sweep {declined.sweep} found is in force again")


def _went(
    known: Mapping[int, Generation], layer: TunedRecord, on: str | None, off: str | None
) -> bool:
    """Whether the first of two units rests on this layer, and the second does not."""
    return _rests_on(known, layer, on) and not _rests_on(known, layer, off)


def _rests_on(known: Mapping[int, Generation], layer: TunedRecord, sha256: str | None) -> bool:
    """Whether a unit is the promoted one, or was first made after it."""
    promoted = known.get(layer.generation) if layer.generation is not None else None
    if promoted is None or sha256 is None:
        return False
    makers = [one for one in known.values() if one.unit_sha256 == sha256]
    if not makers or all(one.profile not in {layer.profile, None} for one in makers):
        return False
    return sha256 == promoted.unit_sha256 or min(one.number for one in makers) > promoted.number


def _decline(ctx: Context, layer: TunedRecord) -> Message:
    from tunerd.profile.arm import Arm
    from tunerd.profile.files import remember_failure, take_out_tuned

    if layer.arm is not None:
        arm = read(Arm, layer.arm)
        remember_failure(ctx, layer.profile, arm, layer.engine_sha256, "it was rolled back by hand",
                         sweep=layer.sweep)  # fmt: skip
    take_out_tuned(ctx, layer, by_hand=True)
    return note(
        "tuned-declined",
        f"what sweep {layer.sweep} found is left out of the next `tunerd apply`, and not proposed again",
        f"`tunerd promote {layer.sweep}` deploys it again, as does a rollback to it",
    )


def _put_in_force(ctx: Context, layer: TunedRecord) -> None:
    """Its arm takes part in sweeps before the layer is there, by which whoever tries again knows what is left to do."""
    from tunerd.profile.arm import Arm
    from tunerd.profile.files import forget_failure, write_tuned

    try:
        if layer.arm is not None:
            forget_failure(ctx, layer.profile, read(Arm, layer.arm))
    finally:
        write_tuned(ctx, layer)
