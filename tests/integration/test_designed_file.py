from __future__ import annotations

import json
import resource
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from tunerd.core.designed import SHAPES, design, metadata, vocabulary
from tunerd.errors import HostError, ModelFileError, UsageError
from tunerd.system.designed_file import (
    TRUTH_KEY,
    read_description,
    read_truth,
    truth_path_of,
    write,
)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe-nomtp"])
def test_the_truth_read_from_the_file_is_that_of_the_design(name: str, tmp_path: Path) -> None:
    made = design(SHAPES[name], seed=3)

    written = write(made, tmp_path / "model.gguf")
    read = read_truth(written.path)

    assert np.array_equal(read.successor, made.truth().successor)
    if read.guess is None or read.confidence is None:
        assert made.truth().guess is None
        return
    guess, confidence = made.truth().guess, made.truth().confidence
    assert guess is not None
    assert confidence is not None
    assert np.array_equal(read.guess, guess)
    np.testing.assert_allclose(read.confidence, confidence, atol=1e-5)


def test_the_file_is_what_gguf_readers_expect(tmp_path: Path) -> None:
    shape = replace(SHAPES["tiny-moe"], n_vocab=2000, context_length=4096)
    written = write(design(shape), tmp_path / "model.gguf")

    reader = GGUFReader(written.path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    fields = {name: field.contents() for name, field in reader.fields.items()}

    assert written.n_bytes == written.path.stat().st_size
    for name, value in metadata(shape).items():
        assert fields[f"qwen35moe.{name}"] == pytest.approx(value)
    assert len(fields["tokenizer.ggml.tokens"]) == 2000
    assert fields["tokenizer.ggml.token_type"][-1] == 5
    for spec in design(shape).tensors:
        assert tuple(int(size) for size in reversed(tensors[spec.name].shape)) == spec.dims
    assert not tensors["output.weight"].data[vocabulary().n_tokens :].any()
    np.testing.assert_array_equal(tensors["output_norm.weight"].data, np.ones(512, np.float32))


def test_the_ground_truth_stands_beside_the_file_and_inside_it(tmp_path: Path) -> None:
    made = design(SHAPES["tiny"], seed=5)
    written = write(made, tmp_path / "model.gguf")

    beside = json.loads(written.truth_path.read_text())

    assert written.truth_path == tmp_path / "model.gguf.truth.json"
    assert beside == read_description(written.path)
    assert beside["seed"] == 5
    assert beside["shape"]["n_embd"] == 512
    assert beside["successor"] == made.truth().successor.tolist()
    assert beside["regions"][0]["name"] == "code"
    row = next(
        row
        for row in beside["expected"]
        if (row["region"], row["n_max"], row["p_min"]) == ("chat", 3, 0.75)
    )
    counts = made.truth().speculate(vocabulary().region("chat").first, 129, 3, 0.75)
    assert (row["drafted"], row["accepted"], row["steps"]) == (
        counts.drafted,
        counts.accepted,
        counts.steps,
    )


def test_an_existing_file_is_left_alone_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("precious")
    made = design(SHAPES["tiny-nomtp"])

    with pytest.raises(UsageError, match="already there"):
        write(made, path)
    assert path.read_text() == "precious"

    write(made, path, force=True)
    assert read_truth(path).guess is None


def test_an_existing_truth_is_left_alone_too(tmp_path: Path) -> None:
    truth_path_of(tmp_path / "model.gguf").write_text("precious")

    with pytest.raises(UsageError, match=r"model\.gguf\.truth\.json"):
        write(design(SHAPES["tiny-nomtp"]), tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf.truth.json"]


def test_a_missing_folder_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="missing/model"):
        write(design(SHAPES["tiny-nomtp"]), tmp_path / "missing" / "model.gguf")


def test_a_full_disk_leaves_the_old_model_and_no_remains(tmp_path: Path) -> None:
    made = design(SHAPES["tiny"])
    old = write(design(SHAPES["tiny-nomtp"]), tmp_path / "model.gguf")
    before = old.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(HostError, match="cannot write"):
            write(made, old.path, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert old.path.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.gguf",
        "model.gguf.truth.json",
    ]


def test_other_users_may_read_the_model(tmp_path: Path) -> None:
    written = write(design(SHAPES["tiny-nomtp"]), tmp_path / "model.gguf")

    for path in (written.path, written.truth_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_hollow_model_takes_room_only_for_what_decides(tmp_path: Path) -> None:
    shape = replace(SHAPES["medium"], is_hollow=True)
    written = write(design(shape), tmp_path / "model.gguf")

    taken = written.path.stat().st_blocks * 512
    assert written.n_bytes > 250_000_000
    assert taken < written.n_bytes / 10
    assert read_truth(written.path).margin.min() > 4


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_a_file_that_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelFileError, match="cannot read"):
        read_truth(path)


def test_a_model_that_was_not_designed_has_no_truth(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(ModelFileError, match=TRUTH_KEY):
        read_truth(path)
    with pytest.raises(ModelFileError, match=TRUTH_KEY):
        read_description(path)
