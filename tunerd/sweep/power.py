"""Power limits of the card beside what a sweep found: speed and energy at each. Nothing of it stays in force."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from tunerd.app import Context
from tunerd.errors import TunerdError, UsageError
from tunerd.profile.arm import Arm, Box, Preempted, Refused, Request, ServerDied
from tunerd.profile.schema import POWER_LIMIT
from tunerd.profile.workload import Workload
from tunerd.result import Message, note, warning
from tunerd.words import Mode, all_known

_MOST_LIMITS = 8
_ROUNDS = 3
# The driver averages over a second what it holds to the limit, and clocks follow.
_SETTLE_S = 2.0
_MOST_SHARE = 0.25


def limits_of(ctx: Context, wanted: Sequence[Any]) -> tuple[float, ...]:
    """The limits to measure [W], ascending, with the one in force; none where none are asked for.

    Raises:
        UsageError: they cannot be set here, or one of them is not within what the card allows.
    """
    if not wanted:
        return ()
    if ctx.mode is not Mode.SYSTEM:
        why = "only root may change a card's power limit"
        raise _refused(why, "leave it out, or `sudo tunerd --system`")
    gpus = ctx.gpu.read().gpus or ()
    if len(gpus) != 1:
        raise _refused(f"it needs a machine with one GPU, and {len(gpus)} can be read")
    gpu = gpus[0]
    own_w, least_w, most_w = gpu.power_limit_w, gpu.power_min_w, gpu.power_max_w
    if gpu.uuid is None or own_w is None or least_w is None or most_w is None:
        raise _refused(f"{gpu.name} does not report its limits")
    for watts in wanted:
        is_number = isinstance(watts, int | float) and not isinstance(watts, bool)
        if not is_number or not least_w <= watts <= most_w:
            allowed = f"give watts between {least_w:g} and {most_w:g}"
            raise _refused(f"{gpu.name} cannot be limited to {watts!r}", allowed)
    limits = tuple(sorted({float(one) for one in wanted} | {own_w}))
    if len(limits) > _MOST_LIMITS:
        raise _refused(f"{len(limits)} limits are too many", f"give at most {_MOST_LIMITS}")
    return limits


def _refused(cause: str, hint: str = "leave it out") -> UsageError:
    text = f"{POWER_LIMIT} cannot be measured"
    return UsageError(text, cause=cause, state="nothing was touched", hint=hint)


def time_for(limits: Sequence[float], *, left_s: float, load_s: float, block_s: float) -> float:
    """What the search leaves of its time to them [s].

    Args:
        limits: Which.
        left_s: What there is.
        load_s: One start.
        block_s: One round through the workload.
    """
    rounds_s = _ROUNDS * len(limits) * (_SETTLE_S + block_s)
    return min(_MOST_SHARE * left_s, 2 * (load_s + rounds_s)) if limits else 0.0


@dataclass(frozen=True, slots=True)
class Round:
    """One round through the workload; energy is None where a class tells none [s, tok/s, J a token]."""

    turn_s: float
    tok_s: float | None
    joules_per_token: float | None


@dataclass(frozen=True, slots=True)
class PowerRow:
    """A configuration at one limit: means over its rounds."""

    case: str
    limit_w: float
    rounds: int
    turn_s: float
    tok_s: float | None
    joules_per_token: float | None


@dataclass
class PowerTable:
    """Every round, by configuration and limit, and why some are missing."""

    own_w: float
    rounds: dict[tuple[str, float], list[Round]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[PowerRow]:
        """By configuration in the order of measurement, by limit ascending."""
        names = list(dict.fromkeys(name for name, _ in self.rounds))
        keys = sorted(self.rounds, key=lambda key: (names.index(key[0]), key[1]))
        return [_row(*key, self.rounds[key]) for key in keys]

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {"own_w": self.own_w, "rows": [asdict(one) for one in self.rows],
                "reasons": list(self.reasons), "text": self.text}  # fmt: skip

    @property
    def text(self) -> str:
        """What it comes to for the first configuration, and the command that is a person's to type."""
        rows = self.rows
        first = [one for one in rows if one.case == rows[0].case]
        own = next((one for one in first if one.limit_w == self.own_w), None)
        known = [one for one in first if one.joules_per_token is not None]
        kept = f"the card's limit stays {self.own_w:g} W"
        if own is None or own.joules_per_token is None:
            return f"how much energy a token takes at {self.own_w:g} W is not known; {kept}"
        best = min(known, key=lambda one: one.joules_per_token or math.inf)
        if not _takes_less(self._joules(best), self._joules(own)):
            return f"no limit takes clearly less energy per token than {self.own_w:g} W; {kept}"
        return (
            f"at {best.limit_w:g} W a token takes {best.joules_per_token:.2f} J instead of "
            f"{own.joules_per_token:.2f}, and a turn {best.turn_s:.2f} s instead of {own.turn_s:.2f} "
            f"({best.turn_s / own.turn_s - 1:+.1%}); {kept}: `nvidia-smi -pl {best.limit_w:g}` sets it "
            "until the next boot"
        )

    def _joules(self, row: PowerRow) -> list[float]:
        """What a token took in each round that tells it."""
        return all_known(one.joules_per_token for one in self.rounds[row.case, row.limit_w])


