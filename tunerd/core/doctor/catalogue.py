"""Every rule of `tunerd doctor`, in the order in which they are asked and documented."""

from __future__ import annotations

from tunerd.core.doctor import (
    card_rules,
    engine_rules,
    host_rules,
    memory_rules,
    speculation_rules,
)
from tunerd.core.doctor.diagnosis import Rule

ALL_RULES: tuple[Rule, ...] = (
    *card_rules.RULES,
    *host_rules.RULES,
    *engine_rules.RULES,
    *memory_rules.RULES,
    *speculation_rules.RULES,
)
