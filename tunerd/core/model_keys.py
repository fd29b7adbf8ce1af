"""Metadata of a model file by meaning: numbers that are numbers, and `None` for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from tunerd.core.gguf import ArrayValue, Value

# Far above any real size; keeps arithmetic on a hostile file small.
_MOST = 2**40


@dataclass(frozen=True, slots=True)
class Keys:
    """The metadata of one file; `name` is the file in errors."""

    metadata: Mapping[str, Value]
    name: str

    @property
    def architecture(self) -> str | None:
        """`general.architecture`."""
        return self.text("general.architecture")

    def text(self, key: str) -> str | None:
        """A string; None for anything else, also for one that was too long to keep."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """A whole number from 0 on."""
        value = self.metadata.get(key)
        return value if _is_count(value) else None

    def length(self, key: str) -> int | None:
        """The length of an array."""
        value = self.metadata.get(key)
        return value.length if isinstance(value, ArrayValue) else None

    def own(self, key: str) -> int | None:
        """A number below the architecture's own prefix."""
        return self.number(f"{self.architecture}.{key}")

    def own_values(self, key: str) -> tuple[int, ...] | None:
        """An array of numbers or truth values below the architecture's prefix."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, ArrayValue) or value.values is None:
            return None
        whole = tuple(int(one) for one in value.values if isinstance(one, bool) or _is_count(one))
        return whole if len(whole) == value.length else None

    def own_per_block(self, key: str, n_blocks: int) -> tuple[int, ...] | None:
        """A number for every block: an array of at least that length, or one number for all."""
        single = self.own(key)
        if single is not None:
            return (single,) * n_blocks
        values = self.own_values(key)
        return values[:n_blocks] if values is not None and len(values) >= n_blocks else None

    def own_most(self, key: str) -> int | None:
        """A number, or the largest of an array."""
        single = self.own(key)
        if single is not None:
            return single
        return max(self.own_values(key) or (), default=None)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST
