"""Merges the layers of a profile into one, and remembers which layer set each value.

Later layers win, per key: tunerd's own defaults, shipped files (what a file `extends` before it),
site files, the tuned layer, `[pin]` keys, `--set`. Within one file an `[engines.NAME]` table wins
over the file's general value, the table of a named engine over that of its family. The value
"default" in any layer leaves a key to the engine.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tunerd.errors import UsageError
from tunerd.profile import schema
from tunerd.words import Problem, nearest_name

SET_SOURCE = "--set"


class Layer(StrEnum):
    """Who may set a value, weakest first."""

    TUNERD = "tunerd"
    SHIPPED = "shipped"
    SITE = "site"
    TUNED = "tuned"
    PIN = "pin"
    SET = "set"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from: layer, file or option, and why where tunerd itself chose."""

    layer: Layer
    source: str
    table: str = ""
    reason: str = ""

    def __str__(self) -> str:
        where = f"{self.source} [{self.table}]" if self.table else self.source
        return f"{where}: {self.reason}" if self.reason else where


@dataclass(frozen=True, slots=True)
class LayerFile:
    """One layer as read: parsed TOML, not checked yet, and reasons by dotted key."""

    layer: Layer
    source: str
    data: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that some layer set, with the values that it replaced, oldest first."""

    key: str
    value: Any
    origin: Origin
    replaced: tuple[tuple[Origin, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Resolved:
    """A profile after all layers: typed values, and for each dotted key who set it.

    `left_to_engine` holds keys that a layer left to the engine on purpose; `pins` the keys that
    neither the tuned layer nor a sweep may change.
    """

    name: str
    profile: schema.ProfileFile
    settings: Mapping[str, Setting]
    left_to_engine: Mapping[str, Origin]
    pins: frozenset[str]
    layers: tuple[str, ...]

    def origin(self, key: str) -> Origin | None:
        """Who set this key; None if no layer did."""
        setting = self.settings.get(key)
        return setting.origin if setting is not None else None


def parse_set(option: str) -> tuple[str, Any]:
    """`key=value` as typed: the value as TOML where it parses and the key takes it, else as text.

    Raises:
        UsageError: there is no `=` or no key.
    """
    key, equals, text = option.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UsageError(
            f"--set {shlex.quote(option)}: expected key=value",
            hint="for example --set speculation.n_max=2",
        )
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # tomllib lets both of Python's limits through
        return key, text
    value = parsed["value"]
    if len(parsed) > 1 or (_is_wrong(key, value) and not _is_wrong(key, text)):
        return key, text
    return key, value


def _is_wrong(key: str, value: object) -> bool:
    return any(True for _ in schema.validate("", schema.nest({key: value})))


def set_layer(options: Mapping[str, Any]) -> LayerFile:
    """The layer of what was given with `--set`, by dotted key."""
    return LayerFile(Layer.SET, SET_SOURCE, schema.nest(options))


def resolve(
    name: str, layers: Sequence[LayerFile], engine_names: Sequence[str] = ()
) -> Resolved | tuple[Problem, ...]:
    """The merged profile, or every problem of every layer.

    Args:
        name: Name of the profile.
        layers: Weakest first; `[pin]` tables in them become the pin layer.
        engine_names: Which `[engines.NAME]` tables apply, family first; none while no engine is
            chosen.
    """
    problems = tuple(problem for file in layers for problem in _check(file))
    if problems:
        return problems
    history: dict[str, list[tuple[Origin, Any]]] = {}
    for key, value, origin in _assignments(layers, engine_names):
        history.setdefault(key, []).append((origin, value))
    settings: dict[str, Setting] = {}
    left: dict[str, Origin] = {}
    for key, values in history.items():
        origin, value = values[-1]
        if schema.is_left_to_engine(key, value):
            left[key] = origin
        else:
            settings[key] = Setting(key, value, origin, tuple(values[:-1]))
    nested = schema.nest({key: setting.value for key, setting in settings.items()})
    remaining = tuple(schema.validate(name, nested))
    if remaining:
        return remaining
    return Resolved(
        name=name,
        profile=schema.ProfileFile.model_validate(nested),
        settings=settings,
        left_to_engine=left,
        pins=frozenset(_pinned(layers)),
        layers=tuple(dict.fromkeys(file.source for file in layers)),
    )


def _check(file: LayerFile) -> Iterator[Problem]:
    yield from schema.check_file(file.source, file.data)
    if file.layer is Layer.SET and "extends" in file.data:
        yield Problem(file.source, "extends", repr(file.data["extends"]),
                      "only a file may say what it extends; name that profile instead")  # fmt: skip


def _assignments(
    layers: Sequence[LayerFile], engine_names: Sequence[str]
) -> Iterator[tuple[str, Any, Origin]]:
    for file in layers:
        if file.layer is not Layer.SET:
            yield from _assignments_of(file, engine_names)
    for file in layers:
        for key, value in schema.flatten(file.data.get("pin", {})).items():
            yield key, value, Origin(Layer.PIN, file.source, "pin")
    for file in layers:
        if file.layer is Layer.SET:
            yield from _assignments_of(file, engine_names)


def _assignments_of(
    file: LayerFile, engine_names: Sequence[str]
) -> Iterator[tuple[str, Any, Origin]]:
    general = {key: value for key, value in file.data.items() if key not in {"engines", "pin"}}
    for key, value in schema.flatten(general).items():
        yield key, value, Origin(file.layer, file.source, "", file.reasons.get(key, ""))
    for engine in engine_names:
        override = file.data.get("engines", {}).get(engine, {})
        for key, value in schema.flatten(override).items():
            yield key, value, Origin(file.layer, file.source, f"engines.{engine}")


def _pinned(layers: Iterable[LayerFile]) -> Iterator[str]:
    for file in layers:
        yield from schema.flatten(file.data.get("pin", {}))
        if file.layer is Layer.SET:
            yield from schema.flatten(file.data)


DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080

# Depth and gate are always passed where a model drafts: defaults of builds moved between (16, 0.75), (16, 0.0)
# and (3, 0.0).
_DEFAULTS: dict[str, tuple[object, str]] = {
    "serving.host": (DEFAULT_HOST, "nobody else is let in unless a profile says so"),
    "serving.port": (DEFAULT_PORT, "builds differ (8080, 9931), so it is always passed"),
    "serving.n_parallel": (1, "builds differ (1, auto = 4), and speculation wants one slot"),
    "serving.flash_attn": ("on", "a quantised KV cache needs it, and builds differ"),
    "serving.jinja": (True, "tool calls and most templates need it, and builds differ"),
    "serving.context_shift": (False, "silently dropping context is worse than an error"),
    "serving.metrics": (True, "tunerd reads the server's own counters"),
    "serving.log_verbosity": (4, "memory and placement lines are at level 4 since May 2026"),
    "speculation.type": ("off", "speculation is a choice"),
    "memory.fit_mib": (1024, "the engines' own margin, stated because builds differ"),
    "speculation.n_max": (3, "today's mainline default, stated because builds differ"),
    "speculation.p_min": (0.0, "today's mainline default, stated because builds differ"),
}


def default_layer() -> LayerFile:
    """Tunerd's own defaults, with the reason for each."""
    return LayerFile(
        layer=Layer.TUNERD,
        source="tunerd",
        data=schema.nest({key: value for key, (value, _) in _DEFAULTS.items()}),
        reasons={key: reason for key, (_, reason) in _DEFAULTS.items()},
    )


