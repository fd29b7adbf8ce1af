"""Samples as a test wants them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tunerd.engine.log import LoggedRequest
from tunerd.measure.answer import ClientTimes, Sample, Timings
from tunerd.measure.request import PromptBook, Request, Suite, read_prompts
from tunerd.profile.arm import BOOT, Arm
from tunerd.profile.arm import Sample as SweepSample

PROMPTS = Path(__file__).parents[2] / "tunerd/data/prompts.toml"

# Of which region of a designed vocabulary the last word of a kind is.
REGION = {
    "code_python": "code",
    "code_cpp": "code",
    "explain_concept": "explain",
    "summarize": "summary",
    "qa_factual": "factual",
    "translation": "translation",
    "creative_short": "creative",
    "stepwise_math": "math",
    "long_code_review": "code",
}


def the_book() -> PromptBook:
    """The prompts that are shipped."""
    return read_prompts(tomllib.loads(PROMPTS.read_text(encoding="utf-8")))


def timings(**values: Any) -> Timings:
    """What a server reports of 100 prompt tokens in 50 ms and 101 generated ones in 2 s."""
    usual: dict[str, Any] = {"cache_n": 0, "prompt_n": 100, "prompt_ms": 50.0, "predicted_n": 101,
                             "predicted_ms": 2000.0}  # fmt: skip
    return Timings(**{**usual, **values})


def a_request(**values: Any) -> Request:
    """One of the kinds of the mtp suite, for 101 tokens."""
    usual: dict[str, Any] = {
        "suite": Suite.MTP,
        "case": "x",
        "kind": "code_python",
        "n_predict": 101,
    }
    return Request(**{**usual, **values})


def sample(**values: Any) -> Sample:
    """A usable sample; `timings` and `client` may be given whole."""
    given = values.pop("timings", timings())
    usual: dict[str, Any] = {
        "suite": "mtp",
        "case": "code_python",
        "kind": "code_python",
        "prompt_id": "p",
        "process": "life",
        "position": 1,
        "at_s": 1.0,
        "n_predict": 101,
        "concurrency": 1,
        "timings": given,
        "client": ClientTimes(2060.0, 55.0),
    }
    return Sample(**{**usual, **values})


def logged(
    prompt_n: int,
    predicted_n: int,
    drafted_n: int | None = None,
    accepted_n: int | None = None,
    *,
    cached_n: int | None = 0,
    concurrency: int = 1,
    tok_s: float = 50.0,
) -> LoggedRequest:
    """A request as the log tells of it: the prompt at 500 tok/s, the answer at `tok_s`."""
    return LoggedRequest(
        prompt_n=prompt_n,
        prompt_ms=2.0 * prompt_n,
        predicted_n=predicted_n,
        predicted_ms=1000.0 * (predicted_n - 1) / tok_s,
        cached_n=cached_n,
        drafted_n=drafted_n,
        accepted_n=accepted_n,
        concurrency=concurrency,
    )


def sweep_event(process: str, pair: tuple[int, int] | None = None) -> dict[str, Any]:
    """A start of a sweep, as it is stored."""
    arm = Arm("mine", "off", 0, 0.0, 0, "f16", 512, 2048, 2)
    made = SweepSample(
        event=BOOT, process=process, arm=arm, purpose="", at_s=0.0, seconds=1.0, pair=pair
    )
    return made.to_json()