def _takes_less(best: Sequence[float], own: Sequence[float]) -> bool:
    """Whether all rounds are there, and those of two limits lie further apart than the rounds of either.

    Of eight limits at which a token takes the same, the best of three rounds lies below all of the own one's in 17
    nights of 100, and so far below in 1.5 (normal noise, 20,000 nights drawn).
    """
    apart = min(own) - max(best)
    is_whole = min(len(best), len(own)) == _ROUNDS
    return is_whole and apart > max(max(one) - min(one) for one in (best, own))


def power_notes(table: Mapping[str, Any]) -> list[Message]:
    """What people should know of a table, as it is kept."""
    missing = [warning("power-limits", f"power limits: {one}") for one in table["reasons"]]
    return [*([note("power-limits", table["text"])] if table["rows"] else []), *missing]


def _row(case: str, limit_w: float, rounds: Sequence[Round]) -> PowerRow:
    joules = all_known(one.joules_per_token for one in rounds)
    speeds = all_known(one.tok_s for one in rounds)
    return PowerRow(
        case=case,
        limit_w=limit_w,
        rounds=len(rounds),
        turn_s=fmean(one.turn_s for one in rounds),
        tok_s=fmean(speeds) if speeds else None,
        joules_per_token=fmean(joules) if joules else None,
    )


def measure_limits(
    box: Box,
    workload: Workload,
    arms: Sequence[Arm],
    limits: Sequence[float],
    limited: Callable[[float], AbstractContextManager[None]],
    *,
    own_w: float,
    end_s: float,
    seed: int,
) -> PowerTable:
    """A fresh server of each arm, and rounds through the limits in an order of their own.

    A limit needs no start, so that all limits are compared within one process.

    Args:
        box: Where.
        workload: What is asked.
        arms: Which, the one that matters first.
        limits: Which [W].
        limited: Lets the card draw so much [W] for a body, and gives back the limit before.
        own_w: The limit in force [W].
        end_s: When there is no more time, on the box's clock.
        seed: Of the orders.

    Returns:
        What was measured until then, with the reason of an early end.
    """
    table, chance, longest_s = PowerTable(own_w), random.Random(seed), 0.0  # noqa: S311 -- no secret
    try:
        for arm in arms:
            box.check()
            if not (boot := box.restart(arm)).ok:
                table.reasons.append(f"{arm} does not start: {boot.failure}")
                continue
            for number in range(_ROUNDS):
                for watts in chance.sample(list(limits), len(limits)):
                    began_s = box.now()
                    if began_s + longest_s > end_s:
                        table.reasons.append("there was not enough time for all of it")
                        return table
                    box.check()
                    with limited(watts):
                        box.sleep(_SETTLE_S)
                        found = _round(box, workload, f"power {number} {watts:g}")
                    table.rounds.setdefault((str(arm), watts), []).append(found)
                    longest_s = max(longest_s, box.now() - began_s)
    except (Preempted, Refused, ServerDied) as end:
        table.reasons.append(f"it ended early: {end}")
    except TunerdError as error:
        table.reasons.append(error.words)
    return table


def _round(box: Box, workload: Workload, name: str) -> Round:
    """Each class once, behind its bare prefix where it has one."""
    found: list[Mapping[str, Any]] = []
    for at, one in enumerate(workload.classes):
        request = Request(one.kind, f"{name} {at}", one.cached_tokens, one.new_tokens, one.n_predict,
                          one.concurrency)  # fmt: skip
        if request.is_warm:
            box.measure(request.bare)
        found.append(box.measure(request))
    walls = [(one["wall_ms"] + (one.get("decode_left_ms") or 0.0)) / 1000 for one in found]
    n = _weighted(workload, found, "predicted_n")
    ms, joules = _weighted(workload, found, "predicted_ms"), _weighted(workload, found, "energy_j")
    return Round(
        turn_s=workload.turn_time_s(walls),
        # The first token of an answer belongs to its prompt.
        tok_s=(n - 1) / ms * 1000 if n and ms else None,
        joules_per_token=joules / n if n and joules else None,
    )


def _weighted(workload: Workload, found: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The mean over the workload; None where a class does not tell."""
    known = all_known(one.get(key) for one in found)
    return workload.turn_time_s(known) if known else None
