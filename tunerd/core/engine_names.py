"""Names of engines in profiles that mean no engine: misspelt ones would have no effect, and nobody would see."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tunerd.core.engine import Family
from tunerd.core.nearest import nearest_name
from tunerd.core.profile_check import Problem, flatten, flatten_pins

EMBEDDED = "embedded"
ALWAYS = (*(str(family) for family in Family), EMBEDDED)
"""Names that a profile may use whether or not such an engine is here."""


def unknown_names(
    source: str, data: Mapping[str, Any], known: Collection[str]
) -> tuple[Problem, ...]:
    """Every name of an engine in a profile file that is no family, no path and none of `known`."""
    names = (*ALWAYS, *known)
    return tuple(
        Problem(
            source,
            key,
            f"`{word}`, which is no engine here",
            ", ".join(dict.fromkeys(names)),
            nearest_name(word, names),
        )
        for key, word in _words(data)
        if word not in names and "/" not in word
    )


def _words(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where engines are named, and how; data need not be checked before."""
    engines, pins = data.get("engines", {}), data.get("pin", {})
    for name in engines if isinstance(engines, Mapping) else ():
        yield f"engines.{name}", name
    pinned = flatten_pins(pins) if isinstance(pins, Mapping) else {}
    for key, wanted in (
        ("engine.prefer", flatten(data).get("engine.prefer")),
        ("pin.engine.prefer", pinned.get("engine.prefer")),
    ):
        for word in wanted if isinstance(wanted, list | tuple) else ():
            if isinstance(word, str):
                yield key, word
