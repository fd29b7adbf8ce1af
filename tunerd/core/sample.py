"""One measured request: what was asked, what server and client saw, and what speaks against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Mark(StrEnum):
    """Why a sample must not be averaged silently; it is repeated, or counted as missing."""

    WARM_UP = "warm-up"
    THROTTLED = "throttled"
    FOREIGN_TRAFFIC = "foreign traffic"
    VRAM_TAKEN = "VRAM taken by others"
    CLOCKS_DISAGREE = "server and client clocks disagree"
    NOT_COLD = "prompt was cached"
    NOT_DRAFTED = "speculation was off"
    DRAFTED = "speculation was on"
    SHORT = "ended early"
    IMPOSSIBLE = "figures that cannot be"


@dataclass(frozen=True, slots=True)
class Timings:
    """What a server reports of one request, under llama-server's own names.

    None is a key that the reply does not have: ik has no `cache_n`, and no build has draft keys
    where nothing was drafted. `accepted_by_position` counts, for each position of a draft, how often
    it was accepted.
    """

    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None
    predicted_n: int | None = None
    predicted_ms: float | None = None
    draft_n: int | None = None
    draft_n_accepted: int | None = None
    accepted_by_position: tuple[int, ...] | None = None

    @property
    def decode_tok_s(self) -> float | None:
        """Generated tokens a second, by one rule for every build.

        `predicted_ms` begins when the first token has been sampled, so it covers one token less
        than `predicted_n`; builds differ in whether their own rate says so.
        """
        if self.predicted_n is None or not self.predicted_ms or self.predicted_n < 2:  # noqa: PLR2004
            return None
        return (self.predicted_n - 1) / self.predicted_ms * 1000

    @property
    def prompt_tok_s(self) -> float | None:
        """Processed prompt tokens a second; cached ones do not count."""
        if not self.prompt_n or not self.prompt_ms:
            return None
        return self.prompt_n / self.prompt_ms * 1000

    @property
    def steps(self) -> int | None:
        """Verification passes: each gives its accepted drafts and one token more."""
        if self.predicted_n is None or self.predicted_n < 1:
            return None
        return self.predicted_n - 1 - (self.draft_n_accepted or 0)

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens of a verification pass; comparable across settings, as acceptance is not."""
        steps = self.steps
        if not steps or self.predicted_n is None:
            return None
        return (self.predicted_n - 1) / steps

    @property
    def step_ms(self) -> float | None:
        """Mean time of a verification pass."""
        steps = self.steps
        if not steps or self.predicted_ms is None:
            return None
        return self.predicted_ms / steps


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """What the client's own clock saw of a request [ms]; `ttft_ms` only where it was streamed."""

    wall_ms: float
    ttft_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    `process` names the server life in which it was measured (its invocation), `position` is how
    many requests that life had answered before. `timings` is None where the server reported none
    (other OpenAI-compatible servers), `problem` says why there is no answer at all. No text of
    prompt or answer is kept.
    """

    suite: str
    case: str
    kind: str
    prompt_id: str
    process: str
    position: int
    at_s: float
    n_predict: int
    concurrency: int
    timings: Timings | None
    client: ClientTimes | None
    vram_free_min_mib: int | None = None
    marks: tuple[Mark, ...] = ()
    problem: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        """Whether it may enter an average."""
        return self.problem is None and not self.marks

    @property
    def n_predicted(self) -> int | None:
        """Generated tokens, from the server's report."""
        return self.timings.predicted_n if self.timings is not None else None