MAX_EXTENDS = 8
# What a child does not inherit: it describes the parent alone.
_OWN = ("description", "published", "extends", "pin")


@dataclass(frozen=True, slots=True)
class ProfileSources:
    """Every profile file that was found, by layer and name: parsed, or why it cannot be read."""

    files: Mapping[tuple[Layer, str], LayerFile]
    unread: Mapping[tuple[Layer, str], Problem] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted({name for layer, name in self.files if layer is not Layer.TUNED}))

    def of(self, name: str, *layers: Layer) -> tuple[LayerFile, ...]:
        """The files of this name in these layers, in their order."""
        return tuple(self.files[layer, name] for layer in layers if (layer, name) in self.files)


def layers_of(
    name: str, sources: ProfileSources, *, with_tuned: bool = True
) -> tuple[LayerFile, ...] | Problem:
    """The layers of a profile below `--set`, or why it cannot be put together."""
    chain = chain_of(name, sources)
    if isinstance(chain, Problem):
        return chain
    layers = [default_layer()]
    for ancestor in chain[:-1]:
        layers += [
            replace(file, data={key: value for key, value in file.data.items() if key not in _OWN})
            for file in sources.of(ancestor, Layer.SHIPPED, Layer.SITE)
        ]
    own = (Layer.SHIPPED, Layer.SITE, *((Layer.TUNED,) if with_tuned else ()))
    return (*layers, *sources.of(name, *own))


def chain_of(name: str, sources: ProfileSources) -> list[str] | Problem:
    """The profile with what it extends: ancestors first, the profile itself last."""
    chain: list[str] = []
    current: str | None = name
    while current is not None:
        where = f"profile {chain[-1]}" if chain else "profile"
        if current in chain:
            loop = " -> ".join([*chain, current])
            return Problem(where, "extends", loop, "a chain without a loop")
        if current not in sources.names:
            return Problem(
                source=where,
                key="extends" if chain else "name",
                found=f"`{current}`",
                allowed=", ".join(sources.names) or "no profile is installed",
                nearest=nearest_name(current, sources.names),
            )
        chain.append(current)
        if len(chain) > MAX_EXTENDS:
            return Problem(where, "extends", f"{len(chain)} levels", f"at most {MAX_EXTENDS}")
        own = sources.of(current, Layer.SITE, Layer.SHIPPED)
        parents = (file.data.get("extends") for file in own)
        found = next((parent for parent in parents if parent is not None), None)
        if found is not None and not isinstance(found, str):
            return Problem(where, "extends", repr(found), "the name of a profile")
        current = found
    return chain[::-1]
