"""The verdict in a plain sentence."""

from __future__ import annotations

from tunerd.core.compare.decision import LEAST_PAIRS, Effect, Standing
from tunerd.core.compare.outcome import Comparison, End, Part

_PART_NAMES = {"prefill": "prefill", "decode": "decode", "turn": "turn time"}


def sentence(found: Comparison, a: str, b: str, workload: str) -> str:
    """What a person is told: which is faster by how much, or what could not be excluded."""
    effect = found.effect
    if effect is None:
        return f"{a} and {b} could not be compared on {workload}: {found.problem or found.end}"
    pairs = f"{effect.n_pairs} pairs"
    if found.standing is Standing.B_FASTER:
        return f"{b} is {_faster(effect)} than {a}, {_interval(effect)}, on {workload} ({pairs})"
    if found.standing is Standing.A_FASTER:
        turned = turned_round(effect)
        return f"{a} is {_faster(turned)} than {b}, {_interval(turned)}, on {workload} ({pairs})"
    largest = largest_possible(effect)
    if found.standing is Standing.NO_DIFFERENCE and largest is not None:
        return (
            f"{a} and {b} are equally fast on {workload}: a difference of more than "
            f"{_percent(largest)} is excluded ({pairs})"
        )
    if largest is None or effect.n_pairs < LEAST_PAIRS:
        return f"nothing can be said of {a} and {b} on {workload} yet ({pairs}, {found.end})"
    return (
        f"no difference between {a} and {b} was shown on {workload}; one of up to "
        f"{_percent(largest)} cannot be excluded ({pairs}, {found.end})"
    )


def _faster(effect: Effect) -> str:
    return f"{_percent(effect.gain)} faster"


def _interval(effect: Effect) -> str:
    if effect.gain_low is None or effect.gain_high is None:
        return "too few pairs for an interval"
    return f"95 % interval {100 * effect.gain_low:.1f} to {100 * effect.gain_high:.1f}"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def turned_round(effect: Effect) -> Effect:
    """The effect with A and B exchanged."""
    return Effect(
        ratio=1.0 / effect.ratio,
        low=None if effect.high is None else 1.0 / effect.high,
        high=None if effect.low is None else 1.0 / effect.low,
        n_pairs=effect.n_pairs,
    )


def largest_possible(effect: Effect) -> float | None:
    """The largest difference, either way, that the interval leaves (ratio)."""
    if effect.low is None or effect.high is None:
        return None
    return max(1.0 / effect.low - 1.0, effect.high - 1.0, 0.0)


def part_sentence(part: Part, name: str) -> str:
    """One part in words: `decode: 1.31 s against 1.22 s, B 7.4 % faster (3.1 to 11.9)`."""
    effect = part.effect
    what = name if part.class_index is not None else _PART_NAMES[part.name]
    limits = (
        ""
        if effect.gain_low is None or effect.gain_high is None
        else f" ({100 * effect.gain_low:+.1f} to {100 * effect.gain_high:+.1f})"
    )
    return (
        f"{what}: {part.a_s:.3g} s against {part.b_s:.3g} s, B {100 * effect.gain:+.1f} %{limits}"
    )


def reasons(found: Comparison) -> tuple[str, ...]:
    """What else a reader should know of how it ended."""
    told = []
    if found.end is End.TIME:
        told.append("the time ended before the pairs had decided")
    if found.end is End.PAIRS:
        told.append("the pairs ended before they had decided")
    if found.problem is not None:
        told.append(found.problem)
    if found.n_unusable:
        told.append(f"{found.n_unusable} answers did not count and were asked anew")
    return tuple(told)
