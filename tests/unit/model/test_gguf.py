"""The header reader: what it keeps, and every way in which a file is refused."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.gguf_bytes import MemorySource, gguf, number, pair, string, tensor, text
from tests.support.transcripts import refusal, transcript
from tunerd.errors import ModelFileError
from tunerd.model.gguf import DEFAULT_ALIGNMENT, LIMITS, ArrayValue, Header, ValueType, read_header

F32, Q4_0, Q8_0 = 0, 2, 8
UNKNOWN_TYPE = 4242


def read(content: bytes, **limits: int) -> Header:
    return read_header(MemorySource(content), replace(LIMITS, **limits))


def key(layout: str, *words: int) -> bytes:
    """A file with one key `k`, and these words behind its name."""
    return gguf([string("k") + struct.pack(layout, *words)])


def hashes(content: bytes, header: Header) -> set[str]:
    """Over all but the padding, of whatever length that is."""
    ends = range(header.data_offset - DEFAULT_ALIGNMENT + 1, header.data_offset + 1)
    return {hashlib.sha256(content[:end]).hexdigest() for end in ends}


def test_strings_that_cross_the_edges_of_chunks_are_passed_whole() -> None:
    words = [b"x" * size for size in (0, 1, 1024 * 1024 - 9, 3, 2 * 1024 * 1024 + 5, 0, 7)]

    header = read(gguf([pair("words", ValueType.ARRAY, (ValueType.STRING, words)), number("n", 7)]))

    assert header.metadata["words"] == ArrayValue(len(words))
    assert header.metadata["n"] == 7


@pytest.mark.parametrize("shift", [-40, -17, -9, -8, -7, -1, 0, 1, 7])
def test_the_hash_misses_no_byte_at_the_edge_of_a_chunk(shift: int) -> None:
    chunk = 1024 * 1024
    before = len(gguf([pair("words", ValueType.ARRAY, (ValueType.STRING, [b""]))]))
    words = [b"x" * (chunk - before + shift + extra) for extra in (0, 1, 2)]
    content = gguf([pair("words", ValueType.ARRAY, (ValueType.STRING, words)), number("n", 7)])

    header = read(content)

    assert header.sha256 in hashes(content, header)


def test_a_long_text_is_passed_over_and_a_damaged_one_is_mended() -> None:
    pairs = [text("json", "x" * 2_000_000), pair("bad", ValueType.STRING, b"a\xff\xfeb")]

    header = read(gguf(pairs))

    assert header.metadata["json"] is None
    assert header.metadata["bad"] == "a\ufffd\ufffdb"


def test_tensors_have_their_bytes_whatever_their_type() -> None:
    table = [
        tensor("a", (64, 3), F32, 0),
        tensor("b", (64, 2), Q4_0, 768),
        tensor("c", (5,), UNKNOWN_TYPE, 864),
        tensor("d", (32,), Q8_0, 1024),
    ]

    header = read(gguf([], table, data=1024 + 34))

    sizes = [(one.name, one.n_bytes) for one in header.tensors]
    assert sizes == [("a", 768), ("b", 72), ("c", 160), ("d", 34)]
    assert header.tensors[0].dims == (64, 3)


def test_another_alignment_is_followed() -> None:
    table = [tensor("a", (1,), F32, 0), tensor("b", (1,), F32, 64)]
    content = gguf([number("general.alignment", 64)], table, data=68, alignment=64)

    assert read(content).data_offset % 64 == 0


def test_the_hash_is_over_header_and_table_alone() -> None:
    content = gguf([text("general.architecture", "llama")], [tensor("t", (4,), F32, 0)], data=16)
    header = read(content)

    other_data = content[:-1] + b"\x01"
    other_table = content.replace(b"llama", b"llame")

    assert header.sha256 in hashes(content, header)
    assert read(other_data).sha256 == header.sha256
    assert read(other_table).sha256 != header.sha256


def test_neither_tensors_nor_what_is_beyond_the_limit_is_read() -> None:
    tensors = gguf([], [tensor("t", (1024, 1024), F32, 0)], data=4 * 1024 * 1024)
    for content, limits, most in ((tensors, LIMITS, 1024 * 1024), (WORDS, replace(LIMITS, n_bytes=10**6), 10**6)):  # fmt: skip
        source = MemorySource(content)
        with suppress(ModelFileError):
            read_header(source, limits)
        assert sum(source.reads) <= most


WHOLE = gguf([text("general.architecture", "llama"), number("n", 7)])
ONE_TENSOR = gguf([], [tensor("t", (1024,), F32, 0)], data=4096)
NESTED = struct.pack("<IQ", ValueType.ARRAY, 1) * 1000 + struct.pack("<IQ", ValueType.UINT8, 0)
WORDS = gguf([pair("words", ValueType.ARRAY, (ValueType.STRING, [b"x" * 1000] * 4000))])
# What may be wrong with a file, and with one that asks for more than a limit.
WRONG: dict[str, bytes] = {
    **{f"A file that ends after {length} bytes": WHOLE[:length] for length in (0, 3, 4, 7, 20, 30, 60)},
    "A file without its last byte": ONE_TENSOR[:-1],
    "Another format": b"PK\x03\x04" + bytes(100),
    "The byte order of other machines": b"GGUF" + struct.pack(">I", 3) + bytes(100),
    **{f"Version {version}": gguf(version=version) for version in (0, 1, 4, 2**31)},
    "More keys than any file has": gguf(n_pairs=2**64 - 1),
    "More tensors than any file has": gguf(n_tensors=2**63),
    "A key twice": gguf([number("n", 1), number("n", 2)]),
    "A value of an unknown type": key("<I", 13),
    "A key that is not UTF-8": gguf([pair(b"\xff\xfe", ValueType.BOOL, True)]),
    "A key without a name": gguf([struct.pack("<Q", 0)]),
    "A key of a terabyte": gguf([struct.pack("<Q", 2**40)]),
    "A text that goes beyond the file": key("<IQ", ValueType.STRING, 2**62),
    "Numbers that go beyond the file": key("<IIQ", ValueType.ARRAY, ValueType.FLOAT64, 2**61),
    "More texts than any file has": key("<IIQ", ValueType.ARRAY, ValueType.STRING, 2**60),
    "More arrays than any file has": key("<IIQ", ValueType.ARRAY, ValueType.ARRAY, 2**60),
    "One of several texts goes beyond the file": key("<IIQQ", ValueType.ARRAY, ValueType.STRING, 1, 2**63),
    "Arrays in arrays without end": gguf([string("k") + struct.pack("<I", ValueType.ARRAY) + NESTED]),
    "An alignment that is no power of two": gguf([number("general.alignment", 48)], alignment=16),
    "An alignment of nothing": gguf([number("general.alignment", 0)]),
    "An alignment in letters": gguf([text("general.alignment", "32")]),
    "A tensor twice": gguf([], [tensor("t", (4,), F32, 0), tensor("t", (4,), F32, 32)], data=64),
    "A tensor of five dimensions": gguf([], [tensor("t", (1, 1, 1, 1, 1), F32, 0)], data=4),
    "A tensor of a number of dimensions that no tensor has": gguf([], [string("t") + struct.pack("<I", 2**31)]),
    "A single value of a type that has blocks": gguf(tensors=[tensor("t", [], Q8_0, 0)]),
    "Rows that end within a block": gguf([], [tensor("t", (33,), Q4_0, 0)], data=64),
    "A gap in front of the tensors": gguf([], [tensor("t", (4,), F32, 16)], data=64),
    "A tensor larger than a number can say": gguf([], [tensor("t", (2**63,) * 4, F32, 0)], data=64),
    "A tensor far behind the file": gguf([], [tensor("t", (4,), F32, 2**64 - 32)], data=64),
    "A tensor over the next one": gguf([], [tensor("a", (16,), F32, 0), tensor("b", (4,), F32, 32)], data=64),
    "A tensor whose name is not UTF-8": gguf([], [tensor(b"\xc3", (4,), F32, 0)], data=16),
}  # fmt: skip
GREEDY: dict[str, tuple[bytes, dict[str, int]]] = {
    "A header that is longer than what is read": (WORDS, {"n_bytes": 1_000_000}),
    "More than anybody needs": (gguf(text(f"k{n}", "x" * 1000) for n in range(100)), {"n_items": 10_000}),
}  # fmt: skip


def test_what_is_said_of_a_file_that_is_wrong_is_the_golden_text() -> None:
    cases = {**{told: (content, {}) for told, content in WRONG.items()}, **GREEDY}
    transcript("errors/gguf", (
        (told, refusal(read, content, **limits)) for told, (content, limits) in cases.items()
    ))  # fmt: skip


# Whatever the bytes are, reading a header ends with an answer or a refusal, soon and in little room.

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
    """Either it is a header, or it is refused with its name; nothing else may come out."""
    try:
        header = read(content)
    except ModelFileError as error:
        assert "made.gguf" in error.message  # noqa: PT017 -- or it is a header
    else:
        ends = [header.data_offset + one.offset + one.n_bytes for one in header.tensors]
        assert max(ends, default=0) <= len(content)


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


def _begin(n_keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, n_keys)


def _array(kind: ValueType, count: int) -> bytes:
    """A file whose one key is an array of so many."""
    return _begin(1) + struct.pack("<QsIIQ", 1, b"k", ValueType.ARRAY, kind, count)


@pytest.mark.parametrize(
    ("start", "filler"),
    [
        # As many empty strings as are walked over; then strings of a kilobyte until the header is too long.
        (_array(ValueType.STRING, _FEWER.n_items), struct.pack("<Q", 0)),
        (_array(ValueType.STRING, _FEWER.n_items), struct.pack("<Q", 1016) + b"x" * 1016),
        # As many arrays of one byte as may be.
        (_array(ValueType.ARRAY, _FEWER.n_items // 64), struct.pack("<IQB", 0, 1, 7)),
        # Texts that are kept, and keys, until the header asks for too much.
        (_begin(2**40), struct.pack("<QsIQ", 1, b"k", 8, 64_000) + b"x" * 64_000),
        (_begin(2**40), struct.pack("<Q60sIB", 60, b"k" * 60, 7, 1)),
        # An array of numbers as long as the header may be.
        (_array(ValueType.UINT8, 20_000_000), b"\0" * 4096),
    ],
)
def test_the_largest_claims_are_answered_in_little_memory(start: bytes, filler: bytes) -> None:
    tracemalloc.start()
    with suppress(ModelFileError):
        read_header(_Endless(start, filler), _FEWER)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 16 * 1024 * 1024


def test_a_key_of_a_megabyte_is_not_shown_whole() -> None:
    long = [number("k" * 1_000_000, one) for one in (1, 2)]
    assert len(refusal(read, gguf(long))[0]) < 1000
