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

_NEVER_STORED = {GGMLQuantizationType.Q8_1.value, GGMLQuantizationType.Q8_K.value}
_STORED = [kind for kind in GGML_QUANT_SIZES if kind.value in TENSOR_TYPES]

_VALUES: dict[GGUFValueType, st.SearchStrategy[Any]] = {
    **{GGUFValueType[f"UINT{n}"]: st.integers(0, 2**n - 1) for n in (8, 16, 32, 64)},
    **{
        GGUFValueType[f"INT{n}"]: st.integers(-(2 ** (n - 1)), 2 ** (n - 1) - 1)
        for n in (8, 16, 32, 64)
    },
    GGUFValueType.FLOAT32: st.floats(width=32, allow_nan=False),
    GGUFValueType.FLOAT64: st.floats(allow_nan=False),
    GGUFValueType.BOOL: st.booleans(),
    GGUFValueType.STRING: st.text(st.characters(codec="utf-8"), max_size=30),
}
_keys = st.text(alphabet="abcdefghijklmnopqrstuvwxyz._0123456789", min_size=1, max_size=40).filter(
    lambda key: key != "general.alignment"
)
_scalars = st.sampled_from(list(_VALUES)).flatmap(
    lambda kind: st.tuples(st.just(kind), _VALUES[kind])
)
# The writer takes the type of an array's elements from the first one.
_arrays = st.sampled_from(
    [GGUFValueType.INT32, GGUFValueType.FLOAT32, GGUFValueType.BOOL, GGUFValueType.STRING]
).flatmap(lambda kind: st.lists(_VALUES[kind], min_size=1, max_size=20))


@dataclass
class _File:
    scalars: dict[str, tuple[GGUFValueType, Any]]
    arrays: dict[str, list[Any]]
    tensors: Sequence[tuple[GGMLQuantizationType, tuple[int, ...]]]

    def write(self, path: Path) -> None:
        writer = GGUFWriter(path, "made")
        for key, (kind, value) in self.scalars.items():
            writer.add_key_value(key, value, kind)
        for key, values in self.arrays.items():
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
        with path.open("ab") as file:  # zeros for all tensors, each padded to the alignment
            file.write(bytes(-path.stat().st_size % 32 + (1 << 16)))


_files = st.builds(
    _File,
    scalars=st.dictionaries(_keys, _scalars, max_size=8),
    arrays=st.dictionaries(_keys.map(lambda key: f"array.{key}"), _arrays, max_size=4),
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
