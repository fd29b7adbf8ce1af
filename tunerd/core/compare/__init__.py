"""Which of two servers is faster on a workload: pairs of fresh processes until the answer is sure."""

from tunerd.core.compare.decision import Decision, Effect, Standing, decide, effect_of
from tunerd.core.compare.loop import compare
from tunerd.core.compare.outcome import Comparison, Pair, PairBlock
from tunerd.core.compare.protocol import (
    SIDES,
    A,
    Asked,
    B,
    BootFailed,
    Life,
    LifeEnded,
    Limits,
    Side,
    Stand,
    Turn,
    Unusable,
)

__all__ = [
    "SIDES",
    "A",
    "Asked",
    "B",
    "BootFailed",
    "Comparison",
    "Decision",
    "Effect",
    "Life",
    "LifeEnded",
    "Limits",
    "Pair",
    "PairBlock",
    "Side",
    "Stand",
    "Standing",
    "Turn",
    "Unusable",
    "compare",
    "decide",
    "effect_of",
]
