"""How a sweep speaks with a box: a simulator, a stand-in engine or the real server.

Data are read by attribute only: an object of another class with the same attributes is as good.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tunerd.core.sweep.arm import Arm, ArmLike, Extra


class Refused(Exception):
    """The server does not take this request, or an override beyond what it was started with."""


class ServerDied(Exception):
    """The server ended while it was measured; `kind` is oom, hang or crash."""

    def __init__(self, kind: str = "crash") -> None:
        super().__init__(kind)
        self.kind = kind


class Preempted(Exception):
    """The user wants the machine: the sweep ends with what it has."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to measure.

    Attributes:
        kind: What the text is: code, chat, tool, summary, math or creative.
        prompt_id: Names the text: the same id is the same text.
        cached_tokens: Length of a prefix that all requests of a process share; cold until the
            process has served that length once [tok].
        new_tokens: Prompt tokens behind it, of this text alone [tok].
        n_predict: Tokens to generate [tok].
        concurrency: How many such requests run at once; timings are those of one.
        ignore_eos: Whether generation goes on to `n_predict` whatever the model says.
    """

    kind: str
    prompt_id: str
    cached_tokens: int
    new_tokens: int
    n_predict: int
    concurrency: int = 1
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Boot:
    """How a start went: `failure` is oom, hang, crash, refused or empty."""

    ok: bool
    seconds: float
    failure: str = ""
    vram_free_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Values allowed for one engine with one kind of speculation.

    `extra` lists alternatives for the other profile keys, each a whole set of (key, value) pairs.
    """

    n_max: tuple[int, ...]
    p_min: tuple[float, ...]
    fit_mib: tuple[int, ...]
    kv: tuple[str, ...]
    ubatch: tuple[int, ...]
    batch: tuple[int, ...]
    threads: tuple[int, ...]
    extra: tuple[Extra, ...] = ()


@dataclass(frozen=True, slots=True)
class Space:
    """What may be tried: families by (engine, spec), and what the user pinned, by name."""

    families: Mapping[tuple[str, str], Any]
    pinned: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What counts as a gain, and what must not be given for it.

    Attributes:
        min_gain: Least gain in turn time that is worth a swap (ratio).
        alpha: Chance of promoting an arm without that gain, over a whole night.
        max_pairs: Pairs of one challenge at most.
        headroom_mib: Least VRAM that must stay free with the context full [MiB].
        max_prefill_loss: How much slower the prompt of the deepest class may get (ratio).
        max_class_loss: How much slower the turn of any class may get (ratio).
        may_change_output: Whether settings that can change what the model says (KV type, `extra`)
            may differ from the incumbent's at all; which of them, the space says by what it lists.
        tool_calls: Short tool calls that a winner must have got through.
        context_tokens: The context to fill, where neither space nor box tells [tok].
        seeds: Arms known from elsewhere, such as published settings; they are tried first.
        max_arms: How many arms may be measured at most; None for as many as time allows.
        rejected: Arms that must not be recommended, with the reason, such as a failure in service.
    """

    min_gain: float = 0.01
    alpha: float = 0.05
    max_pairs: int = 40
    headroom_mib: int = 64
    max_prefill_loss: float = 0.5
    max_class_loss: float = 0.25
    may_change_output: bool = True
    tool_calls: int = 80
    context_tokens: int | None = None
    seeds: tuple[ArmLike, ...] = ()
    max_arms: int | None = None
    rejected: tuple[tuple[ArmLike, str], ...] = ()


class Box(Protocol):
    """A machine on which arms can be started and measured, one at a time.

    `per_request` names the engines whose n_max and p_min can be given with a request. Where a box
    knows its full context, it may say so in an attribute `context_tokens`; where it knows how long a
    start takes before any was seen, in `expected_load_s`.
    """

    @property
    def per_request(self) -> Collection[str]:
        """Engines that take n_max and p_min with a request."""
        ...

    def restart(self, arm: Arm, /) -> Any:
        """Starts a fresh process with exactly this arm; what comes back reads like `Boot`."""
        ...

    def measure(self, request: Request, /, arm: Arm | None = None) -> Mapping[str, Any]:
        """Asks once and returns llama-server's `timings` keys and what else was seen.

        `wall_ms`, `vram_free_min_mib`, for kind tool `tool_ok`, and where the build has them
        `accepted_per_pos`, `verify_steps`, `spill_mib`, `n_ctx`.

        Raises:
            Refused: The override is beyond what the process was started with.
            ServerDied: The process is gone.
        """
        ...

    def now(self) -> float:
        """Seconds on the box's own clock."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Waits."""
        ...

    def check(self) -> None:
        """Called before every restart and request.

        Raises:
            Preempted: The user wants the machine.
        """
        ...
