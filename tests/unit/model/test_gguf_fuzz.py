"""Whatever the bytes are, reading a header ends with an answer or a refusal, soon and in little room."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.gguf_bytes import MemorySource, gguf, number, pair, tensor, text
from tunerd.errors import ModelFileError
from tunerd.model.gguf import LIMITS, ValueType, read_header

# Measuring memory slows the walk down fiftyfold, so it has less to walk over.
_FEWER = replace(LIMITS, n_items=640_000, n_bytes=32 * 1024 * 1024)


@cache
def _whole() -> bytes:
    pairs = [
        text("general.architecture", "llama"),
        number("llama.block_count", 2),
        pair("words", ValueType.ARRAY, (ValueType.STRING, ["a", "bc", "", "def"])),
        pair("scores", ValueType.ARRAY, (ValueType.FLOAT32, [0.5, -1.0])),
        pair("deep", ValueType.ARRAY, (ValueType.ARRAY, [(ValueType.UINT8, [1, 2])])),
        pair("flag", ValueType.BOOL, True),
    ]
    table = [
        tensor("token_embd.weight", (32, 4), 8, 0),
        tensor("blk.0.attn_norm.weight", (32,), 0, 160),
        tensor("blk.1.attn_norm.weight", (32,), 0, 288),
    ]
    return gguf(pairs, table, data=416)


def _read(content: bytes) -> None:
    """Either it is a header, or it is refused with its name; nothing else may come out."""
    try:
        header = read_header(MemorySource(content))
    except ModelFileError as error:
        said = error.message
    else:
        said = "made.gguf"
        ends = [header.data_offset + one.offset + one.n_bytes for one in header.tensors]
        assert max(ends, default=0) <= len(content)
    assert "made.gguf" in said


def _damaged(at: int, with_bytes: bytes, cut: int) -> bytes:
    """A whole file with some of its bytes replaced, and cut off somewhere where that is not 0."""
    content = bytearray(_whole())
    at %= len(content)
    content[at : at + len(with_bytes)] = with_bytes
    return bytes(content[: cut % (len(content) + 1)] if cut else content)


_PLACES = st.integers(min_value=0, max_value=10_000)
_LENGTHS = st.sampled_from([2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1])


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.binary(max_size=400)
    | st.binary(max_size=400).map(lambda rest: b"GGUF" + struct.pack("<IQQ", 3, 2, 5) + rest)
    | st.builds(_damaged, _PLACES, st.binary(min_size=1, max_size=4), _PLACES)
    | st.builds(_damaged, _PLACES, _LENGTHS.map(lambda n: struct.pack("<Q", n)), st.just(0))
)
@example(b"")
@example(b"GGUF")
def test_any_bytes_are_survived(content: bytes) -> None:
    _read(content)


@pytest.mark.parametrize("length", range(0, len(_whole()) - 416, 31))
def test_a_file_that_was_cut_off_anywhere_is_refused(length: int) -> None:
    with pytest.raises(ModelFileError):
        read_header(MemorySource(_whole()[:length]))


class _Endless:
    """A source that has as many bytes as a header may have, all made on the spot."""

    name = "made.gguf"
    size = 2**40

    def __init__(self, start: bytes, filler: bytes) -> None:
        self._start = start
        self._filler = filler

    def read_at(self, offset: int, count: int) -> bytes:
        begin = self._start[offset : offset + count]
        shift = max(0, offset - len(self._start)) % len(self._filler)
        times = count // len(self._filler) + 2
        return begin + (self._filler * times)[shift : shift + count - len(begin)]


def _begin(n_tensors: int, n_keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys)


@pytest.mark.parametrize(
    ("start", "filler"),
    [
        # As many empty strings as are walked over.
        (
            _begin(0, 1) + struct.pack("<QsIIQ", 1, b"k", 9, 8, _FEWER.n_items),
            struct.pack("<Q", 0),
        ),
        # Strings of a kilobyte until the header is too long.
        (
            _begin(0, 1) + struct.pack("<QsIIQ", 1, b"k", 9, 8, _FEWER.n_items),
            struct.pack("<Q", 1016) + b"x" * 1016,
        ),
        # As many arrays of one byte as may be.
        (
            _begin(0, 1) + struct.pack("<QsIIQ", 1, b"k", 9, 9, _FEWER.n_items // 64),
            struct.pack("<IQB", 0, 1, 7),
        ),
        # Texts that are kept, and keys, until the header asks for too much.
        (_begin(0, 2**40), struct.pack("<QsIQ", 1, b"k", 8, 64_000) + b"x" * 64_000),
        (_begin(0, 2**40), struct.pack("<Q60sIB", 60, b"k" * 60, 7, 1)),
        # An array of numbers as long as the header may be.
        (_begin(0, 1) + struct.pack("<QsIIQ", 1, b"k", 9, 0, 20_000_000), b"\0" * 4096),
    ],
)
def test_the_largest_claims_are_answered_in_little_memory(start: bytes, filler: bytes) -> None:
    tracemalloc.start()
    with suppress(ModelFileError):
        read_header(_Endless(start, filler), _FEWER)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 16 * 1024 * 1024
