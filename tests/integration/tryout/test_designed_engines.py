"""Designed models on every real engine that is there: text and draft counts, to the token."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.designed import Counts, Truth, encode, read_truth
from tests.support.server_process import Server, serving
from tunerd.engine.capabilities import Capabilities, SpecStyle, parse_help, read_capabilities
from tunerd.tryout.designed import SHAPES, design, vocabulary, write
from tunerd.words import Family

WORDS = vocabulary()
EMBEDDED = "embedded"
N_PREDICT = 129
DRAFTED_REGIONS = ("code", "chat", "creative")
# The merge of MTP into llama.cpp takes --spec-draft-p-min and does nothing with it for MTP.
IGNORES_P_MIN = {"mainline-2026-05-16"}

SETTINGS = [
    ("tiny", 3, 0.0),
    ("tiny", 6, 0.75),
    ("tiny-moe", 3, 0.75),
]


ENGINES = [
    *(pytest.param(one.name, marks=pytest.mark.engine) for one in needs.engines() or [Path("any")]),
    pytest.param(EMBEDDED, marks=pytest.mark.llama),
]


@dataclass(frozen=True, slots=True)
class Build:
    """One engine that can be started."""

    name: str
    program: tuple[str, ...]
    capabilities: Capabilities

    @property
    def can_draft(self) -> bool:
        """Whether it knows MTP blocks; those that do not cannot even load a model with one."""
        return self.capabilities.spec_word("mtp") is not None

    @property
    def is_ik(self) -> bool:
        """Whether its server is ik_llama.cpp's."""
        return self.capabilities.family is Family.IK

    def speculation(self, n_max: int, p_min: float) -> tuple[str, ...]:
        """The options that make it draft."""
        word = self.capabilities.spec_word("mtp") or ""
        match self.capabilities.spec_style:
            case SpecStyle.STAGE:
                return ("--spec-type", f"{word}:n_max={n_max},p_min={p_min}")
            case SpecStyle.IK_LEGACY:
                return ("-mtp", "--draft-max", str(n_max), "--draft-p-min", str(p_min))
            case _:
                n_max_flags = ("--spec-draft-n-max", str(n_max))
                return ("--spec-type", word, *n_max_flags, "--spec-draft-p-min", str(p_min))

    def expected(self, truth: Truth, last: int, n_max: int, p_min: float) -> Counts:
        """What this engine drafts, with the differences that are its own."""
        return truth.speculate(
            last,
            N_PREDICT,
            n_max,
            p_min,
            first_draft_free=self.is_ik,
            candidates=None if self.is_ik else 10,
            ignores_p_min=self.name in IGNORES_P_MIN,
        )


@cache
def _build(name: str) -> Build:
    if name == EMBEDDED:
        program: tuple[str, ...] = (sys.executable, "-m", "tunerd.tryout.embedded")
    else:
        program = (str(needs.engine(name)),)
    # ik exits with 1 after its help.
    shown = subprocess.run(
        [*program, "--help"], capture_output=True, text=True, timeout=30, check=False
    )
    return Build(name, program, read_capabilities(parse_help(shown.stdout + shown.stderr)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = ("tiny", "tiny-moe", "tiny-nomtp", "tiny-moe-nomtp")
    return {name: write(design(SHAPES[name]), folder / f"{name}.gguf") for name in names}


def _serve(
    build: Build, model: Path, folder: Path, *options: str
) -> AbstractContextManager[Server]:
    return serving(_argv(build, model, *options), folder / "log")


def _argv(build: Build, model: Path, *options: str) -> list[str]:
    words = ("-m", str(model), "-c", "2048", "-np", "1", "-t", "1")
    return [*build.program, *words, "--no-warmup", "--jinja", "--metrics", *options]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_an_engine_writes_what_the_truth_says(
    name: str, shape: str, models: dict[str, Path], tmp_path: Path
) -> None:
    build = _build(name)
    model = models[shape if build.can_draft else f"{shape}-nomtp"]
    truth = read_truth(model)
    prompts = [f"please go on with {region.name}" for region in WORDS.regions]
    prompts += ["code", "2 + 2 = 4", "who was it?", "naïve"]

    with _serve(build, model, tmp_path) as server:
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


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("shape", "n_max", "p_min"), SETTINGS)
def test_an_engine_drafts_and_accepts_as_many_tokens_as_the_truth_says(
    name: str, shape: str, n_max: int, p_min: float, models: dict[str, Path], tmp_path: Path
) -> None:
    build = _build(name)
    if not build.can_draft:
        pytest.skip(f"{name} knows no MTP; an engine that does is needed")
    truth = read_truth(models[shape])

    with _serve(build, models[shape], tmp_path, *build.speculation(n_max, p_min)) as server:
        for region in DRAFTED_REGIONS:
            last = WORDS.region(region).first
            answer = server.post("/v1/completions", {
                "prompt": WORDS.decode([last]), "max_tokens": N_PREDICT, "temperature": 0,
            })  # fmt: skip
            text, timings = answer["choices"][0]["text"], answer["timings"]
            expected = build.expected(truth, last, n_max, p_min)

            counted = (timings["draft_n"], timings["draft_n_accepted"], timings["predicted_n"])
            assert counted == (expected.drafted, expected.accepted, N_PREDICT), region
            if build.is_ik:  # it may keep back the last tokens of an answer
                assert truth.text(last, N_PREDICT).startswith(text)
                assert len(text) > 0.7 * len(truth.text(last, N_PREDICT))
            else:
                assert text == truth.text(last, N_PREDICT)
            if "draft_by_depth" in timings:
                depths = timings["draft_by_depth"]
                drafted = tuple(depth["draft_n"] for depth in depths)
                accepted = tuple(depth["draft_n_accepted"] for depth in depths)
                assert drafted == expected.drafted_by_position[: len(depths)]
                assert accepted == expected.accepted_by_position[: len(depths)]
