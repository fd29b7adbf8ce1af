"""GGUF files as bytes, put together field by field, so that any field can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tunerd.model.gguf import ValueType

_FORMS = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}


@dataclass
class MemorySource:
    """Bytes as a byte source; `reads` counts what was handed out."""

    content: bytes
    name: str = "made.gguf"
    reads: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.content)

    def read_at(self, offset: int, count: int) -> bytes:
        taken = self.content[offset : offset + count]
        self.reads.append(len(taken))
        return taken


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: ValueType, content: object) -> bytes:
    """A value without its type; of an array, `content` is (element type, values)."""
    if kind is ValueType.STRING:
        assert isinstance(content, str | bytes)
        return string(content)
    if kind is ValueType.ARRAY:
        assert isinstance(content, tuple)
        element, values = content
        return struct.pack("<IQ", element, len(values)) + b"".join(
            value(element, one) for one in values
        )
    return struct.pack(_FORMS[kind], content)


def pair(key: str | bytes, kind: ValueType, content: object) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, content)


def number(key: str, content: int) -> bytes:
    return pair(key, ValueType.UINT32, content)


def text(key: str, content: str) -> bytes:
    return pair(key, ValueType.STRING, content)


def tensor(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return string(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def gguf(
    pairs: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    *,
    data: int = 0,
    version: int = 3,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; `data` is the bytes behind the padding."""
    keys, table = list(pairs), list(tensors)
    counts = (
        len(table) if n_tensors is None else n_tensors,
        len(keys) if n_pairs is None else n_pairs,
    )
    header = b"GGUF" + struct.pack("<I", version) + struct.pack("<QQ", *counts)
    header += b"".join(keys) + b"".join(table)
    padding = -len(header) % alignment
    return header + bytes(padding + data)
