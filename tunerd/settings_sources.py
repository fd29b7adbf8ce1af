"""Settings from `tunerd.toml` and `TUNERD_*` variables, each name checked, each error with its place.

Sources, strongest first: environment, file, defaults.
"""

from __future__ import annotations

import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from tunerd.core.nearest import nearest_name
from tunerd.core.paths import Paths
from tunerd.core.value_words import allowed_words
from tunerd.errors import ConfigError
from tunerd.settings import PREFIX, EngineSettings, Settings

# Read before there are settings, or by the tests alone.
_ELSEWHERE = ("MODE", "CONFIG_DIR", "STATE_DIR", "RUNTIME_DIR", "UNIT_DIR", "LOG_LEVEL")
_LOG_LEVELS = ("debug", "info", "warning", "error")
_TEST_PREFIX = "TUNERD_TEST_"
_MAX_FILE_BYTES = 1024 * 1024


def load_settings(paths: Paths, environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of this machine and call.

    Raises:
        ConfigError: the file cannot be read or parsed, a name is unknown, or a value is not
            allowed; all problems at once.
    """
    variables = _variables(environment)
    problems = [*_unknown_variables(variables), *_wrong_log_level(environment)]
    unreadable = {name: why for name in variables if (why := _unreadable(name, variables[name]))}
    problems += unreadable.values()
    readable = {name: text for name, text in variables.items() if name not in unreadable}
    data = _over(_read(paths.settings_file), _from_variables(readable))
    try:
        settings = Settings(**data)
    except ValidationError as error:
        sources = _sources(paths, readable)
        problems += [_describe(sources, dict(entry)) for entry in error.errors()]
    if problems:
        raise ConfigError(
            f"settings are wrong in {len(problems)} place{'s' if len(problems) > 1 else ''}",
            cause="\n".join(problems),
            state="nothing was touched",
            hint=f"correct `{paths.settings_file}` or the environment",
        )
    return settings


def check_settings(text: str, path: Path) -> None:
    """Whether a text may be the settings file.

    Raises:
        ConfigError: it cannot be parsed, or holds what is not allowed; all problems at once.
    """
    try:
        Settings(**_parsed(text, path))
    except ValidationError as error:
        sources = _Sources({}, str(path))
        problems = [_describe(sources, dict(entry)) for entry in error.errors()]
        raise ConfigError("the settings would be wrong", cause="\n".join(problems)) from error


def sources_of(paths: Paths, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Dotted name of every setting, with where its value comes from."""
    sources = _sources(paths, _variables(environment))
    in_file = _dotted(_read(paths.settings_file))
    return {
        name: ", ".join(dict.fromkeys(sources.of(key) for key in keys)) if keys else "default"
        for name in _known()
        for keys in [[key for key in [*sources.by_key, *in_file] if _is_within(key, name)]]
    }


@dataclass(frozen=True, slots=True)
class _Sources:
    """Which variable sets each key; everything else comes from the file."""

    by_key: Mapping[str, str]
    file: str

    def of(self, key: str) -> str:
        found = (name for set_key, name in self.by_key.items() if _is_within(key, set_key))
        return next(found, self.file)


def _sources(paths: Paths, variables: Mapping[str, str]) -> _Sources:
    return _Sources({_key(name): name for name in variables}, str(paths.settings_file))


def _is_within(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")


def _key(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower().replace("__", ".")


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are settings, or are meant to be."""
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(PREFIX)
        and not name.startswith(_TEST_PREFIX)
        and (name.removeprefix(PREFIX) not in _ELSEWHERE or _key(name) in _known())
    }


def _from_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """What pydantic-settings makes of variables: nested tables, JSON where a list is wanted.

    Raises:
        SettingsError: a value is no JSON where it must be.
    """
    source = EnvSettingsSource(Settings)
    known = (name for name in variables if _is_known(name))
    source.env_vars = {name.lower(): variables[name] for name in known}
    return source()


def _over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Both, key by key; `top` wins."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _over(below, value)
        else:
            merged[key] = value
    return merged


def _unreadable(variable: str, text: str) -> str | None:
    try:
        _from_variables({variable: text})
    except SettingsError:
        return f'{variable}: found {text!r}; allowed: JSON, such as ["/models"]'
    return None


def _is_known(variable: str) -> bool:
    return _key(variable) in _known() or _key(variable).startswith("engines.")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`", cause=error.strerror) from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"settings file is larger than {_MAX_FILE_BYTES} bytes: `{path}`")
    try:
        text = content.decode()
    except ValueError as error:
        raise _no_toml(path, error) from error
    return _parsed(text, path)


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        raise _no_toml(path, error) from error


def _no_toml(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"not valid TOML: `{path}`", cause=str(error), state="nothing was touched")


def _unknown_variables(variables: Mapping[str, str]) -> list[str]:
    names = [PREFIX + key.upper().replace(".", "__") for key in _known()]
    problems = []
    for variable in variables:
        if _is_known(variable):
            continue
        nearest = nearest_name(variable, [*names, *(PREFIX + key for key in _ELSEWHERE)])
        hint = f" (did you mean {nearest}?)" if nearest else ""
        problems.append(f"environment: {variable}: no such setting{hint}")
    return problems


def _wrong_log_level(environment: Mapping[str, str]) -> list[str]:
    variable = f"{PREFIX}LOG_LEVEL"
    level = environment.get(variable, _LOG_LEVELS[1])
    if level.lower() in _LOG_LEVELS:
        return []
    nearest = nearest_name(level.lower(), _LOG_LEVELS)
    hint = f" (did you mean {nearest}?)" if nearest else ""
    return [f"environment: {variable}: found {level!r}{hint}; allowed: {', '.join(_LOG_LEVELS)}"]


def _describe(sources: _Sources, entry: dict[str, Any]) -> str:
    location = [str(part) for part in entry["loc"]]
    key = ".".join(location)
    where = f"{sources.of(key)}: {key}"
    if entry["type"] == "extra_forbidden":
        siblings = _siblings(location)
        nearest = nearest_name(location[-1], siblings)
        hint = f" (did you mean `{nearest}`?)" if nearest else ""
        return f"{where}: found an unknown key{hint}; allowed: {', '.join(siblings)}"
    allowed = allowed_words(entry)
    found = "nothing" if entry["type"] == "missing" else repr(entry.get("input"))
    return f"{where}: found {found}; allowed: {allowed}"


def _siblings(location: Sequence[str]) -> tuple[str, ...]:
    """The names that the table of this key has."""
    match location:
        case ["engines", _, *inner] if inner:
            return tuple(EngineSettings.model_fields)
    table: type[BaseModel] | None = Settings
    for part in location[:-1]:
        field = table.model_fields.get(part) if table is not None else None
        table = _table_in(field.annotation) if field is not None else None
    return tuple(table.model_fields) if table is not None else ()


def _known() -> tuple[str, ...]:
    """Dotted names of every setting; of `engines` only the table itself."""
    names: list[str] = []
    for name, field in Settings.model_fields.items():
        table = _table_in(field.annotation)
        if table is None:
            names.append(name)
        else:
            names.extend(f"{name}.{inner}" for inner in table.model_fields)
    return tuple(names)


def _table_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        parts = (_table_in(part) for part in typing.get_args(annotation))
        return next((part for part in parts if part is not None), None)
    return None


def _dotted(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            names.extend(_dotted(value, f"{prefix}{key}."))
        else:
            names.append(f"{prefix}{key}")
    return names
