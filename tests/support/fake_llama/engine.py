"""The model behind the routes: slots and their queue, tokens, totals, and how long a generation takes."""

from __future__ import annotations

import random
import re
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from tests.support.fake_llama.answers import ClientGoneError, HttpError
from tests.support.fake_llama.arguments import Arguments
from tests.support.fake_llama.behaviour import Behaviour
from tests.support.fake_llama.records import Log, Record

N_VOCAB = 248_320
POLL_S = 0.02
_LOOP_WORDS = 4
_WORDS = (
    *("the", "server", "keeps", "its", "promise", "and", "every", "answer", "comes"),
    *("back", "in", "time", "for", "you", "to", "read", "it"),
)


@dataclass
class Run:
    """One simulated generation; times in simulated milliseconds."""

    n_prompt: int
    n_cached: int
    n_predicted: int
    prompt_ms: float
    predicted_ms: float
    drafted_at: list[int]
    accepted_at: list[int]
    bursts: list[int]
    steps: list[tuple[float, int]]  # time [ms] and drafted tokens of each burst after the first

    def until(self, n_bursts: int) -> Run:
        """What it was after so many bursts."""
        bursts, steps = self.bursts[:n_bursts], self.steps[: max(n_bursts - 1, 0)]
        taken = [burst - 1 for burst in bursts[1:]]
        positions = range(len(self.drafted_at))
        return replace(
            self, bursts=bursts, steps=steps, n_predicted=sum(bursts),
            predicted_ms=max(sum(ms for ms, _ in steps), 0.001),
            drafted_at=[sum(at < drafted for _, drafted in steps) for at in positions],
            accepted_at=[sum(at < one for one in taken) for at in positions],
        )  # fmt: skip

    @property
    def n_drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def n_accepted(self) -> int:
        return sum(self.accepted_at)


def simulate(
    behaviour: Behaviour,
    *,
    n_prompt: int,
    n_cached: int,
    n_predict: int,
    n_max: int,
    p_min: float,
    slowdown: float,
    seed: int,
) -> Run:
    """Draft, gate and accept token by token; a step yields its accepted tokens and one more.

    A draft token's confidence is r ** 0.25 of a uniform r (mean 0.8); drafting ends at the first
    one below `p_min`. It is accepted with probability `acceptance` at mean confidence, more above
    and less below.
    """
    rng = random.Random(seed)  # a simulation that must repeat itself
    step_ms = 1000.0 / behaviour.tg_tok_s * slowdown
    is_on = n_max > 0
    pp_tok_s = behaviour.pp_tok_s * ((1.0 - behaviour.prefill_tax) if is_on else 1.0)
    drafted_at, accepted_at = [0] * n_max, [0] * n_max
    bursts, produced = ([1] if n_predict else []), min(1, n_predict)
    steps: list[tuple[float, int]] = []
    while produced < n_predict:
        confidences: list[float] = []
        n_tried = 0
        for _ in range(min(n_max, n_predict - produced - 1)):
            confidence = rng.random() ** 0.25
            n_tried += 1
            if confidence < p_min:
                break
            confidences.append(confidence)
        n_taken = 0
        for confidence in confidences:
            if rng.random() >= behaviour.acceptance + 0.8 * (confidence - 0.8):
                break
            n_taken += 1
        for position in range(len(confidences)):
            drafted_at[position] += 1
            accepted_at[position] += position < n_taken
        cost = 1.0 + behaviour.draft_cost * n_tried + 0.05 * len(confidences)
        steps.append((step_ms * cost, len(confidences)))
        bursts.append(n_taken + 1)
        produced += n_taken + 1
    return Run(
        n_prompt=n_prompt,
        n_cached=n_cached,
        n_predicted=produced,
        prompt_ms=1000.0 * (n_prompt - n_cached) / pp_tok_s * slowdown,
        predicted_ms=max(sum(ms for ms, _ in steps), 0.001),
        drafted_at=drafted_at,
        accepted_at=accepted_at,
        bursts=bursts,
        steps=steps,
    )


