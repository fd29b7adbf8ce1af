"""`history`, `rollback --list` and `status` with a long past, against a short one.

    python -m benchmarks.history [--rounds 7] [--many 1000]

One swap is real; the others are copies of its record with a backup each.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.measure import (
    TUNERD,
    Case,
    compared,
    conditions,
    cpu_ms,
    note,
    options,
    say,
    take_turns,
)
from tests.support.build_box import BuildBox, build_box
from tests.support.deployment import UNIT
from tunerd.machine.files import Files
from tunerd.units.generations import Ending, Generations, Outcome

_FEW = 10
_DAY_S = 86400.0


def give_past(box: BuildBox, n: int) -> None:
    """Generations and backups of `n` swaps, the last of which serves."""
    box.profile("plain")
    box.apply("plain")
    kept = Generations(box.paths.generations_dir, Files())
    first = kept.read(1)
    text = kept.unit_text(1)
    assert first is not None
    assert text is not None
    for number in range(2, n + 1):
        at_s = first.generation.created_s + (number - n) * _DAY_S
        name = f"{UNIT}.pre-{number:08d}T000000Z-apply"
        older = text.replace(b"[Service]", b"# %d\n[Service]" % number, 1)
        (box.paths.unit_dir / name).write_bytes(older)
        record = replace(first.generation, number=number, created_s=at_s, replaced_backup=name)
        kept.create(record, older if number < n else text)
        outcome = Outcome.SERVING if number % 2 == 0 else Outcome.ROLLED_BACK
        kept.end(number, Ending(outcome, at_s, None, None, None))


def main() -> None:
    given = options(__doc__, rounds=7, many=1000)
    with build_box(None, shape="tiny") as short, build_box(None, shape="tiny") as long:
        for box, n in ((short, _FEW), (long, given.many)):
            note(f"writing a past of {n} swaps ...")
            give_past(box, n)
            assert box.json("history")["total"] == n
            assert box.json("status")["drift"] == []
        for words in (("history",), ("history", "--all"), ("rollback", "--list"), ("status",)):
            name = f"`tunerd {' '.join(words)}`"
            cases = [
                Case(
                    f"{name}, {n:,} swaps",
                    lambda box=box, words=words: cpu_ms(  # type: ignore[misc]
                        [TUNERD, *words], box.environment
                    ),
                )
                for box, n in ((short, _FEW), (long, given.many))
            ]
            take_turns(cases, given.rounds)
            say(compared(cases, cases[0], unit="CPU ms") + "\n")
    say(conditions(given.rounds))


if __name__ == "__main__":
    main()
