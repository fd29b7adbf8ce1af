"""What a person's rollback means for what a promotion found: the next `apply` must not bring it back.

Going back from a promoted server takes its tuned layer out of force and its arm out of later sweeps;
going back to it, or promoting it again, puts both back.
"""

from __future__ import annotations

from collections.abc import Iterator

from tunerd.actions.context import Context
from tunerd.actions.tuned_layer import (
    forget_failure,
    read_declined,
    read_tuned,
    remember_failure,
    take_out_tuned,
    write_tuned,
)
from tunerd.core.generation import Generation
from tunerd.core.result import Message, note
from tunerd.core.sweep.sample import arm_from_json
from tunerd.core.tuned import TunedRecord

ROLLED_BACK, AGAIN = "rolled back", "promoted"


def after_rollback(ctx: Context, *, left: str | None, reached: str | None) -> Iterator[Message]:
    """Bring the tuned layers into line with a rollback that was done by hand.

    Args:
        ctx: Where; the caller holds the lock of changes.
        left: Hash of the unit that was gone back from.
        reached: Hash of the unit that serves now.

    Raises:
        HostError: a file cannot be written.
    """
    by_number = {entry.generation.number: entry.generation for entry in ctx.generations.entries()}
    profiles = dict.fromkeys(one.profile for one in by_number.values() if one.profile is not None)
    for profile in profiles:
        record = read_tuned(ctx, profile)
        if record is not None and _went(by_number, record, left, reached):
            yield _decline(ctx, record)
            continue
        declined = read_declined(ctx, profile)
        if declined is not None and _went(by_number, declined, reached, left):
            yield _take_again(ctx, declined)


def _went(
    known: dict[int, Generation], record: TunedRecord, on: str | None, off: str | None
) -> bool:
    """Whether the first of two units rests on this layer, and the second does not."""
    return _rests_on(known, record, on) and not _rests_on(known, record, off)


def _rests_on(known: dict[int, Generation], record: TunedRecord, sha256: str | None) -> bool:
    """Whether a unit is the promoted one, or was first made after it."""
    promoted = known.get(record.generation) if record.generation is not None else None
    if promoted is None or sha256 is None:
        return False
    makers = [one for one in known.values() if one.unit_sha256 == sha256]
    if not makers or all(one.profile not in {record.profile, None} for one in makers):
        return False
    return sha256 == promoted.unit_sha256 or min(one.number for one in makers) > promoted.number


def _decline(ctx: Context, record: TunedRecord) -> Message:
    from tunerd.actions.sweep_record import decide

    take_out_tuned(ctx, record, by_hand=True)
    if record.arm is not None:
        arm = arm_from_json(record.arm)
        remember_failure(ctx, record.profile, arm, record.engine_sha256, "it was rolled back by hand",
                         sweep=record.sweep)  # fmt: skip
    decide(ctx, record.sweep, {"what": ROLLED_BACK, "text": "rolled back by hand"})
    return note(
        "tuned-declined",
        f"what sweep {record.sweep} found is left out of the next `tunerd apply`, and not proposed again",
        f"`tunerd promote {record.sweep}` deploys it again, as does a rollback to it",
    )


def _take_again(ctx: Context, record: TunedRecord) -> Message:
    from tunerd.actions.sweep_record import decide

    write_tuned(ctx, record)
    if record.arm is not None:
        forget_failure(ctx, record.profile, arm_from_json(record.arm))
    decide(ctx, record.sweep, {"what": AGAIN, "generation": record.generation, "text": "by hand"})
    return note("tuned", f"what sweep {record.sweep} found is in force again")
