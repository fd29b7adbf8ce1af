"""The codec of records: frozen dataclasses to JSON values and back, for everything that stands on disk.

Types are those of the fields. pydantic reads them when a record of a kind is first wanted, so that who
imports this pays nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
_SCHEMA = "schema"
_SHOWN_ERRORS = 3
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


class Unreadable(ValueError):
    """What stands there is no record of the kind that was asked for; says which field is why."""


def plain(value: Any, *, schema: int | None = None) -> Any:
    """A record as JSON values: enums, paths, tuples, numpy's numbers and records in it included.

    Args:
        value: A dataclass, or another value of a plain type.
        schema: The version of its form, to be written beside its fields.
    """
    data = _adapter(type(value)).dump_python(
        value, mode="json", by_alias=True, warnings=False, fallback=_of_others
    )
    return data if schema is None else {_SCHEMA: schema, **data}


def read(kind: type[T], data: Any, *, schema: int | None = None) -> T:
    """The record that `plain` made; keys that it does not know are left out.

    Raises:
        Unreadable: a field is missing or cannot be what it is, or the form is of another version.
    """
    if schema is not None and (not isinstance(data, dict) or data.get(_SCHEMA) != schema):
        raise Unreadable("another version of tunerd wrote it")
    from pydantic import ValidationError

    try:
        found: T = _adapter(kind).validate_python(data)
    except ValidationError as error:
        raise Unreadable(_words(error)) from error
    return found


def read_or_none(kind: type[T], data: Any, *, schema: int | None = None) -> T | None:
    """As `read`; None where it is none, as in a cache or a file of another version."""
    try:
        return read(kind, data, schema=schema)
    except Unreadable:
        return None


def _of_others(value: Any) -> Any:
    """Numbers and arrays of numpy, and what else pydantic does not know."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        from pydantic import TypeAdapter

        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _words(error: Any) -> str:
    """Fields with what is wrong with them, the first few."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    named = [f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in wrong]
    more = f"; and {len(named) - _SHOWN_ERRORS} more" if len(named) > _SHOWN_ERRORS else ""
    return "; ".join(named[:_SHOWN_ERRORS]) + more
