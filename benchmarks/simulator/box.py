"""A simulated box behind the sweep's protocol, and the truth that only the benchmark may ask."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.cards import Card, Engine, Spec
from benchmarks.simulator.text import N_POSITIONS, TEXT_SD
from tunerd.profile.arm import Arm, Boot, Refused, Request, ServerDied
from tunerd.profile.workload import RequestClass, Workload

Array = NDArray[np.float64]

_CUDA_MIB = 340.0
_HOST_SLOW = 0.04  # of a step, for each thread beyond the physical cores
_TRUTH_TEXTS = 20
_TRUTH_STEPS = 200
_STEPS_SIMULATED = 160
_OVERHEAD_MS = 6.0
_TILE = 1 / 96  # share of the experts that moves as one
# What a recurrent model can go back to, in tokens: seen on real builds with the designed one.
_CHECKPOINT_BEFORE_END = 4
_IK_CHECKPOINT_EVERY = 2048
_MAINLINE_CHECKPOINTS_APART = 8192


@dataclass(frozen=True)
class Noise:
    """Spreads as ratios; `heat` is gained with a time constant of `heat_s`."""

    process: float = 0.027
    request: float = 0.015
    pairing: float = 0.016
    text: float = 0.02
    tail_share: float = 0.025
    tail: float = 0.12
    heat: float = 0.015
    heat_s: float = 1080.0
    drift: float = 0.007
    vram_mib: float = 30.0
    hang: float = 0.002
    crash: float = 0.004
    tokens: float = (
        0.013  # by which all texts of a night are longer or shorter than they were asked to be
    )

    def weather(self, now_s: float, phase: float = 0.0) -> float:
        """Heat and slow drift, as a ratio."""
        heat = self.heat * (1 - math.exp(-now_s / self.heat_s))
        return 1 + heat + self.drift * math.sin(now_s / 7200 + phase)


QUIET = Noise(0, 0, 0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 0)


@dataclass
class Life:
    """One process."""

    arm: Arm
    factor: float
    jitter_mib: float
    checkpoints: tuple[int, ...] = ()

    def reuse(self, request: Request) -> int:
        """Tokens of the shared prefix that are found again; leaves what the next request may find.

        All published models are recurrent: they go back to a checkpoint or begin anew. mainline makes one
        a batch before the end of a prompt and one at its end, and drops what it had near them; ik makes one
        at the end and one every 2048 tokens.
        """
        shared = request.cached_tokens
        found = max((at for at in self.checkpoints if at <= shared), default=0)
        kept = [at for at in self.checkpoints if at <= found]
        end = shared + request.new_tokens - _CHECKPOINT_BEFORE_END
        if self.arm.engine == "ik":
            made = [*range(found + _IK_CHECKPOINT_EVERY, end, _IK_CHECKPOINT_EVERY), end]
        else:
            kept = [at for n, at in enumerate(kept)
                    if not n or at - kept[n - 1] >= _MAINLINE_CHECKPOINTS_APART]  # fmt: skip
            made = [max(found, end - self.arm.ubatch), end]
        self.checkpoints = tuple(sorted({*kept, *(at for at in made if 0 < at <= shared)}))
        return found


class Timed:
    """A box in simulated time; `now` says how much of it has passed."""

    _now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def check(self) -> None:
        pass


@dataclass
class SimulatedBox(Timed):
    """Answers as a card of these coefficients would, with noise."""

    card: Card
    noise: Noise = field(default_factory=Noise)
    seed: int = 0
    tells_steps: bool = True
    takes_overrides: bool = True
    hang_s: float = 180.0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng([self.seed, self.card.seed, 77])
        self._life: Life | None = None
        self._phase = float(self._rng.uniform(0, 2 * math.pi))
        self.n_restarts = 0
        self.n_failures = 0
        self.per_request = frozenset(
            name
            for name, engine in self.card.engines.items()
            if engine.takes_overrides and self.takes_overrides
        )
        self.truth = Truth(self.card)

    # The protocol

    def restart(self, arm: Arm) -> Boot:
        begin = self._now
        self.n_restarts += 1
        self._life = None
        low, high = self.card.load_s
        load = float(self._rng.uniform(low, high))
        chance = float(self._rng.random())
        failure = ""
        jitter = float(self._rng.normal(0.0, self.noise.vram_mib))
        free = self.truth.free_mib(arm, 0.0) + jitter
        if self.truth.engine(arm) is None:
            failure, load = "refused", 1.5
        elif free < -self.card.spills_mib:
            failure, load = "oom", load * 0.6
        elif chance < self.noise.hang:
            failure, load = "hang", self.hang_s
        elif chance < self.noise.hang + self.noise.crash:
            failure, load = "crash", load * 0.4
        self._now += load
        if failure:
            self.n_failures += 1
            return Boot(False, self._now - begin, failure, None)
        factor = math.exp(float(self._rng.normal(0.0, self.noise.process)))
        self._life = Life(arm, factor, jitter)
        return Boot(True, self._now - begin, "", int(max(free, 0.0)), self.card.context)

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        life = self._life
        if life is None:
            raise ServerDied("crash")
        running = life.arm
        if arm is not None:
            if running.engine not in self.per_request or arm.n_max > running.n_max:
                raise Refused
            running = running.with_draft(arm.n_max, arm.p_min)
        longer = math.exp(self.noise.tokens * _normal(self.card.name, str(self.seed), "tokens"))
        request = replace(request, new_tokens=round(request.new_tokens * longer))
        total = request.cached_tokens + request.new_tokens
        if total + request.n_predict > self.card.context:
            raise Refused("the request exceeds the context", total)
        warm = life.reuse(request)
        share = min((total + request.n_predict) / self.card.context, 1.0)
        free = self.truth.free_mib(life.arm, share) + life.jitter_mib
        if free < -self.card.spills_mib:
            self._life = None
            self._now += 5.0
            self.n_failures += 1
            raise ServerDied("oom")
        return self._answer(request, running, life, warm, total, free)

    def _answer(
        self, request: Request, arm: Arm, life: Life, warm: int, total: int, free: float
    ) -> Mapping[str, Any]:
        noise, truth = self.noise, self.truth
        text = _normal(request.prompt_id, request.kind)
        drafted, accepted, steps, step_ms = self._decode(request, arm, text, life)
        factor = life.factor * noise.weather(self._now, self._phase)
        factor *= math.exp(noise.text * _normal(request.prompt_id, "speed"))
        factor *= math.exp(noise.pairing * _normal(request.prompt_id, str(arm)))
        factor *= math.exp(float(self._rng.normal(0.0, noise.request)))
        if self._rng.random() < noise.tail_share:
            factor *= 1 + float(self._rng.uniform(0.0, noise.tail))
        spill = max(-free, 0.0)
        slow = 1 + self.card.spill_ms_share * spill / 1024
        n_new = total - warm
        slower = math.pow(max(request.concurrency, 1), 0.6)
        prompt_ms = truth.prompt_ms(life.arm, n_new, warm) * factor * slow * slower
        predicted_ms = step_ms * factor * slow * slower
        wall_ms = prompt_ms + predicted_ms + _OVERHEAD_MS
        self._now += wall_ms / 1000
        answer: dict[str, Any] = {
            "cache_n": warm, "prompt_n": n_new, "prompt_ms": prompt_ms,
            "predicted_n": request.n_predict, "predicted_ms": predicted_ms, "wall_ms": wall_ms,
            "vram_free_min_mib": int(max(free, 0.0)),
        }  # fmt: skip
        if drafted:
            answer |= {"draft_n": drafted, "draft_n_accepted": accepted}
            if self.tells_steps:
                factor = predicted_ms / sum(ms for ms, _, _ in steps)
                answer["steps"] = [(ms * factor, *counts) for ms, *counts in steps]
        if self.card.spills_mib:
            answer["spill_mib"] = spill
        if request.kind == "tool":
            answer["tool_ok"] = bool(self._rng.random() >= truth.tool_breakage(arm))
        return answer

    def _decode(
        self, request: Request, arm: Arm, text: float, life: Life
    ) -> tuple[int, int, list[tuple[float, int, int]], float]:
        """Tokens drafted and accepted, each step, and the time of all [ms]."""
        truth = self.truth
        depth = (request.cached_tokens + request.new_tokens + request.n_predict / 2) / 1000
        by_length = truth.step_ms(arm, life.arm, depth)
        n_left = max(request.n_predict - 1, 1)  # the first token comes of the prompt
        if not arm.drafts:
            return 0, 0, [], float(by_length[0]) * n_left
        drafter = truth.spec(arm).drafter
        n_steps = min(n_left, _STEPS_SIMULATED)
        shift = TEXT_SD * text - drafter.tired(request.n_predict)
        right, confidence = drafter.lengths(request.kind, shift, n_steps, self._rng)
        drafted, accepted = drafter.drafted_and_accepted(right, confidence, arm.p_min)
        drafted = np.minimum(drafted, arm.n_max)
        accepted = np.minimum(accepted, arm.n_max)
        tokens = np.cumsum(accepted + 1)
        last = int(np.searchsorted(tokens, n_left))
        used = min(last + 1, n_steps)
        scale = n_left / float(tokens[used - 1])
        steps = max(1, round(used * scale))
        time = float(by_length[drafted[:used]].sum()) * scale
        n_accepted = max(n_left - steps, 0)
        each = list(zip(by_length[drafted[:used]].tolist(), drafted[:used].tolist(),
                        accepted[:used].tolist(), strict=True))  # fmt: skip
        told = (each * math.ceil(steps / used))[:steps]
        return round(float(drafted[:used].sum()) * scale), n_accepted, told, time


class Truth:
    """What a box would do on average, without noise."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._tables: dict[tuple[str, str, str, float, float], Array] = {}
        self._draws: dict[tuple[str, str, str, float], list[tuple[Any, Any]]] = {}

    def engine(self, arm: Arm) -> Engine | None:
        engine = self.card.engines.get(arm.engine)
        return engine if engine is not None and arm.spec in engine.specs else None

    def spec(self, arm: Arm) -> Spec:
        return self.card.engines[arm.engine].specs[arm.spec]

    # Memory

    def _seen_mib(self, arm: Arm) -> float:
        card, spec = self.card, self.spec(arm)
        n = arm.n_max if arm.drafts else 0
        return (
            card.dense_mib + card.kv_mib[arm.kv] + card.compute_mib
            + card.compute_per_512_mib * arm.ubatch / 512 + spec.fixed_mib
            + spec.seen_per_draft_mib * n
        )  # fmt: skip

    def share_on_card(self, arm: Arm) -> float:
        """Share of the weights that fit left on the card."""
        card = self.card
        room = card.vram_mib - card.others_mib - _CUDA_MIB - arm.fit_mib - self._seen_mib(arm)
        if card.experts_mib:
            return min(max(math.floor(room / card.experts_mib / _TILE) * _TILE, 0.0), 1.0)
        return 1.0 if room >= 0 else max(1.0 + room / card.dense_mib, 0.0)

    def free_mib(self, arm: Arm, share: float) -> float:
        """VRAM left free at a share of the context; negative is missing."""
        card = self.card
        if self.engine(arm) is None:
            return 0.0
        engine, spec = self.card.engines[arm.engine], self.spec(arm)
        on_card = self.share_on_card(arm)
        weights = on_card * card.experts_mib
        if not card.experts_mib:
            weights = -(1 - on_card) * card.dense_mib
        n = arm.n_max if arm.drafts else 0
        width = math.sqrt(arm.ubatch / 512)
        unseen = (
            engine.unseen_mib * width + spec.unseen_mib + spec.unseen_per_draft_mib * n
            + engine.growth_mib * (0.7 + 0.3 * width) * share
        )  # fmt: skip
        used = card.others_mib + _CUDA_MIB + self._seen_mib(arm) + weights + unseen
        return card.vram_mib - used

    def headroom_mib(self, arm: Arm) -> float:
        """VRAM left free with the context full."""
        return self.free_mib(arm, 1.0)

    # Time

    def _host(self, arm: Arm) -> float:
        cores = self.card.cores
        if arm.threads <= cores:
            return math.pow(cores / max(arm.threads, 1), 0.75)
        return 1 + _HOST_SLOW * (arm.threads - cores)

    def _quirk(self, arm: Arm) -> float:
        name = f"{self.card.seed}/{arm.engine}/{arm.spec}/{arm.n_max}/{arm.ubatch}/{arm.kv}"
        return math.exp(self.card.quirk_sd * _normal(name, "quirk"))

    def step_ms(self, arm: Arm, started: Arm, depth_k: float) -> Array:
        """Time of a step that drafts 0, 1, ... tokens."""
        engine, spec, card = self.card.engines[arm.engine], self.spec(arm), self.card
        length = np.arange(N_POSITIONS + 1)
        batch = length + 1.0
        share = self.share_on_card(started)
        touched = batch**engine.reuse
        time = engine.base_ms + engine.expert_gpu_ms * share * touched
        time = time + engine.expert_cpu_ms * (1 - share) * self._host(arm) * touched
        quantised = arm.kv != "f16"
        attention = engine.attention_ms * {"f16": 1.0, "q8_0": 1.15, "q4_0": 1.0}[arm.kv]
        time = time + depth_k * (attention + engine.convert_ms * quantised * (batch > 1))
        time = time + engine.kink_ms * np.maximum(batch - engine.kink_at, 0)
        if card.name == "24G" and arm.kv == "q8_0":
            time = time * 1.25
        if arm.drafts:
            time = time + engine.spec_overhead_ms + spec.round_ms + spec.token_ms * length
            time = time + spec.depth_ms * depth_k
        return np.asarray(time * self._quirk(arm), float)

    def prompt_ms(self, arm: Arm, n_tokens: int, depth: int) -> float:
        """Time to read so many tokens behind so many."""
        engine, spec = self.card.engines[arm.engine], self.spec(arm)
        ubatch = min(arm.ubatch, arm.batch)
        batches = math.ceil(n_tokens / ubatch)
        share = self.share_on_card(arm)
        per_batch = engine.prompt_batch_ms + engine.pcie_ms * (1 - share)
        middle = (depth + n_tokens / 2) / 1000
        time = batches * per_batch
        time += n_tokens * (engine.prompt_token_ms + engine.prompt_depth_ms * middle)
        return time * spec.prefill_tax * self._quirk(arm)

    def _table(self, arm: Arm, kind: str, n_predict: int) -> Array:
        """Histograms of (drafted, accepted) by text: shape (texts, 17, 17), for unlimited drafts."""
        tired = self.spec(arm).drafter.tired(n_predict)
        key = (arm.engine, arm.spec, kind, arm.p_min, round(tired, 3))
        if key not in self._tables:
            drafter = self.spec(arm).drafter
            draws = self._drawn(arm, kind, tired)
            table = np.zeros((len(draws), N_POSITIONS + 1, N_POSITIONS + 1))
            for row, (right, confidence) in enumerate(draws):
                drafted, accepted = drafter.drafted_and_accepted(right, confidence, arm.p_min)
                np.add.at(table[row], (drafted, accepted), 1.0 / len(drafted))
            self._tables[key] = table
        return self._tables[key]

    def _drawn(self, arm: Arm, kind: str, tired: float) -> list[tuple[Any, Any]]:
        key = (arm.engine, arm.spec, kind, round(tired, 3))
        if key not in self._draws:
            rng = np.random.default_rng([self.card.seed, 5, sum(kind.encode())])
            shifts = TEXT_SD * np.linspace(-1.8, 1.8, _TRUTH_TEXTS)
            drafter = self.spec(arm).drafter
            self._draws[key] = [
                drafter.lengths(kind, float(shift) - tired, _TRUTH_STEPS, rng) for shift in shifts
            ]
        return self._draws[key]

    def class_ms(self, arm: Arm, one: RequestClass) -> float:
        """Expected turn time of one class."""
        depth = (one.cached_tokens + one.new_tokens + one.n_predict / 2) / 1000
        by_length = self.step_ms(arm, arm, depth)
        slower = math.pow(max(one.concurrency, 1), 0.6)
        prompt = self.prompt_ms(arm, one.new_tokens, one.cached_tokens)
        if not arm.drafts:
            decode = float(by_length[0]) * (one.n_predict - 1)
        else:
            table = self._table(arm, one.kind, one.n_predict)
            limit = np.minimum(np.arange(N_POSITIONS + 1), arm.n_max)
            time = (table.sum(axis=2) * by_length[limit]).sum(axis=1)
            accepted = (table.sum(axis=1) * limit).sum(axis=1)
            weights = np.exp(-(np.linspace(-1.8, 1.8, len(time)) ** 2) / 2)
            decode = float(np.average((one.n_predict - 1) * time / (1 + accepted), weights=weights))
        return (prompt + decode) * slower + _OVERHEAD_MS

    def acceptance(self, arm: Arm, kind: str, n_predict: int) -> float:
        """Accepted tokens as a share of drafted ones."""
        table = self._table(arm, kind, n_predict).mean(axis=0)
        limit = np.minimum(np.arange(N_POSITIONS + 1), arm.n_max)
        return float((table.sum(axis=0) * limit).sum() / (table.sum(axis=1) * limit).sum())

    def turn_ms(self, arm: Arm, workload: Workload) -> float:
        """Expected turn time of the workload."""
        return workload.turn_time_s([self.class_ms(arm, one) for one in workload.classes])

    def tool_breakage(self, arm: Arm) -> float:
        """Chance that a tool call breaks."""
        return max(self.card.kv_breaks_tools.get(arm.kv, 0.0), self.spec(arm).breaks_tools)

    def is_feasible(self, arm: Arm) -> bool:
        """Whether it would run with the context full, without spilling, tools intact."""
        return (
            self.engine(arm) is not None
            and self.headroom_mib(arm) > 0
            and self.tool_breakage(arm) == 0
        )


def normal(name: str) -> float:
    """A normal deviate that belongs to a name, on boxes that are no model of one."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return float(np.random.default_rng(int.from_bytes(digest, "little")).normal())


def _normal(*names: str) -> float:
    """A standard normal that belongs to these names."""
    digest = hashlib.blake2b("/".join(names).encode(), digest_size=8).digest()
    first, second = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")
    radius = math.sqrt(-2 * math.log((first + 1) / 2**32))
    return radius * math.cos(2 * math.pi * second / 2**32)
