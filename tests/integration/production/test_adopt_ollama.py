"""A model of Ollama's store becomes a profile that a server can serve; the store is only read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_box import Box
from tests.support.transcripts import answered
from tunerd.tryout.designed import SHAPES, design, write


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path, {"HOME": str(tmp_path / "home")})


def store(box: Box, where: str, layers: Mapping[str, bytes]) -> Path:
    """A store with one model, as `ollama pull` leaves it."""
    models = box.folder / "home/.ollama/models"
    (models / "blobs").mkdir(parents=True)
    listed: list[dict[str, Any]] = []
    for kind, content in layers.items():
        digest = sha256(content).hexdigest()
        (models / "blobs" / f"sha256-{digest}").write_bytes(content)
        media = f"application/vnd.ollama.image.{kind}"
        listed.append({"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)})
    manifest = models / "manifests" / where
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": listed}))
    return models


@pytest.fixture
def weights(tmp_path: Path) -> bytes:
    return write(design(SHAPES["tiny"]), tmp_path / "tiny.gguf").read_bytes()


@pytest.mark.llama
def test_a_model_of_ollama_is_planned_with_its_parameters_and_served(
    box: Box, weights: bytes
) -> None:
    parameters = json.dumps({"num_ctx": 1024, "temperature": 0.3, "stop": ["<|im_end|>"]}).encode()
    models = store(
        box, "registry.ollama.ai/library/tiny/8b", {"model": weights, "params": parameters}
    )
    made = box.json("profiles", "new", "mine", "--from-ollama", "tiny:8b")
    assert "`ollama rm` would delete it" in str(made)

    planned = box.json("plan", "mine")

    assert planned["refused"] is False, planned["warnings"]
    words = planned["argv"]
    assert Path(words[words.index("--model") + 1]).parent == models / "blobs"
    for flag, value in (("--alias", "tiny:8b"), ("--ctx-size", "1024"), ("--temp", "0.3")):
        assert words[words.index(flag) + 1] == value


def test_what_ollama_has_not_is_refused_as_in_the_golden_text(box: Box, weights: bytes) -> None:
    """A line is a name, and what the manifest of another model holds."""
    models = store(box, "registry.ollama.ai/library/tiny/8b", {"model": weights})

    def refused(line: str) -> list[str]:
        name, _, manifest = line.partition(" ")
        (models / "manifests/registry.ollama.ai/library/tiny/latest").write_text(manifest)
        said = box.call("profiles", "new", "mine", "--from-ollama", name).stderr
        return said.replace(str(box.folder), "FOLDER").splitlines()

    answered("errors/ollama", refused)
    assert not (box.context.paths.site_profiles / "mine.toml").exists()
