"""Designed models on every real engine that is there: what they write, to the token."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.designed import Truth, encode, read_truth
from tests.support.server_process import Server, serving
from tunerd.engine.capabilities import parse_help, read_capabilities
from tunerd.tryout.designed import SHAPES, design, vocabulary, write

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
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_an_engine_writes_what_the_truth_says(
    name: str, shape: str, models: dict[str, Path], tmp_path: Path
) -> None:
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
