"""The header reader against the `gguf` package, on files that the package wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

from tests.support.gguf_bytes import MemorySource
from tunerd.model.gguf import TENSOR_TYPES, ArrayValue, Header, read_header

_NEVER_STORED = {GGMLQuantizationType.Q8_1.value, GGMLQuantizationType.Q8_K.value}
_STORED = [kind for kind in GGML_QUANT_SIZES if kind.value in TENSOR_TYPES]

_SCALARS = {
    **{f"UINT{n}": 2**n - 1 for n in (8, 16, 32, 64)},
    **{f"INT{n}": -(2 ** (n - 1)) for n in (8, 16, 32, 64)},
    "FLOAT32": 0.5,
    "FLOAT64": 1e300,
    "BOOL": True,
    "STRING": "Grüße, 日本語",
}
_ARRAYS: tuple[list[Any], ...] = ([-1, 2**31 - 1], [0.5, -0.25], [True, False], ["", "ü", "x" * 99])


def _everything(path: Path) -> None:
    """A file with each type of value, of array and of tensor."""
    writer = GGUFWriter(path, "made")
    for kind, value in _SCALARS.items():
        writer.add_key_value(f"scalar.{kind.lower()}", value, GGUFValueType[kind])
    for number, values in enumerate(_ARRAYS):
        writer.add_array(f"array.{number}", values)
    for index, stored in enumerate(_STORED):
        block, block_bytes = GGML_QUANT_SIZES[stored]
        rows = index % 3 + 1
        writer.add_tensor_info(
            f"tensor.{index}", [rows, 2 * block], np.dtype(np.float32), 2 * rows * block_bytes,
            raw_dtype=stored,
        )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:  # zeros for all tensors, each padded to the alignment
        file.write(bytes(-path.stat().st_size % 32 + (1 << 16)))


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


def test_a_header_with_everything_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "made.gguf"
    _everything(path)

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
