"""Two simulated servers to compare: restarts, requests, texts, tails, heat and drift as noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.simulator.box import Noise, normal
from tunerd.measure.pairs import Asked, BootFailed, LifeEnded, Side, Turn, Unusable

PROMPT_TOK_S = 800.0
DECODE_TOK_S = 60.0
_DRIFT_PERIOD_S = 5400.0


@dataclass(frozen=True)
class Scene:
    """A kind of night.

    `gain`: by how much B is faster. `first_life_slow`: a share by which the very first process is
    slower (cold files, cold card). `trend`: what the box loses an hour. `regimes`: a share by which the
    box is slower half of the time, in stretches of `regime_s`. `slow_starts`: a share of B's starts that
    take `slow` times as long as its others; the gain is of their mean. `lasts`: how much of the luck of a start the
    next start of the same side has.
    """

    name: str
    noise: Noise
    gain: float = 0.0
    first_life_slow: float = 0.0
    trend: float = 0.0
    regimes: float = 0.0
    regime_s: float = 900.0
    student_tails: bool = False
    slow_starts: float = 0.0
    slow: float = 1.15
    lasts: float = 0.0


USUAL = Noise(text=0.035)
QUIET = replace(USUAL, process=0.007, request=0.005, pairing=0.005, tail=0.0)
SCENES = (
    Scene("usual noise", USUAL),
    Scene("restarts twice as noisy", replace(USUAL, process=0.054)),
    Scene("hardly any noise but of restarts", replace(USUAL, request=0.001, pairing=0.0, tail=0.0)),
    Scene(
        "heavy tails: 10 % of requests up to 60 % slower", replace(USUAL, tail_share=0.10, tail=0.6)
    ),
    Scene("restarts with Student's t, 3 degrees", USUAL, student_tails=True),
    Scene("drift: 5 % slower each hour", USUAL, trend=0.05),
    Scene("heat of 8 %, and a slow first process", replace(USUAL, heat=0.08), first_life_slow=0.15),
    Scene("two regimes, 10 % apart, 15 minutes each", USUAL, regimes=0.10),
    Scene("luck of a start that lasts by half", USUAL, lasts=0.5),
    Scene("a quiet box, one start of ten 15 % slow", QUIET, slow_starts=0.10),
    Scene("a quiet box, three starts of ten 15 % slow", QUIET, slow_starts=0.30),
    Scene("a quiet box, one start of ten twice as slow", QUIET, slow_starts=0.10, slow=2.0),
    Scene("a quiet box, one start of ten three times as slow", QUIET, slow_starts=0.10, slow=3.0),
)


@dataclass
class SimulatedStand:
    """Runs in simulated time."""

    scene: Scene
    seed: int
    load_s: tuple[float, float] = (26.0, 38.0)
    clock_s: float = 0.0
    n_boots: int = 0
    fails: dict[str, int] = field(default_factory=dict)
    disturbed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 4711])
        self._luck: dict[Side, float] = {}
        self._phase = float(self.rng.uniform(0, 2 * math.pi))
        self._regime_at = float(self.rng.uniform(0, 2 * self.scene.regime_s))

    def now_s(self) -> float:
        return self.clock_s

    def boot(self, side: Side) -> SimulatedLife:
        self.n_boots += 1
        self.clock_s += float(self.rng.uniform(*self.load_s)) + 3.0
        if self.fails.get(side, 0) > 0:
            self.fails[side] -= 1
            raise BootFailed("out of memory")
        noise, scene = self.scene.noise, self.scene
        fresh = float(
            self.rng.standard_t(3) / math.sqrt(3) if scene.student_tails else self.rng.normal()
        )
        before = self._luck.get(side, fresh)
        luck = scene.lasts * before + math.sqrt(1 - scene.lasts**2) * fresh
        self._luck[side] = luck
        factor = math.exp(noise.process * luck)
        if side == "B" and scene.slow_starts:
            is_slow = self.rng.random() < scene.slow_starts
            factor *= math.pow(scene.slow, is_slow - scene.slow_starts)
        if self.n_boots == 1:
            factor *= 1 + self.scene.first_life_slow
        return SimulatedLife(self, side, factor)

    def weather(self) -> float:
        """What the time does to every request."""
        noise, hours = self.scene.noise, self.clock_s / 3600
        heat = noise.heat * (1 - math.exp(-self.clock_s / noise.heat_s))
        drift = noise.drift * math.sin(2 * math.pi * self.clock_s / _DRIFT_PERIOD_S + self._phase)
        stretch = int((self.clock_s + self._regime_at) // self.scene.regime_s)
        regime = self.scene.regimes if stretch % 2 else 0.0
        return (1 + heat) * (1 + drift) * (1 + regime) * math.pow(1 + self.scene.trend, hours)


@dataclass
class SimulatedLife:
    stand: SimulatedStand
    side: Side
    factor: float
    is_open: bool = True

    def request(self, asked: Asked) -> Turn:
        if not self.is_open:
            raise LifeEnded("closed")
        one, noise, rng = asked.request_class, self.stand.scene.noise, self.stand.rng
        text = normal(f"{self.stand.seed} {asked.block} {asked.class_index} {asked.attempt}")
        pairing = normal(f"{self.stand.seed} {asked.block} {asked.class_index} {self.side}")
        slow = math.exp(
            noise.text * text + noise.pairing * pairing + noise.request * float(rng.normal())
        )
        if rng.random() < noise.tail_share:
            slow *= 1 + noise.tail * float(rng.random())
        slow *= self.factor * self.stand.weather()
        if self.side == "B":
            slow /= 1 + self.stand.scene.gain
        prefill_ms = 1000 * one.new_tokens / PROMPT_TOK_S * slow
        wall_ms = prefill_ms + 1000 * one.n_predict / DECODE_TOK_S * slow
        self.stand.clock_s += wall_ms / 1000
        return Turn(wall_ms, prefill_ms)

    def check(self) -> None:
        if self.stand.disturbed > 0:
            self.stand.disturbed -= 1
            raise Unusable("somebody else was served")

    def close(self) -> None:
        self.is_open = False
