"""The figures of a reply: each is believed only within what a server can have done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunerd.core.sample import Timings

# llama.cpp counts tokens in 32 bits.
MOST_TOKENS = 2**31 - 1
# No request is waited for as long as a month.
MOST_MS = 31 * 24 * 3600 * 1000.0
# The last draft may be longer than what was still asked for.
_DRAFT_TOKENS = 256


@dataclass
class FigureReader:
    """Reads figures, and remembers whether one of them cannot be.

    A key that is missing or null is None; so is what is no number, or a number out of its range, which
    set `has_impossible` besides.
    """

    has_impossible: bool = False

    def count(self, found: Mapping[str, Any], key: str) -> int | None:
        """A number of tokens."""
        value = self._number(found, key)
        if value is None or not self._is_within(value, MOST_TOKENS):
            return None
        self.has_impossible |= value != int(value)
        return int(value) if value == int(value) else None

    def ms(self, found: Mapping[str, Any], key: str) -> float | None:
        """Milliseconds."""
        value = self._number(found, key)
        return float(value) if value is not None and self._is_within(value, MOST_MS) else None

    def timings(self, found: Mapping[str, Any]) -> Timings:
        """What a server reports of one request."""
        drafted, accepted = self._drafts(found)
        return Timings(
            cache_n=self.count(found, "cache_n"),
            prompt_n=self.count(found, "prompt_n"),
            prompt_ms=self.ms(found, "prompt_ms"),
            predicted_n=self.count(found, "predicted_n"),
            predicted_ms=self.ms(found, "predicted_ms"),
            draft_n=drafted,
            draft_n_accepted=accepted,
            accepted_by_position=self._by_depth(found.get("draft_by_depth")),
        )

    def n_cached(self, usage: Mapping[str, Any]) -> int | None:
        """Cached tokens by the OpenAI `usage`: in its details, or beside them as some servers do."""
        details = usage.get("prompt_tokens_details")
        if isinstance(details, Mapping) and "cached_tokens" in details:
            return self.count(details, "cached_tokens")
        return self.count(usage, "cached_tokens")

    def _number(self, found: Mapping[str, Any], key: str) -> float | None:
        value = found.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        self.has_impossible |= value is not None
        return None

    def _is_within(self, value: float, most: float) -> bool:
        # Of NaN every comparison is false.
        is_within = 0 <= value <= most
        self.has_impossible |= not is_within
        return is_within

    def _drafts(self, found: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """Drafted and accepted; neither where more was accepted than drafted or than generated."""
        drafted, accepted = self.count(found, "draft_n"), self.count(found, "draft_n_accepted")
        predicted = self.count(found, "predicted_n")
        if accepted is None:
            return drafted, accepted
        is_possible = (drafted is None or accepted <= drafted) and (
            predicted is None or accepted <= predicted + _DRAFT_TOKENS
        )
        self.has_impossible |= not is_possible
        return (drafted, accepted) if is_possible else (None, None)

    def _by_depth(self, rows: object) -> tuple[int, ...] | None:
        """ik's list of `{depth, draft_n, draft_n_accepted}`, depth from 1."""
        if not isinstance(rows, list) or not rows:
            return None
        counts: dict[int, int] = {}
        for row in rows:
            if not isinstance(row, Mapping):
                return None
            depth, accepted = self.count(row, "depth"), self.count(row, "draft_n_accepted")
            if depth is None or accepted is None or not 1 <= depth <= _DRAFT_TOKENS:
                return None
            counts[depth] = accepted
        return tuple(counts.get(depth, 0) for depth in range(1, max(counts) + 1))
