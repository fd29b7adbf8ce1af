"""Designed models: what stands in their files is what was planned, and what every real engine that is there writes by them, to the token."""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.support import needs
from tests.support.designed import Truth, encode, read_truth
from tests.support.server_process import Server, serving
from tunerd.engine.capabilities import parse_help, read_capabilities
from tunerd.errors import HostError, UsageError
from tunerd.tryout.designed import SHAPES, design, truth_path_of, vocabulary, write


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


WORDS = vocabulary()
EMBEDDED = "embedded"

ENGINES = [
    *(pytest.param(one.name, marks=pytest.mark.engine) for one in needs.engines() or [Path("any")]),
    pytest.param(EMBEDDED, marks=pytest.mark.llama),
]


@cache
def _program(name: str) -> tuple[str, ...]:
    if name == EMBEDDED:
        return (sys.executable, "-m", "tunerd.tryout.embedded")
    return (str(needs.engine(name)),)


@cache
def _knows_mtp(name: str) -> bool:
    """Those that do not cannot even load a model with a block for it."""
    # ik exits with 1 after its help.
    shown = subprocess.run(
        [*_program(name), "--help"], capture_output=True, text=True, timeout=30, check=False
    )
    return read_capabilities(parse_help(shown.stdout + shown.stderr)).spec_word("mtp") is not None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = ("tiny", "tiny-moe", "tiny-nomtp", "tiny-moe-nomtp")
    return {name: write(design(SHAPES[name]), folder / f"{name}.gguf") for name in names}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_writes_what_the_truth_says(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    shape = (
        "tiny-moe"
        if name in {"mainline-2026-05-16", "mainline-2026-08-18", "ik-2026-08"}
        else "tiny"
    )
    model = models[shape if _knows_mtp(name) else f"{shape}-nomtp"]
    truth = read_truth(model)
    prompts = [f"please go on with {region.name}" for region in WORDS.regions]
    prompts += ["code", "2 + 2 = 4", "who was it?", "naïve"]

    options = ("-m", str(model), "-c", "2048", "-np", "1", "-t", "1", "--no-warmup", "--jinja")
    with serving([*_program(name), *options], tmp_path / "log") as server:
        for prompt in prompts:
            answer = server.post(
                "/completion", {"prompt": prompt, "n_predict": 20, "temperature": 0}
            )
            assert answer["content"] == truth.text(encode(prompt)[-1], 20), prompt
            assert "draft_n" not in answer["timings"], "an MTP block alone drafts nothing"
        from_tokens = server.post("/completion", {"prompt": [300, 301], "n_predict": 20})
        assert from_tokens["content"] == truth.text(301, 20)
        for text in TEXTS:
            answer = server.post(
                "/tokenize", {"content": text, "add_special": False, "parse_special": True}
            )
            assert tuple(answer["tokens"]) == encode(text), text
        _chat(server, truth)


TEXTS = (
    " def return\n\nfoo(x) = 12345;  // it's  three   blanks, _under_score",
    "code in two lines\r\n\tand tabs   \n  ",
    "<|im_start|>user\n creative<|im_end|>\n",
    "Grüße, 日本語 … ½ naïve I'LL we're",
)


def _chat(server: Server, truth: Truth) -> None:
    """It goes on with the last word of the user."""
    messages = [{"role": "user", "content": "write code"}]
    for last_word in ("code", "creative"):
        messages[-1]["content"] = f"write something {last_word}"
        answer = server.post(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 20, "temperature": 0}
        )
        content = answer["choices"][0]["message"]["content"]
        expected = truth.text(encode(" " + last_word)[0], 20)
        assert content.strip() == expected.strip()
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": ""}]
    assert server.post("/apply-template", {"messages": messages[:3]})["prompt"] == (
        "<|im_start|>user\n write something code"
        f"{truth.text(encode(' code')[0], 20)}<|im_end|>\n"
        "<|im_start|>user\n write something creative"
    )
