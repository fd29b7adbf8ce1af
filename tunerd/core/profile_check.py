"""Finds every mistake of a profile file at once, each with its key, what may stand there, and the nearest name."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from tunerd.core.nearest import nearest_name
from tunerd.core.profile import ProfileFile
from tunerd.core.value_words import allowed_words

LEAVE_TO_ENGINE = "default"
SECTIONS = ("match", "model", "engine", "serving", "speculation", "memory")
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a profile: where, what stands there, what may, and the nearest valid name."""

    source: str
    key: str
    found: str
    allowed: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" (did you mean `{self.nearest}`?)" if self.nearest else ""
        return f"{self.source}: {self.key}: found {self.found}{hint}; allowed: {self.allowed}"


def check_file(source: str, data: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Every mistake in one profile file; empty if there is none."""
    problems = list(validate(source, without_defaults(data)))
    sweep = data.get("sweep", {})
    if isinstance(sweep, Mapping):
        problems.extend(_unknown_keys(source, "sweep", sweep))
    pins = data.get("pin", {})
    if not isinstance(pins, Mapping):
        return (*problems, Problem(source, "pin", _shown(pins), "a table of keys"))
    flat = flatten_pins(pins)
    known = {key: value for key, value in flat.items() if key.partition(".")[0] in SECTIONS}
    problems.extend(_unknown_keys(source, "pin", [key for key in flat if key not in known]))
    problems.extend(
        Problem(source, f"pin.{problem.key}", problem.found, problem.allowed, problem.nearest)
        for problem in validate(source, without_defaults(nest(known)))
    )
    return tuple(problems)


def _unknown_keys(source: str, table: str, keys: Iterable[str]) -> Iterator[Problem]:
    """Those of the dotted keys in a table that no profile knows."""
    known = all_keys()
    for key in keys:
        if key not in known:
            yield Problem(source, f"{table}.{key}", "an unknown key",
                          "a dotted key such as speculation.n_max", nearest_name(key, known))  # fmt: skip


def validate(source: str, data: Mapping[str, Any]) -> Iterable[Problem]:
    """The mistakes that the schema sees, one per key."""
    try:
        ProfileFile.model_validate(dict(data))
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for entry in error.errors(include_url=False):
            problem = _problem(source, dict(entry))
            before = found.setdefault(problem.key, problem)
            if problem.allowed not in before.allowed:
                # every branch of a union complains about the same key
                allowed = f"{before.allowed}, or {problem.allowed}"
                found[problem.key] = replace(before, allowed=allowed)
        yield from found.values()


def without_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data without pins and without values that are left to the engine."""
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if key == "pin":
            continue
        if key in SECTIONS and isinstance(value, Mapping):
            kept[key] = {k: v for k, v in value.items() if not is_left_to_engine(f"{key}.{k}", v)}
        elif key == "engines" and isinstance(value, Mapping):
            kept[key] = {
                name: without_defaults(override) if isinstance(override, Mapping) else override
                for name, override in value.items()
            }
        else:
            kept[key] = value
    return kept


def is_left_to_engine(key: str, value: object) -> bool:
    """Whether this value of a known key means that the engine's own default shall hold."""
    return value == LEAVE_TO_ENGINE and key in all_keys()


def flatten(data: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of the sections and of the environment; everything else under its own name."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if key in {*SECTIONS, "environment"} and isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": inner_value for inner, inner_value in value.items()})
        else:
            flat[key] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        head, dot, rest = key.partition(".")
        if dot and head in {*SECTIONS, "environment"}:
            nested.setdefault(head, {})[rest] = value
        else:
            nested[key] = value
    return nested


def flatten_pins(table: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of a `[pin]` table, which may be written nested or with quoted dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and "." not in key:
            flat.update({f"{key}.{inner}": inner_value for inner, inner_value in value.items()})
        else:
            flat[key] = value
    return flat


def all_keys() -> tuple[str, ...]:
    """Every dotted key that a profile may set."""
    return tuple(
        f"{section}.{field}"
        for section in SECTIONS
        for field in _table_of(ProfileFile.model_fields[section].annotation).model_fields
    )


def _place_of(location: Sequence[int | str]) -> tuple[str, tuple[str, ...], type[BaseModel] | None]:
    """The dotted key of an error, the names that its table has, and the table wanted there if one is.

    Names of union branches and constraints are not part of the key.
    """
    kept: list[str] = []
    names: tuple[str, ...] = ()
    here: object = ProfileFile
    for part in location:
        table, container = _model_in(here), _container_in(here)
        if table is not None and _is_branch(str(part), table):
            continue
        names = ()
        if typing.get_origin(container) is dict:
            here = typing.get_args(container)[1]
        elif table is not None:
            names = tuple(table.model_fields)
            field = table.model_fields.get(str(part))
            here = field.annotation if field is not None else None
        elif container is not None and isinstance(part, int):
            here = typing.get_args(container)[0]
        else:
            break
        kept.append(str(part))
    return ".".join(kept), names, _model_in(here)


def _is_branch(part: str, table: type[BaseModel]) -> bool:
    """Whether a part of a place only says which branch of a union complains."""
    return part == table.__name__ or part.startswith("constrained-")


def _container_in(annotation: object) -> object:
    """The dict, tuple or list inside an annotation, None if it takes no such thing or others too."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        branches = [part for part in typing.get_args(annotation) if part is not type(None)]
        return _container_in(branches[0]) if len(branches) == 1 else None
    return annotation if typing.get_origin(annotation) in {dict, tuple, list} else None


def _problem(source: str, entry: Mapping[str, Any]) -> Problem:
    key, names, wanted = _place_of(entry["loc"])
    message, found = entry["msg"], entry.get("input")
    if entry["type"] == "extra_forbidden":
        last = str(entry["loc"][-1])
        elsewhere = (name for name in all_keys() if name.endswith(f".{last}"))
        nearest = nearest_name(last, all_keys() if "." in last else names) or next(elsewhere, None)
        return Problem(source, key, "an unknown key", ", ".join(names), nearest)
    keys = [] if wanted is None else [f"{key}.{name}" for name in wanted.model_fields]
    allowed = allowed_words(entry, keys)
    options = re.findall(r"'([^']+)'", message) if entry["type"] == "literal_error" else []
    nearest = nearest_name(found, options) if isinstance(found, str) else None
    return Problem(source, key, _shown(found), allowed, nearest)


def _table_of(annotation: object) -> type[BaseModel]:
    model = _model_in(annotation)
    if model is None:  # a section that is no table would be a mistake in profile.py
        raise TypeError(annotation)
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model inside `Model`, `Model | None` or `dict[str, Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in {typing.Annotated, typing.Union, types.UnionType, dict}:
        found = (_model_in(part) for part in typing.get_args(annotation))
        return next((model for model in found if model is not None), None)
    return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
