"""Challenges that were cut short, put together again from their samples so that they can go on.

The e-value of a challenge may be looked at after every pair and holds at whatever pair one stops, so a
challenge that had no decision yet may go on later with the pairs it has: as the same challenge, of the
same two arms, at the share of alpha that it was given when it began, and with all of its pairs. What was
decided is spent: another challenge of the same arms begins with new pairs and a share of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tunerd.core.sweep import observations
from tunerd.core.sweep.arm import Arm
from tunerd.core.sweep.challenge import Pair, pair_of
from tunerd.core.sweep.reading import Reading
from tunerd.core.sweep.sample import REQUEST, Sample
from tunerd.core.workload import Workload


@dataclass(frozen=True, slots=True)
class Carried:
    """A challenge with its pairs so far.

    Attributes:
        candidate: What challenged.
        number: Its number in the sweep in which it began: what share of alpha it has.
        pairs: All whole pairs, in order.
        is_earlier: Whether it began in a sweep before this one.
    """

    candidate: Arm
    number: int
    pairs: tuple[Pair, ...]
    is_earlier: bool


@dataclass
class _Block:
    """One attempt at a pair: readings by arm, process and class, in the order in which they came."""

    number: int
    is_earlier: bool
    readings: dict[tuple[Arm, str], dict[int, Reading]] = field(default_factory=dict)
    has_died: set[Arm] = field(default_factory=set)


def carried(history: Iterable[Sample], incumbent: Arm, workload: Workload) -> tuple[Carried, ...]:
    """Challenges of this incumbent, in the order in which they began; their standing is not judged here.

    A pair of which one side is missing is left out, and measured again. Left out altogether are challenges
    in which the candidate died, and those whose pairs do not follow one another from the first on.
    """
    found = []
    for (candidate, number), blocks in _blocks(history, incumbent, workload).items():
        last: Carried | None = None
        if blocks[0].number != 1:  # its first pairs are in a sweep that went on elsewhere
            continue
        for block in blocks:
            if block.number == 1:
                last = Carried(candidate, number, (), block.is_earlier)
            pair = _pair(block, incumbent, candidate, workload)
            if last is None or candidate in block.has_died:
                last = None
            elif pair is not None:
                follows = pair.number == len(last.pairs) + 1
                last = replace(last, pairs=(*last.pairs, pair)) if follows else None
        if last is not None and last.pairs:
            found.append(last)
    return tuple(found)


def _blocks(
    history: Iterable[Sample], incumbent: Arm, workload: Workload
) -> dict[tuple[Arm, int], list[_Block]]:
    """Attempts at pairs by candidate and number of the challenge."""
    kept = incumbent.canonical()
    of_block: dict[tuple[str, int], list[Sample]] = {}
    for sample in history:
        if sample.event == REQUEST and sample.pair is not None:
            of_block.setdefault((sample.block, sample.pair[0]), []).append(sample)
    found: dict[tuple[Arm, int], list[_Block]] = {}
    for (_, number), samples in of_block.items():
        arms = {sample.arm.canonical() for sample in samples}
        if len(arms - {kept}) != 1:
            continue
        candidate = next(iter(arms - {kept}))
        found.setdefault((candidate, number), []).append(_block(samples, workload))
    return found


def _block(samples: Sequence[Sample], workload: Workload) -> _Block:
    first = samples[0]
    block = _Block(first.pair[1] if first.pair else 0, first.is_earlier)
    for sample in samples:
        arm, request, reading = sample.arm.canonical(), sample.request, sample.reading
        if sample.failure and sample.failure != "refused":
            block.has_died.add(arm)
        if request is None or reading is None or sample.failure:
            continue
        text = observations.text_of(workload, request, first.block)
        if text is not None and reading.turn_ms is not None:
            block.readings.setdefault((arm, sample.process), {})[text] = reading
    return block


def _pair(block: _Block, incumbent: Arm, candidate: Arm, workload: Workload) -> Pair | None:
    """The pair, if both sides answered every class; of several processes the last counts."""
    sides: dict[Arm, list[Reading]] = {}
    for (arm, _), by_text in block.readings.items():
        if len(by_text) == len(workload.classes):
            sides[arm] = [by_text[text] for text in range(len(workload.classes))]
    before, after = sides.get(incumbent.canonical()), sides.get(candidate)
    if before is None or after is None:
        return None
    return pair_of(block.number, before, after, workload)
