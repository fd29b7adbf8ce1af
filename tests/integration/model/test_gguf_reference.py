"""The header reader against the `gguf` package, on files that the package wrote."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.gguf_bytes import MemorySource
from tunerd.model.gguf import TENSOR_TYPES, ArrayValue, Header, read_header
from tunerd.tryout.designed import SHAPES, design, write

_RANGES = {
    GGUFValueType.UINT8: (0, 2**8 - 1),
    GGUFValueType.INT8: (-(2**7), 2**7 - 1),
    GGUFValueType.UINT16: (0, 2**16 - 1),
    GGUFValueType.INT16: (-(2**15), 2**15 - 1),
    GGUFValueType.UINT32: (0, 2**32 - 1),
    GGUFValueType.INT32: (-(2**31), 2**31 - 1),
    GGUFValueType.UINT64: (0, 2**64 - 1),
    GGUFValueType.INT64: (-(2**63), 2**63 - 1),
}
_NEVER_STORED = {GGMLQuantizationType.Q8_1.value, GGMLQuantizationType.Q8_K.value}
_STORED = [kind for kind in GGML_QUANT_SIZES if kind.value in TENSOR_TYPES]

_texts = st.text(
    alphabet=st.characters(codec="utf-8"), max_size=30
)  # fmt: skip
_keys = st.text(alphabet="abcdefghijklmnopqrstuvwxyz._0123456789", min_size=1, max_size=40).filter(
    lambda key: key != "general.alignment"
)


@st.composite
def _scalars(draw: st.DrawFn) -> tuple[GGUFValueType, Any]:
    kind = draw(st.sampled_from([*_RANGES, *_OTHERS]))
    return kind, draw(_values_of(kind))


_OTHERS = (
    GGUFValueType.FLOAT32,
    GGUFValueType.FLOAT64,
    GGUFValueType.BOOL,
    GGUFValueType.STRING,
)


def _values_of(kind: GGUFValueType) -> st.SearchStrategy[Any]:
    if kind in _RANGES:
        return st.integers(*_RANGES[kind])
    if kind is GGUFValueType.BOOL:
        return st.booleans()
    if kind is GGUFValueType.STRING:
        return _texts
    if kind is GGUFValueType.FLOAT32:
        return st.floats(width=32, allow_nan=False)
    return st.floats(allow_nan=False)


@st.composite
def _arrays(draw: st.DrawFn) -> tuple[GGUFValueType, Any]:
    """The writer takes the type of an array's elements from the first one."""
    kind = draw(
        st.sampled_from((GGUFValueType.INT32, GGUFValueType.FLOAT32, GGUFValueType.BOOL,
                         GGUFValueType.STRING))
    )  # fmt: skip
    return kind, draw(st.lists(_values_of(kind), min_size=1, max_size=20))


@dataclass
class _File:
    scalars: dict[str, tuple[GGUFValueType, Any]]
    arrays: dict[str, tuple[GGUFValueType, Any]]
    tensors: Sequence[tuple[GGMLQuantizationType, tuple[int, ...]]]

    def write(self, path: Path) -> None:
        writer = GGUFWriter(path, "made")
        for key, (kind, value) in self.scalars.items():
            writer.add_key_value(key, value, kind)
        for key, (_, values) in self.arrays.items():
            writer.add_array(key, values)
        for index, (stored, dims) in enumerate(self.tensors):
            block, block_bytes = GGML_QUANT_SIZES[stored]
            n_bytes = block_bytes * int(np.prod(dims))
            shape = [*reversed(dims[1:]), dims[0] * block]
            writer.add_tensor_info(
                f"tensor.{index}", shape, np.dtype(np.float32), n_bytes, raw_dtype=stored
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        _fill(path)


def _fill(path: Path) -> None:
    """Zeros for all tensors; the package pads each to the alignment."""
    header_bytes = path.stat().st_size
    room = 1 << 16
    with path.open("ab") as file:
        file.write(bytes(-header_bytes % 32 + room))


_files = st.builds(
    _File,
    scalars=st.dictionaries(_keys, _scalars(), max_size=8),
    arrays=st.dictionaries(_keys.map(lambda key: f"array.{key}"), _arrays(), max_size=4),
    tensors=st.lists(
        st.tuples(
            st.sampled_from(_STORED),
            st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
        ),
        max_size=5,
    ),
)


def _same(ours: Header, path: Path) -> None:
    theirs = GGUFReader(path)
    fields = {name: one for name, one in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for name, value in ours.metadata.items():
        content = fields[name].contents()
        if isinstance(value, ArrayValue):
            assert value.length == len(content)
            if value.values is not None:
                assert list(value.values) == content
        else:
            assert value == content
            assert isinstance(value, bool) == isinstance(content, bool)
    assert [one.name for one in ours.tensors] == [one.name for one in theirs.tensors]
    for our, their in zip(ours.tensors, theirs.tensors, strict=True):
        assert our.dims == tuple(their.shape.tolist())
        assert our.type_number == their.tensor_type.value
        assert our.n_bytes == their.n_bytes
        assert ours.data_offset + our.offset == their.data_offset


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_files)
def test_every_header_is_read_as_the_package_reads_it(file: _File) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.gguf"
        file.write(path)

        header = read_header(MemorySource(path.read_bytes()))

        _same(header, path)


def test_a_designed_model_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(design(SHAPES["tiny-moe"]), path)

    _same(read_header(MemorySource(path.read_bytes())), path)


def test_sizes_of_types_are_those_of_the_package() -> None:
    known = {kind.value: sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    ours = {
        number: (kind.block, kind.block_bytes)
        for number, kind in TENSOR_TYPES.items()
        if number in known
    }

    assert ours == {number: known[number] for number in ours}
    assert set(known) - set(ours) <= _NEVER_STORED
