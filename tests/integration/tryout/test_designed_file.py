"""Designed models as files: what stands in them is what was planned, and writing is all or nothing."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from tests.support.designed import read_truth
from tunerd.errors import HostError, UsageError
from tunerd.tryout.designed import SHAPES, TRUTH_KEY, design, truth_path_of, write


@pytest.mark.parametrize("name", SHAPES)
def test_the_weights_of_a_file_do_what_was_planned(name: str, tmp_path: Path) -> None:
    made = design(SHAPES[name], seed=3)
    tokens = range(len(made.plan))

    read = read_truth(write(made, tmp_path / "model.gguf"))

    assert read.successor.tolist() == [made.successor(token) for token in tokens]
    assert read.margin.min() > 4
    if not made.shape.has_mtp:
        assert read.guess is None
        return
    assert read.guess is not None
    assert read.confidence is not None
    assert read.confidence_of_all is not None
    assert read.guess.tolist() == [made.guess(token) for token in tokens]
    np.testing.assert_allclose(
        read.confidence, [made.confidence(token) for token in tokens], atol=0.012
    )
    # Tokens near a p-min that people use would make counts depend on an engine's rounding.
    assert np.abs(read.confidence[:, None] - np.arange(0.05, 0.99, 0.05)).min() > 0.01
    assert np.abs(read.confidence - read.confidence_of_all).max() < 0.005


def test_the_ground_truth_stands_beside_the_file_and_inside_it(tmp_path: Path) -> None:
    made = design(SHAPES["tiny"], seed=5)
    written = write(made, tmp_path / "model.gguf")

    beside = json.loads((tmp_path / "model.gguf.truth.json").read_text())
    field = GGUFReader(written).get_field(TRUTH_KEY)

    assert field is not None
    assert beside == json.loads(field.contents())
    assert beside["seed"] == 5
    assert beside["shape"]["n_embd"] == 1056
    assert beside["successor"] == read_truth(written).successor.tolist()
    assert beside["regions"][0]["name"] == "code"


def test_an_existing_file_is_left_alone_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("precious")
    made = design(SHAPES["tiny-nomtp"])
    truth_path_of(tmp_path / "other.gguf").write_text("precious")

    with pytest.raises(UsageError, match="already exists"):
        write(made, path)
    with pytest.raises(UsageError, match=r"other\.gguf\.truth\.json"):
        write(made, tmp_path / "other.gguf")
    assert path.read_text() == "precious"

    write(made, path, force=True)
    assert read_truth(path).guess is None


def test_a_full_disk_leaves_the_old_model_and_no_remains(tmp_path: Path) -> None:
    made = design(SHAPES["tiny"])
    old = write(design(SHAPES["tiny-nomtp"]), tmp_path / "model.gguf")
    before = old.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(HostError, match="cannot write"):
            write(made, old, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert old.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.gguf",
        "model.gguf.truth.json",
    ]
