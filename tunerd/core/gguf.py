"""Reads the header of a GGUF file, metadata and tensor table, from a byte source.

Nothing of the tensor data is read. A file may be damaged or hostile, so every count, length and
offset is checked before it is believed, and time and memory have a bound that does not depend on
what the file claims: at most `HeaderLimits.header_bytes` are read, and of an array of strings
(a vocabulary) only the lengths are looked at.

Source: the GGUF specification in ggml's docs/gguf.md; where it leaves room, what llama.cpp's
loader accepts.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from tunerd.core.gguf_source import LIMITS, ByteSource, Cursor, HeaderLimits
from tunerd.core.gguf_types import TENSOR_TYPES
from tunerd.errors import ModelFileError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_VERSIONS = (2, 3)
_LENGTH = struct.Struct("<Q")


class ValueType(IntEnum):
    """Types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


Scalar: TypeAlias = int | float | bool | str


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """An array: `values` is None for strings, nested arrays and long arrays.

    `span` is where strings stand in the file, each behind its length: first byte, and bytes.
    """

    element: ValueType
    length: int
    values: tuple[int | float | bool, ...] | None
    span: tuple[int, int] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LongText:
    """A string that is too long to be kept."""

    n_bytes: int


Value: TypeAlias = Scalar | ArrayValue | LongText


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table.

    `dims` is as stored: the first is the length of a row. `offset` counts from the start of the
    tensor data. `n_bytes` of a type that is not known here is the room up to the next tensor.
    """

    name: str
    dims: tuple[int, ...]
    type_number: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensor table of one file.

    `sha256` is over every byte before the padding in front of the tensor data.
    """

    version: int
    alignment: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    n_bytes: int
    data_offset: int
    file_bytes: int
    sha256: str


