"""What may stand in a place of a profile or settings file, in words for people instead of the schema's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_LISTS = ("tuple_type", "list_type", "set_type")
_TABLES = ("dict_type", "model_type", "model_attributes_type", "mapping_type")
_PLAIN = {
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number",
    "path_type": "a path in quotes",
}
_PREFIXES = ("input should be ", "value error, ")
_MAX_EXAMPLE = 100
_MAX_KEYS = 4


def allowed_words(entry: Mapping[str, Any], keys: Sequence[str] = ()) -> str:
    """What the schema's complaint says may stand there.

    Args:
        entry: One entry of pydantic's `ValidationError.errors()`.
        keys: Whole names of the keys that the table has, where a table is wanted.
    """
    kind, context = entry["type"], entry.get("ctx", {})
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in _LISTS:
        return f"a list, such as {_example(entry.get('input'))}"
    if kind in _TABLES:
        more = ", ..." if len(keys) > _MAX_KEYS else ""
        return (
            f"a table of keys: {', '.join(keys[:_MAX_KEYS])}{more}" if keys else "a table of keys"
        )
    if kind in {"too_short", "string_too_short"}:
        return f"at least {_counted(context['min_length'], kind)}"
    if kind in {"too_long", "string_too_long"}:
        return f"at most {_counted(context['max_length'], kind)}"
    if kind == "string_pattern_mismatch":
        return f"text of the form {context['pattern']}"
    message = str(entry["msg"])
    words = message[:1].lower() + message[1:]
    for prefix in _PREFIXES:
        words = words.removeprefix(prefix)
    return words


def _example(found: object) -> str:
    """A list of what was found, where that is a word; as TOML, JSON and a shell's `'...'` take it."""
    is_word = isinstance(found, str) and 0 < len(found) <= _MAX_EXAMPLE and found.isprintable()
    return json.dumps([found if is_word else "x"], ensure_ascii=False)


def _counted(count: int, kind: str) -> str:
    what = "character" if kind.startswith("string") else "item"
    return f"{count} {what}{'' if count == 1 else 's'}"
