"""Whether a server that was just started is on its way, ready, or lost.

llama-server tells no service manager when it is ready, and a health route says nothing about
generation, so a start is good only after this invocation's own process has answered a real request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tunerd.core.failure import FailureKind
from tunerd.core.service import UnitState

_RUN_OF_ONE_CHARACTER = 16
_REPLACEMENT = "�"


class HttpState(StrEnum):
    """What the health route did: not there yet, silent (ik while loading), loading, ready, wrong."""

    REFUSED = "refused"
    SILENT = "silent"
    LOADING = "loading"
    READY = "ready"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Expectation:
    """Who should answer: an invocation other than the old one, listening itself, by this name.

    `must_draft` where not even a short generation can do without drafts (p-min 0, and a build whose
    reply counts them). `n_restarts` by its manager are known of, and do not speak against it.
    """

    old_invocation: str | None
    alias: str | None
    expects_draft: bool
    must_draft: bool = False
    n_restarts: int = 0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait [s].

    `stall_s` without any sign of loading means a hang; `limit_s` is the end in any case.
    """

    stall_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a starting server.

    `listener_pid` is the process that owns the port, None if that could not be told.
    `progress` grows while a model is loaded (bytes read, memory in use); None if unknown.
    """

    at_s: float
    unit: UnitState
    http: HttpState
    listener_pid: int | None
    alias: str | None
    progress: int | None


@dataclass(frozen=True, slots=True)
class Starting:
    """Keep waiting; `text` is for people."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """It answers; now ask it for a generation."""


@dataclass(frozen=True, slots=True)
class Lost:
    """It will not come up; `kind` is None where the log has to tell."""

    kind: FailureKind | None
    text: str


def judge_start(
    now: Observation,
    *,
    first_s: float,
    moved_s: float,
    expected: Expectation,
    patience: Patience,
) -> Starting | Ready | Lost:
    """What an observation means.

    Args:
        now: The latest look.
        first_s: When the waiting began, on the observations' clock.
        moved_s: When the loading last made progress.
        expected: Who should answer.
        patience: How long to wait.
    """
    unit = now.unit
    if unit.has_failed or unit.active_state == "inactive":
        return Lost(None, f"the unit is {unit.active_state} ({unit.result})")
    if (unit.n_restarts or 0) > expected.n_restarts:
        return Lost(None, f"it ended and was started again {unit.n_restarts} times")
    if now.at_s - first_s > patience.limit_s:
        return Lost(FailureKind.HANG, f"not ready after {patience.limit_s:.0f} s")
    if now.at_s - moved_s > patience.stall_s:
        return Lost(FailureKind.HANG, f"no sign of progress for {patience.stall_s:.0f} s")
    is_new = unit.invocation_id != expected.old_invocation or expected.old_invocation is None
    if not unit.is_active or not is_new or unit.main_pid is None:
        return Starting("waiting for the process")
    if now.listener_pid not in {None, unit.main_pid}:
        text = f"process {now.listener_pid} answers on the port, not the unit"
        return Lost(FailureKind.PORT_TAKEN, text)
    if now.http is HttpState.READY:
        return _judge_answer(now, expected)
    if now.http is HttpState.WRONG:
        return Lost(FailureKind.WRONG_MODEL, "what answers there is not a llama-server")
    return Starting("loading the model" if now.http is HttpState.LOADING else "starting")


def _judge_answer(now: Observation, expected: Expectation) -> Ready | Lost:
    # Of several names mainline tells one, ik all of them as one text.
    names = set() if expected.alias is None else {expected.alias, *expected.alias.split(",")}
    if names and now.alias is not None and now.alias not in names:
        return Lost(
            FailureKind.WRONG_MODEL,
            f"it serves `{now.alias[:100]}`, not `{expected.alias}`",
        )
    return Ready()


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request, as far as it could be read.

    `is_refused`: there was an answer, and it says that this server does not do that, or not for us.
    """

    text: str | None
    n_predicted: int | None
    n_drafted: int | None
    problem: str | None
    timed_out: bool = False
    is_refused: bool = False


def judge_generation(completion: Completion, *, wanted: int) -> Lost | None:
    """What is wrong with the first real generation; None if nothing is.

    Garbage is a reply that is no completion, no tokens, undecodable text, or one character over
    and over, which is how a broken kernel or a damaged model shows.
    """
    if completion.problem is not None:
        return Lost(FailureKind.GARBAGE, completion.problem)
    if not completion.n_predicted:
        return Lost(FailureKind.GARBAGE, "the answer holds no tokens")
    text = completion.text or ""
    if text and text.count(_REPLACEMENT) * 2 > len(text):
        return Lost(FailureKind.GARBAGE, "the answer is not readable text")
    solid = text.strip()
    if (
        completion.n_predicted >= min(wanted, _RUN_OF_ONE_CHARACTER)
        and len(solid) >= _RUN_OF_ONE_CHARACTER
        and len(set(solid)) == 1
    ):
        return Lost(FailureKind.GARBAGE, f"the answer repeats one character: {solid[:20]!r}")
    return None


def judge_speculation(
    completion: Completion, *, speculative: bool | None, expected: Expectation
) -> Lost | None:
    """Whether speculation that was asked for really runs; several mistakes start without it.

    Args:
        completion: The first generation.
        speculative: What the slots say; None where the build does not say.
        expected: What was asked for.
    """
    if not expected.expects_draft or speculative is True:
        return None
    if speculative is False:
        return Lost(FailureKind.NO_SPECULATION, "its slots say that speculation is not active")
    if expected.must_draft and not completion.n_drafted:
        return Lost(FailureKind.NO_SPECULATION, "the first generation drafted nothing")
    return None


def judge_settled(unit: UnitState, *, main_pid: int, invocation: str | None) -> Lost | None:
    """What changed after the first generation; None while the same process still serves."""
    if not unit.is_active:
        return Lost(None, f"it ended right after its first answer ({unit.result})")
    if unit.main_pid != main_pid or unit.invocation_id != invocation:
        return Lost(FailureKind.CRASH, "it was restarted right after its first answer")
    return None


def load_progress(parts: Mapping[str, int | None]) -> int | None:
    """One number that grows while a model is loaded; None if nothing could be read."""
    known = [value for value in parts.values() if value is not None]
    return sum(known) if known else None