_SCALARS: Mapping[ValueType, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<?"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}


def read_header(source: ByteSource, limits: HeaderLimits = LIMITS) -> Header:
    """The header of a GGUF file.

    Raises:
        ModelFileError: It is no GGUF file, is cut off, contradicts itself or asks for more than
            `limits` allow.
    """
    cursor = Cursor(source, limits)
    version = _preamble(cursor)
    n_tensors = _count(cursor, "the number of tensors", limits.tensors)
    n_keys = _count(cursor, "the number of keys", limits.keys)
    metadata: dict[str, Value] = {}
    for _ in range(n_keys):
        offset = cursor.offset
        key = _name(cursor, "a key", limits.key_bytes)
        if key in metadata:
            raise cursor.fault(f"key `{key}` comes twice", "each key once", offset=offset)
        metadata[key] = _value(cursor, _type(cursor, key), key)
    alignment = _alignment(cursor, metadata)
    rows = tuple(_tensor(cursor) for _ in range(n_tensors))
    n_bytes, sha256 = cursor.offset, cursor.sha256()
    data_offset = -(-n_bytes // alignment) * alignment
    tensors = _placed(cursor, rows, data_offset, alignment)
    return Header(
        version, alignment, metadata, tensors, n_bytes, data_offset, source.size, sha256
    )  # fmt: skip


def _preamble(cursor: Cursor) -> int:
    if cursor.source.size < len(MAGIC):
        raise cursor.fault("it is too short", "a GGUF file")
    magic = cursor.take(len(MAGIC), "the magic")
    if magic != MAGIC:
        raise ModelFileError(
            f"not a GGUF file: `{cursor.source.name}`",
            cause=f"expected the bytes {MAGIC!r} at the start, found {magic!r}",
            hint="a model in another format has to be converted first",
        )
    raw = cursor.take(4, "the version")
    version = int.from_bytes(raw, "little")
    if int.from_bytes(raw, "big") in _VERSIONS:
        raise ModelFileError(
            f"model file has the byte order of other machines: `{cursor.source.name}`",
            cause="expected a little-endian version, found a big-endian one",
            hint="fetch the little-endian file; engines on this machine cannot read this one",
        )
    if version not in _VERSIONS:
        raise ModelFileError(
            f"model file has GGUF version {version}: `{cursor.source.name}`",
            cause=f"expected version {' or '.join(map(str, _VERSIONS))}",
            hint="fetch a newer conversion of the model",
        )
    return version


def _number(cursor: Cursor, kind: ValueType, what: str) -> int:
    form = _SCALARS[kind]
    return int(form.unpack(cursor.take(form.size, what))[0])


def _count(cursor: Cursor, what: str, most: int) -> int:
    offset = cursor.offset
    count = _number(cursor, ValueType.UINT64, what)
    if count > most:
        raise cursor.fault(f"{what} is {count}", f"at most {most}", offset=offset)
    return count


def _name(cursor: Cursor, what: str, most_bytes: int) -> str:
    offset = cursor.offset
    length = _number(cursor, ValueType.UINT64, f"the length of {what}")
    if not 0 < length <= most_bytes:
        raise cursor.fault(f"{what} has {length} bytes", f"1 to {most_bytes}", offset=offset)
    cursor.name_bytes += length
    if cursor.name_bytes > cursor.limits.name_bytes:
        most = f"at most {cursor.limits.name_bytes} bytes of names"
        raise cursor.fault("its names are too long", most, offset=offset)
    raw = cursor.take(length, what)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise cursor.fault(f"{what} is no UTF-8: {raw[:40]!r}", "text", offset=offset) from error


def _type(cursor: Cursor, key: str) -> ValueType:
    offset = cursor.offset
    number = _number(cursor, ValueType.UINT32, f"the type of `{key}`")
    try:
        return ValueType(number)
    except ValueError as error:
        problem = f"`{key}` has the unknown type {number}"
        raise cursor.fault(problem, "a type from 0 to 12", offset=offset) from error


def _value(cursor: Cursor, kind: ValueType, key: str) -> Value:
    if kind is ValueType.STRING:
        return _text(cursor, key)
    if kind is ValueType.ARRAY:
        return _array(cursor, key, depth=1)
    form = _SCALARS[kind]
    value: int | float | bool = form.unpack(cursor.take(form.size, f"`{key}`"))[0]
    return value


def _text(cursor: Cursor, key: str) -> str | LongText:
    """A string; bytes that are no UTF-8 become replacement characters, as engines load it too."""
    length = _number(cursor, ValueType.UINT64, f"the length of `{key}`")
    limits = cursor.limits
    if length > min(limits.text_bytes, limits.kept_text_bytes - cursor.kept_text_bytes):
        cursor.skip(length, f"`{key}`")
        return LongText(length)
    cursor.kept_text_bytes += length
    return cursor.take(length, f"`{key}`").decode("utf-8", "replace")


def _array(cursor: Cursor, key: str, depth: int) -> ArrayValue:
    limits, offset = cursor.limits, cursor.offset
    if depth > limits.nesting:
        raise cursor.fault(f"`{key}` nests arrays too deeply", f"at most {limits.nesting} levels")
    element = _type(cursor, key)
    length = _number(cursor, ValueType.UINT64, f"the length of `{key}`")
    if element is ValueType.STRING:
        cursor.n_strings += length
        if cursor.n_strings > limits.strings:
            problem = f"`{key}` brings the strings in arrays to {cursor.n_strings}"
            raise cursor.fault(problem, f"at most {limits.strings}", offset=offset)
        begin = cursor.offset
        cursor.skip_strings(length, f"`{key}`")
        return ArrayValue(element, length, None, (begin, cursor.offset - begin))
    if element is ValueType.ARRAY:
        cursor.n_arrays += length
        if cursor.n_arrays > limits.arrays:
            problem = f"`{key}` brings the arrays in arrays to {cursor.n_arrays}"
            raise cursor.fault(problem, f"at most {limits.arrays}", offset=offset)
        for _ in range(length):
            _array(cursor, key, depth + 1)
        return ArrayValue(element, length, None)
    form = _SCALARS[element]
    n_bytes = length * form.size
    kept = cursor.kept_array_values + length
    if depth > 1 or length > limits.kept_values or kept > limits.kept_array_values:
        cursor.skip(n_bytes, f"`{key}`")
        return ArrayValue(element, length, None)
    cursor.kept_array_values = kept
    raw = cursor.take(n_bytes, f"`{key}`")
    return ArrayValue(element, length, tuple(value for (value,) in form.iter_unpack(raw)))


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int):
        raise cursor.fault("`general.alignment` is no number", "a power of two")
    if not 0 < value < 2**31 or value & (value - 1):
        raise cursor.fault(f"`general.alignment` is {value}", "a power of two below 2^31")
    return value


def _tensor(cursor: Cursor) -> TensorInfo:
    """A row of the table, `n_bytes` being 0 where the type is not known."""
    limits, offset = cursor.limits, cursor.offset
    name = _name(cursor, "a tensor name", limits.tensor_name_bytes)
    n_dims = _number(cursor, ValueType.UINT32, f"the dimensions of `{name}`")
    if n_dims > limits.dimensions:
        problem = f"tensor `{name}` has {n_dims} dimensions"
        raise cursor.fault(problem, f"at most {limits.dimensions}", offset=offset)
    raw = cursor.take(n_dims * _LENGTH.size, f"the dimensions of `{name}`")
    dims = tuple(size for (size,) in _LENGTH.iter_unpack(raw))
    number = _number(cursor, ValueType.UINT32, f"the type of `{name}`")
    start = _number(cursor, ValueType.UINT64, f"the offset of `{name}`")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        return TensorInfo(name, dims, number, start, 0)
    row = kind.row_size(dims[0] if dims else 1)
    if row is None:
        problem = f"rows of tensor `{name}` have {dims[0]} values of type {kind.name}"
        raise cursor.fault(problem, f"a multiple of {kind.block}", offset=offset)
    n_bytes = row
    for size in dims[1:]:
        n_bytes *= size
    return TensorInfo(name, dims, number, start, n_bytes)


def _placed(
    cursor: Cursor, rows: tuple[TensorInfo, ...], data_offset: int, alignment: int
) -> tuple[TensorInfo, ...]:
    """The table after a check that every tensor lies inside the file and none over another.

    A tensor of unknown type gets the room up to the next one.
    """
    room = max(0, cursor.source.size - data_offset)
    sized: dict[str, TensorInfo] = {}
    next_start = room
    for row in sorted(rows, key=lambda row: (row.offset, row.n_bytes), reverse=True):
        if row.name in sized:
            raise cursor.fault(f"tensor `{row.name}` comes twice", "each tensor once")
        if row.offset % alignment:
            problem = f"tensor `{row.name}` starts at {row.offset} of the data"
            raise cursor.fault(problem, f"a multiple of {alignment}")
        end = row.offset + row.n_bytes
        if end > room:
            raise cursor.fault(
                f"tensor `{row.name}` ends beyond the file",
                f"a file of {data_offset + end} bytes, it has {cursor.source.size}",
            )
        if end > next_start:
            raise cursor.fault(f"tensor `{row.name}` lies over the next one", "room for each")
        known = row.type_number in TENSOR_TYPES
        n_bytes = row.n_bytes if known else next_start - row.offset
        sized[row.name] = TensorInfo(row.name, row.dims, row.type_number, row.offset, n_bytes)
        next_start = row.offset
    return tuple(sized[row.name] for row in rows)
