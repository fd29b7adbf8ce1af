"""Which file a profile's model is, in folders with real header bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.gguf_bytes import text
from tests.support.local_box import Box
from tests.support.model_headers import small
from tests.support.profiles import profile_of
from tunerd.app import Context
from tunerd.engine.choice import find_weights, found_by_metadata
from tunerd.errors import ConfigError, ModelFileError


def made(path: Path, name: str) -> Path:
    tensors = [("blk.0.attn_q.weight", (8, 2))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(small("llama", {"block_count": 1}, tensors, [text("general.name", name)]))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def ctx(tmp_path: Path, folder: Path) -> Context:
    return Box(tmp_path, {"TUNERD_MODELS__DIRS": json.dumps([str(folder)])}).context


def test_a_file_of_the_name_is_taken_whatever_its_metadata_says(ctx: Context, folder: Path) -> None:
    wanted = made(folder / "a.gguf", "Other")
    made(folder / "b.gguf", "Qwen3.6 27B")
    profile = profile_of({"model": {"path": "a.gguf", "name": "Qwen3.6*"}})

    path = find_weights(ctx, profile)

    assert path == wanted
    assert found_by_metadata(profile, path) == []


def test_without_a_file_of_the_name_the_one_whose_metadata_fits_is_taken_and_said(
    ctx: Context, folder: Path
) -> None:
    made(folder / "a.gguf", "Other")
    fitting = made(folder / "sub" / "b.gguf", "Qwen3.6 27B")
    profile = profile_of({"model": {"path": "gone.gguf", "name": "qwen3.6*27b"}})

    path = find_weights(ctx, profile)
    (said,) = found_by_metadata(profile, path)

    assert path == fitting
    assert said.code == "model-by-name"
    assert str(fitting) in said.text
    assert "gone.gguf" in said.text


def test_two_files_whose_metadata_fit_are_not_guessed_between(ctx: Context, folder: Path) -> None:
    made(folder / "a.gguf", "Qwen3.6 27B")
    made(folder / "b.gguf", "Qwen3.6 27B")
    profile = profile_of({"model": {"path": "gone.gguf", "name": "Qwen3.6*"}})

    with pytest.raises(ModelFileError, match=r"gone\.gguf") as caught:
        find_weights(ctx, profile)

    assert "a.gguf" in str(caught.value.cause)
    assert "b.gguf" in str(caught.value.cause)


def test_metadata_alone_can_name_the_model_and_nothing_cannot(ctx: Context, folder: Path) -> None:
    fitting = made(folder / "b.gguf", "Qwen3.6 27B")
    profile = profile_of({"model": {"path": None, "name": "Qwen3.6*"}})

    assert find_weights(ctx, profile) == fitting
    assert found_by_metadata(profile, fitting) == []
    with pytest.raises(ConfigError, match="names no model"):
        find_weights(ctx, profile_of({"model": {"path": None}}))


def test_a_missing_file_says_how_to_fetch_it(ctx: Context, folder: Path) -> None:
    profile = profile_of({"model": {"path": "gone.gguf", "hf_repo": "someone/some-GGUF"}})

    with pytest.raises(ModelFileError) as caught:
        find_weights(ctx, profile)

    assert f"hf download someone/some-GGUF gone.gguf --local-dir {folder}" in str(caught.value.hint)