@dataclass
class Totals:
    """What `/metrics` counts."""

    n_prompt: int = 0
    n_cached: int = 0
    prompt_s: float = 0.0
    n_predicted: int = 0
    predicted_s: float = 0.0
    drafted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def add(self, run: Run) -> None:
        self.n_prompt += run.n_prompt - run.n_cached
        self.n_cached += run.n_cached
        self.prompt_s += run.prompt_ms / 1000
        self.n_predicted += run.n_predicted
        self.predicted_s += run.predicted_ms / 1000
        self.drafted += run.n_drafted
        both = zip_longest(self.accepted_at, run.accepted_at, fillvalue=0)
        self.accepted_at = [before + more for before, more in both]


class Slot:
    """One slot: what it works on and what it remembers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_busy = False
        self.tokens: list[int] = []
        self.checkpoints: list[int] = []


class Engine:
    """The model behind the HTTP routes: slots, queue, tokens, totals."""

    def __init__(
        self, behaviour: Behaviour, arguments: Arguments, log: Log, record: Record
    ) -> None:
        self.behaviour = behaviour
        self.arguments = arguments
        self.log = log
        self.record = record
        default_slots = 1 if behaviour.is_ik else 4
        n_slots = arguments.whole("n_slots", default_slots)
        self.slots = [Slot(number) for number in range(n_slots if n_slots > 0 else default_slots)]
        self.n_ctx = -(-(arguments.whole("n_ctx", 0) or 4096) // 256) * 256
        self.totals = Totals()

        self.n_completions = 0
        self.n_waiting = 0
        self.is_stopping = False
        self.passes: Callable[[float], object] = lambda _seconds: None
        self.asked_s = time.monotonic()
        self._turn = threading.Condition()
        self._queue: list[int] = []
        self._next_task = 0

    @property
    def alias(self) -> str:
        model = self.arguments.facts.get("model", "")
        return self.behaviour.alias or self.arguments.facts.get("alias", "").split(",")[0] or model

    @property
    def is_speculative(self) -> bool:
        asked = self.arguments.facts["speculative"] == "on"
        return asked and self.behaviour.speculation_works

    @property
    def n_max(self) -> int:
        default = 3 if self.behaviour.dialect == "main-0x" else 16
        return self.arguments.whole("n_max", default) if self.is_speculative else 0

    def tokenize(self, text: str) -> list[int]:
        """One token per word with the space before it; the same piece is always the same token."""
        pieces = re.findall(r"\s?\S+|\s", text)
        return [1000 + zlib.crc32(piece.encode()) % (N_VOCAB - 1000) for piece in pieces]

    @property
    def n_busy(self) -> int:
        return sum(slot.is_busy for slot in self.slots)

    @property
    def is_asleep(self) -> bool:
        """Whether it has unloaded its model, since nobody asked it for so long."""
        if self.n_busy or self.n_waiting:
            self.asked_s = time.monotonic()
        after_s = self.arguments.number("sleep_s", -1)
        return after_s > 0 and time.monotonic() - self.asked_s >= after_s

    def touch(self) -> None:
        """Somebody asks for what needs the model."""
        if self.is_asleep:
            self.record.add("wake")
            time.sleep(self.behaviour.load_s)
        self.asked_s = time.monotonic()

    def take_slot(self, is_gone: Callable[[], bool]) -> tuple[Slot, int]:
        """Wait for a free slot, first come first served."""
        with self._turn:
            task = self._next_task
            self._next_task += 1
            self._queue.append(task)
            self.n_waiting += 1
            try:
                while self._queue[0] != task or self.n_busy == len(self.slots):
                    self._turn.wait(POLL_S)
                    if is_gone():
                        raise ClientGoneError
            finally:
                self._queue.remove(task)
                self.n_waiting -= 1
                self._turn.notify_all()
            slot = next(slot for slot in self.slots if not slot.is_busy)
            slot.is_busy = True
            return slot, task

    def free_slot(self, slot: Slot) -> None:
        with self._turn:
            slot.is_busy = False
            self.asked_s = time.monotonic()
            self._turn.notify_all()

    def next_reply_kind(self) -> str:
        """How the next completion is to be answered; counts it."""
        told = self.behaviour.reply
        number = self.n_completions
        self.n_completions += 1
        return told if isinstance(told, str) else told[min(number, len(told) - 1)]

    def plan(self, body: dict[str, Any], tokens: list[int], slot: Slot) -> Run:
        """What this request will take: decided before the first token."""
        limit = body.get("n_predict", body.get("max_tokens", -1))
        served = self.arguments.whole("n_predict", -1)
        n_predict = limit if isinstance(limit, int) and limit >= 0 else served
        n_predict = min(n_predict if n_predict >= 0 else 64, self.n_ctx - len(tokens))
        slowdown = 1.0 + self.behaviour.decay_per_request * (self.n_completions - 1)
        n_max, p_min = self._speculation(body)
        run = simulate(
            self.behaviour,
            n_prompt=len(tokens),
            n_cached=self._n_cached(body, tokens, slot),
            n_predict=n_predict,
            n_max=n_max,
            p_min=p_min,
            slowdown=slowdown,
            seed=zlib.crc32(repr((1, body.get("seed"), tokens)).encode()),
        )
        known = (self.behaviour.by_length or {}).get(str(n_predict))
        if known is not None:
            wanted_ms = (n_predict - 1) / known[1] * 1000
            run.steps = [(ms * wanted_ms / run.predicted_ms, n) for ms, n in run.steps]
            run.prompt_ms, run.predicted_ms = known[0], wanted_ms
        return run

    def _n_cached(self, body: dict[str, Any], tokens: list[int], slot: Slot) -> int:
        """Tokens of the common beginning; at least one is always processed again."""
        if body.get("cache_prompt", True) is False and not self.behaviour.finds_all_cached:
            return 0
        pairs = enumerate(zip(slot.tokens, tokens, strict=False))
        shorter = min(len(slot.tokens), len(tokens))
        n_common = next((at for at, (before, now) in pairs if before != now), shorter)
        told = self.behaviour
        is_longer = n_common == len(slot.tokens) < len(tokens)
        if told.finds_all_cached or not told.is_recurrent or is_longer:
            return min(n_common, len(tokens) - 1)
        return max((at for at in slot.checkpoints if at <= n_common), default=0)

    def note_checkpoints(self, slot: Slot, run: Run) -> None:
        """A recurrent model, as the designed ones are, can be taken back to these alone.

        As seen: mainline makes one a batch before the end of a prompt and one at its end, and drops those
        of before that lie near; ik makes one at the end and one every 2048 tokens.
        """
        end, found = max(run.n_prompt - 4, 0), run.n_cached
        kept = [at for at in slot.checkpoints if at <= found]
        if self.behaviour.is_ik:
            slot.checkpoints = [*kept, *range(found + 2048, end, 2048), end]
            return
        far = [at for number, at in enumerate(kept) if not number or at - kept[number - 1] >= 8192]
        first = max(found, end - self.arguments.whole("n_ubatch", 512))
        slot.checkpoints = sorted({*far, first, end} - {0})

    def _speculation(self, body: dict[str, Any]) -> tuple[int, float]:
        """n-max and p-min of this request: only ik lets a request say otherwise."""
        n_max, is_ik = self.n_max, self.behaviour.is_ik
        p_min = self.arguments.number("p_min", 0.75 if is_ik else 0.0)
        if not is_ik or self.behaviour.ignores_overrides or n_max == 0:
            return n_max, p_min
        nested = body.get("speculative")
        own = dict(nested) if isinstance(nested, dict) else {}
        own |= {key[12:]: body[key] for key in body if key.startswith("speculative.")}
        if int(own.get("n_max", 0)) > n_max:
            text = (
                f"n_max={own['n_max']} exceeds the recurrent speculative startup limit of {n_max}"
            )
            raise HttpError(400, "invalid_request_error", f"Error: speculative {text}")
        return int(own.get("n_max", n_max)), float(own.get("p_min", p_min))

    def words(self, n_tokens: int, seed: int) -> list[str]:
        """The pieces of an answer, in an order that does not come again unless it is meant to."""
        rng, begin = random.Random(seed), self.behaviour.loops_from
        words = [f" {rng.choice(_WORDS)}" for _ in range(n_tokens)]
        if begin is None:
            return words
        sane = words[: max(int(begin * n_tokens), _LOOP_WORDS)]
        return (sane + sane[-_LOOP_WORDS:] * n_tokens)[:n_tokens]

    def timings(self, run: Run) -> dict[str, Any]:
        """The `timings` object of this dialect."""
        found: dict[str, Any] = {
            "prompt_n": run.n_prompt - run.n_cached,
            "prompt_ms": max(run.prompt_ms, 0.001),
            "predicted_n": run.n_predicted,
            "predicted_ms": run.predicted_ms,
        }
        if self.behaviour.is_ik:
            found["n_past"] = run.n_prompt + max(run.n_predicted - 1, 0)
        else:
            found["cache_n"] = run.n_cached
        if run.n_drafted:
            found |= {"draft_n": run.n_drafted, "draft_n_accepted": run.n_accepted}
            if self.behaviour.is_ik:
                found["draft_by_depth"] = [
                    {"depth": depth, "draft_n": drafted, "draft_n_accepted": accepted}
                    for depth, (drafted, accepted) in enumerate(
                        zip(run.drafted_at, run.accepted_at, strict=True), start=1
                    )
                ]
        return found

    def told_timings(self, run: Run) -> Any:
        """What a client is told of them: the truth, unless it is meant to hear something else."""
        true, told = self.timings(run), self.behaviour.told_timings
        if told is None:
            return true
        return true | told if isinstance(told, dict) else told

    def log_run(self, slot: Slot, task: int, run: Run) -> None:
        """The engine's own account of a finished request."""
        n_prompt, prompt_ms = run.n_prompt - run.n_cached, max(run.prompt_ms, 0.001)
        counted = max(run.n_predicted - (self.behaviour.dialect == "main-0x"), 0)

        def row(name: str, ms: float, n_tokens: int, counted: int) -> str:
            rates = f"{ms / max(counted, 1):8.2f} ms per token, "
            rates += f"{1000 * counted / ms:8.2f} tokens per second"
            return f"{name} time = {ms:10.2f} ms / {n_tokens:5d} tokens ({rates})"

        total = f"{prompt_ms + run.predicted_ms:10.2f} ms / {n_prompt + run.n_predicted:5d} tokens"
        lines = [
            row("prompt eval", prompt_ms, n_prompt, n_prompt),
            row("       eval", run.predicted_ms, run.n_predicted, counted),
            f"      total time = {total}",
        ]
        if run.n_drafted:
            ratio = run.n_accepted / run.n_drafted
            counts = f"({run.n_accepted:5d} accepted / {run.n_drafted:5d} generated)"
            name = "acceptance" if self.behaviour.dialect == "main-0x" else "acceptance rate"
            mean = 1 + run.n_accepted / max(run.drafted_at[0], 1)
            more = f", mean len = {mean:5.2f}" if name == "acceptance" else ""
            lines.append(f"draft {name} = {ratio:.5f} {counts}{more}")
        head = f"slot print_timing: id {slot.number:2d} | task {task} | "
        if self.behaviour.is_ik:
            self.log("\n".join([head, *lines]))
            return
        for line in lines:
            self.log(f"I {head}{line}")
        self.log(
            f"I slot      release: id {slot.number:2d} | task {task} | stop processing: "
            f"n_tokens = {run.n_prompt + run.n_predicted - 1}, truncated = 0"
        )
