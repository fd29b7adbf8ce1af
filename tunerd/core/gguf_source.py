"""Walks over a byte source from its start, within limits: what the GGUF reader reads with."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Protocol

from tunerd.errors import ModelFileError

_HINT = "compare its size and checksum with its origin, and fetch it again"
_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1024 * 1024


class ByteSource(Protocol):
    """A file, or anything else that has bytes at offsets."""

    @property
    def name(self) -> str:
        """What it is called in errors."""
        ...

    @property
    def size(self) -> int:
        """Bytes in all."""
        ...

    def read_at(self, offset: int, count: int) -> bytes:
        """So many bytes from there, fewer at the end."""
        ...


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    """What a header may ask for; each is several times what the largest real files need."""

    header_bytes: int = 128 * 1024 * 1024
    keys: int = 65_536
    tensors: int = 131_072
    key_bytes: int = 65_535
    tensor_name_bytes: int = 63
    """llama.cpp's limit."""
    text_bytes: int = 1024 * 1024
    """A longer string is not kept."""
    kept_text_bytes: int = 8 * 1024 * 1024
    """All kept strings together."""
    name_bytes: int = 16 * 1024 * 1024
    """All keys and tensor names together."""
    kept_values: int = 1024
    """The values of a longer array are not kept."""
    kept_array_values: int = 1024 * 1024
    """All kept array values together."""
    strings: int = 4 * 1024 * 1024
    """Strings in arrays, all together; each costs a step in Python."""
    arrays: int = 65_536
    """Arrays in arrays, all together."""
    nesting: int = 4
    dimensions: int = 4


LIMITS = HeaderLimits()


class Cursor:
    """Walks over a source from its start, one chunk in memory at a time, hashing what it passed."""

    def __init__(self, source: ByteSource, limits: HeaderLimits) -> None:
        self.source = source
        self.limits = limits
        self.end = min(source.size, limits.header_bytes)
        self.kept_text_bytes = 0
        self.kept_array_values = 0
        self.name_bytes = 0
        self.n_strings = 0
        self.n_arrays = 0
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
            f"model file is damaged at byte {where}, {problem}: `{self.source.name}`",
            cause=f"expected {expected}",
            hint=_HINT,
        )

    def require(self, count: int, what: str) -> None:
        """Raise unless so many more bytes may be read."""
        if count <= self.end - self.offset:
            return
        if self.end < self.source.size:
            raise self.fault(
                f"{what} goes beyond the largest header that is read",
                f"a header of at most {self.limits.header_bytes} bytes",
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
