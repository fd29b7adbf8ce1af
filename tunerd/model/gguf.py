"""Reads the header of a GGUF file, metadata and tensor table, from a byte source.

Nothing of the tensor data is read. A file may be damaged or hostile, so every count, length and
offset is checked before it is believed, and time and memory have a bound that does not depend on
what the file claims: see `HeaderLimits`.

Source: the GGUF specification in ggml's docs/gguf.md; where it leaves room, what llama.cpp's
loader accepts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Protocol, TypeAlias

from tunerd.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class TensorType:
    """How values of one type are stored.

    A row of `n` values takes `n / block * block_bytes + row_bytes` bytes.
    """

    name: str
    block: int
    block_bytes: int
    row_bytes: int = 0

    def row_size(self, n_values: int) -> int | None:
        """Bytes of a row of so many values; None if they do not fill whole blocks."""
        if n_values % self.block:
            return None
        return n_values // self.block * self.block_bytes + self.row_bytes

    @property
    def bytes_per_value(self) -> float:
        """Bytes of one value, without what is kept per row."""
        return self.block_bytes / self.block


# The types by how they are stored: values of a block, its bytes, and bytes beside the blocks of a row.
# Source: ggml-common.h and ggml.h of llama.cpp and ik_llama.cpp. Numbers from 97 on are ik's own
# (`_R4`, `_R8`, `_R16` are rows interleaved for its CPU kernels). Types that exist only while
# computing (q8_1, q8_K) are never stored and left out.
_STORED: Mapping[tuple[int, ...], Mapping[str, int]] = {
    (1, 1): {"i8": 24},
    (1, 2): {"f16": 1, "i16": 25, "bf16": 30, "bf16_r16": 230},
    (1, 4): {"f32": 0, "i32": 26},
    (1, 8): {"i64": 27, "f64": 28},
    (32, 6, 2): {"iq1_s_r4": 219},
    (32, 7, 2): {"iq1_m_r4": 229},
    (32, 17): {"mxfp4": 39, "mxfp4_r8": 353},
    (32, 18): {"q4_0": 2, "iq4_nl": 20, "q4_0_r8": 202, "iq4_nl_r4": 220},
    (32, 20): {"q4_1": 3},
    (32, 22): {"q5_0": 6, "q5_0_r4": 206},
    (32, 24): {"q5_1": 7},
    (32, 26): {"q6_0": 133, "q6_0_r4": 233},
    (32, 32, 4): {"q8_KV_r8": 398},
    (32, 32, 8): {"q8_KV": 151},
    (32, 34): {"q8_0": 8, "q8_0_r8": 208},
    (64, 36): {"nvfp4": 40},
    (128, 18): {"q1_0": 41},
    (256, 50): {"iq1_s": 19},
    (256, 54): {"tq1_0": 34},
    (256, 56): {"iq1_m": 29},
    (256, 56, 4): {"iq1_kt": 158},
    (256, 66): {"iq2_xxs": 16, "tq2_0": 35, "iq2_xxs_r4": 216},
    (256, 68, 4): {"iq2_kt": 153},
    (256, 70, 2): {"iq2_ks": 145},
    (256, 74): {"iq2_xs": 17, "iq2_xs_r4": 217},
    (256, 76): {"iq2_k": 137, "iq2_k_r4": 337},
    (256, 82): {"iq2_s": 22, "iq2_s_r4": 222},
    (256, 84): {"q2_K": 10, "q2_k_r4": 210},
    (256, 86, 2): {"iq2_kl": 157},
    (256, 98): {"iq3_xxs": 18, "iq3_xxs_r4": 218},
    (256, 100, 4): {"iq3_kt": 154},
    (256, 102, 2): {"iq3_ks": 156},
    (256, 110): {
        "q3_K": 11, "iq3_s": 21, "iq3_k": 138, "q3_k_r4": 211, "iq3_s_r4": 221, "iq3_k_r4": 338,
    },
    (256, 128, 4): {"iq4_kss": 146, "iq4_kt": 155},
    (256, 136): {"iq4_xs": 23, "iq4_xs_r8": 223},
    (256, 136, 4): {"iq4_ks": 144, "iq4_ks_r4": 344},
    (256, 144): {"q4_K": 12, "iq4_k": 139, "q4_k_r4": 212, "iq4_k_r4": 339},
    (256, 168, 4): {"iq5_ks": 152, "iq5_ks_r4": 352},
    (256, 176): {"q5_K": 13, "iq5_k": 140, "q5_k_r4": 213, "iq5_k_r4": 340},
    (256, 210): {"q6_K": 14, "q6_k_r4": 214},
    (256, 212): {"iq6_k": 141},
    (256, 258): {"q8_k_r8": 399},
}  # fmt: skip

TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        number: TensorType(name, *stored)
        for stored, types in _STORED.items()
        for name, number in types.items()
    }
)
TYPES_BY_NAME: Mapping[str, TensorType] = MappingProxyType(
    {kind.name.lower(): kind for kind in TENSOR_TYPES.values()}
)


def type_name(number: int) -> str:
    """The name of a tensor type, `type 200` for one that is not known here."""
    known = TENSOR_TYPES.get(number)
    return known.name if known is not None else f"type {number}"


MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_VERSIONS = (2, 3)
_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1024 * 1024
_MOST_DIMENSIONS = 4
FETCH_AGAIN = "compare its size and checksum with its origin, and fetch it again"
# A longer text, or array of numbers, is passed over: no chat template and no list by layer is.
_KEPT_BYTES = 1024 * 1024
_KEPT_VALUES = 4096
_ITEMS_PER_ENTRY = 64
_SAID = 300  # of a problem, which may name a key of megabytes


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    """What a header may ask for; each is several times what the largest real files need.

    An item is a string in an array, which costs a step, or a value or byte of text that is kept; a
    key, a tensor, or an array in an array counts as 64, which is what it costs.
    """

    n_bytes: int = 128 * 1024 * 1024
    n_items: int = 4 * 1024 * 1024
    nesting: int = 4


LIMITS = HeaderLimits()


class ByteSource(Protocol):
    """A file, or anything else that has bytes at offsets."""

    @property
    def name(self) -> str:
        """What it is called in errors."""

    @property
    def size(self) -> int:
        """Bytes in all."""

    def read_at(self, offset: int, count: int) -> bytes:
        """So many bytes from there, fewer at the end."""


ValueType = IntEnum(
    "ValueType",
    "UINT8 INT8 UINT16 INT16 UINT32 INT32 FLOAT32 BOOL STRING ARRAY UINT64 INT64 FLOAT64",
    start=0,
)
"""Types of metadata values, in the order of their numbers."""


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """An array: `values` is None for strings, nested arrays and long arrays.

    `span` is where strings stand in the file, each behind its length: first byte, and bytes.
    """

    length: int
    values: tuple[int | float | bool, ...] | None = None
    span: tuple[int, int] | None = field(default=None, compare=False)


Value: TypeAlias = int | float | bool | str | ArrayValue | None
"""None stands for a text that is too long to be kept."""


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

    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    sha256: str


class Cursor:
    """Walks over a source from its start, one chunk in memory at a time, hashing what it passed."""

    def __init__(self, source: ByteSource, limits: HeaderLimits) -> None:
        self.source = source
        self.limits = limits
        self.end = min(source.size, limits.n_bytes)
        self._n_items = 0
        self._digest = hashlib.sha256()
        self._window = b""
        self._start = 0
        self._at = 0

    @property
    def offset(self) -> int:
        """Where the next byte comes from."""
        return self._start + self._at

    def fault(self, problem: str, expected: str, *, offset: int | None = None) -> ModelFileError:
        """The error that says what is wrong where."""
        where = self.offset if offset is None else offset
        return ModelFileError(
            f"model file is damaged at byte {where}, {problem[:_SAID]}: `{self.source.name}`",
            cause=f"expected {expected}",
            hint=FETCH_AGAIN,
        )

    def spend(self, n_items: int, what: str) -> None:
        """Raise where the header asks for more than anybody needs."""
        self._n_items += n_items
        if self._n_items > self.limits.n_items:
            most = f"at most {self.limits.n_items}"
            raise self.fault(f"{what} brings what is in it to {self._n_items} items", most)

    def require(self, count: int, what: str) -> None:
        """Raise unless so many more bytes may be read."""
        if count <= self.end - self.offset:
            return
        if self.end < self.source.size:
            raise self.fault(
                f"{what} goes beyond the largest header that is read",
                f"a header of at most {self.limits.n_bytes} bytes",
            )
        raise self.fault(
            f"{what} goes beyond the end of the file",
            f"{count} more bytes, the file has {self.source.size - self.offset}",
        )

    def take(self, count: int, what: str) -> bytes:
        """The next bytes."""
        self.require(count, what)
        if self._at + count > len(self._window):
            self._refill(count, what)
        taken = self._window[self._at : self._at + count]
        self._at += count
        return taken

    def skip(self, count: int, what: str) -> None:
        """Pass over bytes without keeping them."""
        self.require(count, what)
        while count > 0:
            if self._at == len(self._window):
                self._refill(1, what)
            step = min(count, len(self._window) - self._at)
            self._at += step
            count -= step

    def skip_strings(self, count: int, what: str) -> None:
        """Pass over an array of strings, looking at nothing but their lengths.

        This is the one loop whose length a real file drives into the hundred thousands, so it
        works on the window directly.
        """
        unpack = _LENGTH.unpack_from
        left = count
        while left:
            window, at = self._window, self._at
            last = len(window) - _LENGTH.size
            begin = left
            while left and at <= last:
                past = at + _LENGTH.size + unpack(window, at)[0]
                if past > len(window):
                    break
                at = past
                left -= 1
            self._at = at
            if left == begin:
                (length,) = unpack(self.take(_LENGTH.size, what))
                self.skip(length, what)
                left -= 1

    def sha256(self) -> str:
        """Hash of everything before the current offset."""
        digest = self._digest.copy()
        digest.update(self._window[: self._at])
        return digest.hexdigest()

    def _refill(self, count: int, what: str) -> None:
        self._digest.update(self._window[: self._at])
        self._start, self._at, rest = self.offset, 0, self._window[self._at :]
        wanted = min(max(count, _CHUNK_BYTES), self.end - self._start)
        self._window = rest + self.source.read_at(self._start + len(rest), wanted - len(rest))
        if len(self._window) < count:
            raise self.fault(f"{what} is cut off", f"{count} more bytes")


_SCALARS: Mapping[ValueType, struct.Struct] = {
    ValueType(number): struct.Struct("<" + code)
    for number, code in enumerate("BbHhIif?  Qqd")
    if code != " "
}


def read_header(source: ByteSource, limits: HeaderLimits = LIMITS) -> Header:
    """The header of a GGUF file.

    Raises:
        ModelFileError: It is no GGUF file, is cut off, contradicts itself or asks for more than
            `limits` allow.
    """
    cursor = Cursor(source, limits)
    _check_preamble(cursor)
    n_tensors = _number(cursor, ValueType.UINT64, "the number of tensors")
    n_keys = _number(cursor, ValueType.UINT64, "the number of keys")
    metadata: dict[str, Value] = {}
    for _ in range(n_keys):
        offset = cursor.offset
        key = _name(cursor, "a key")
        if key in metadata:
            raise cursor.fault(f"key `{key}` comes twice", "each key once", offset=offset)
        metadata[key] = _value(cursor, _type(cursor, key), key)
    alignment = _alignment(cursor, metadata)
    rows = tuple(_tensor(cursor) for _ in range(n_tensors))
    data_offset = -(-cursor.offset // alignment) * alignment
    tensors = _placed(cursor, rows, data_offset, alignment)
    return Header(metadata, tensors, data_offset, cursor.sha256())


def _check_preamble(cursor: Cursor) -> None:
    if cursor.source.size < len(MAGIC):
        raise cursor.fault("it is too short", "a GGUF file")
    magic = cursor.take(len(MAGIC), "the magic")
    if magic != MAGIC:
        raise ModelFileError(
            f"not a GGUF file: `{cursor.source.name}`",
            cause=f"it does not begin with `{MAGIC.decode()}`",
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


def _number(cursor: Cursor, kind: ValueType, what: str) -> int:
    form = _SCALARS[kind]
    return int(form.unpack(cursor.take(form.size, what))[0])


def _name(cursor: Cursor, what: str) -> str:
    offset = cursor.offset
    length = _number(cursor, ValueType.UINT64, f"the length of {what}")
    if length == 0:
        raise cursor.fault(f"{what} has 0 bytes", "a name", offset=offset)
    cursor.spend(_ITEMS_PER_ENTRY + length, what)
    raw = cursor.take(length, what)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise cursor.fault(f"{what} is not UTF-8: {raw[:40]!r}", "text", offset=offset) from error


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


def _text(cursor: Cursor, key: str) -> str | None:
    """A string; bytes that are no UTF-8 become replacement characters, as engines load it too."""
    length = _number(cursor, ValueType.UINT64, f"the length of `{key}`")
    if length > _KEPT_BYTES:
        cursor.skip(length, f"`{key}`")
        return None
    cursor.spend(length, f"`{key}`")
    return cursor.take(length, f"`{key}`").decode("utf-8", "replace")


def _array(cursor: Cursor, key: str, depth: int) -> ArrayValue:
    if depth > cursor.limits.nesting:
        most = f"at most {cursor.limits.nesting} levels"
        raise cursor.fault(f"`{key}` nests arrays too deeply", most)
    element = _type(cursor, key)
    length = _number(cursor, ValueType.UINT64, f"the length of `{key}`")
    if element is ValueType.STRING:
        cursor.spend(length, f"`{key}`")
        begin = cursor.offset
        cursor.skip_strings(length, f"`{key}`")
        return ArrayValue(length, span=(begin, cursor.offset - begin))
    if element is ValueType.ARRAY:
        cursor.spend(_ITEMS_PER_ENTRY * length, f"`{key}`")
        for _ in range(length):
            _array(cursor, key, depth + 1)
        return ArrayValue(length)
    form = _SCALARS[element]
    if depth > 1 or length > _KEPT_VALUES:
        cursor.skip(length * form.size, f"`{key}`")
        return ArrayValue(length)
    cursor.spend(length, f"`{key}`")
    raw = cursor.take(length * form.size, f"`{key}`")
    return ArrayValue(length, tuple(value for (value,) in form.iter_unpack(raw)))


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int):
        raise cursor.fault("`general.alignment` is not a number", "a power of two")
    if not 0 < value < 2**31 or value & (value - 1):
        raise cursor.fault(f"`general.alignment` is {value}", "a power of two below 2^31")
    return value


def _tensor(cursor: Cursor) -> TensorInfo:
    """A row of the table, `n_bytes` being 0 where the type is not known."""
    offset = cursor.offset
    name = _name(cursor, "a tensor name")
    n_dims = _number(cursor, ValueType.UINT32, f"the dimensions of `{name}`")
    if n_dims > _MOST_DIMENSIONS:
        problem = f"tensor `{name}` has {n_dims} dimensions"
        raise cursor.fault(problem, f"at most {_MOST_DIMENSIONS}", offset=offset)
    raw = cursor.take(n_dims * _LENGTH.size, f"the dimensions of `{name}`")
    dims = tuple(size for (size,) in _LENGTH.iter_unpack(raw))
    number = _number(cursor, ValueType.UINT32, f"the type of `{name}`")
    start = _number(cursor, ValueType.UINT64, f"the offset of `{name}`")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        return TensorInfo(name, dims, number, start, 0)
    length = dims[0] if dims else 1
    row = kind.row_size(length)
    if row is None:
        problem = f"rows of tensor `{name}` have {length} values of type {kind.name}"
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
        sized[row.name] = replace(row, n_bytes=n_bytes)
        next_start = row.offset
    return tuple(sized[row.name] for row in rows)
