"""A box that replays what others published of theirs, with the noise that starts and requests have.

A surface is a table of cells, one for each arm that its author measured; `tests/data/surfaces` has them
with their sources. Where an arm is not in the table, the box does not start it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulator.box import Noise, Timed, normal
from tunerd.profile.arm import Arm, Boot, Family, Refused, Request, ServerDied, Space
from tunerd.profile.workload import RequestClass, Workload

_FOLDER = Path(__file__).parents[2] / "tests/data/surfaces"
_CONTEXT_TOKENS = 49152
_LOAD_S = (26.0, 38.0)
_REFUSED_S = 1.5
_HANG_S = 180.0
_FIT_MIB, _UBATCH, _BATCH, _THREADS = 1024, 512, 2048, 8
# Speed of a prompt that nobody published, for what is no class: a fill, a warm-up.
_PROMPT_TOK_S = 1000.0


@dataclass(frozen=True)
class Cell:
    """One arm as published: by class decode speed, speed of the prompt, (drafted, accepted) if told."""

    arm: Arm
    tok_s: tuple[float, ...]
    prompt_tok_s: tuple[float, ...]
    drafts: tuple[tuple[float, float], ...] | None
    failure: str

    def turn_ms(self, at: int, one: RequestClass) -> float:
        """Published time of one class."""
        return 1000 * (one.new_tokens / self.prompt_tok_s[at] + one.n_predict / self.tok_s[at])


@dataclass(frozen=True)
class Surface:
    """One published table."""

    name: str
    cells: tuple[Cell, ...]
    workload: Workload

    def cell(self, arm: Arm) -> Cell | None:
        """What was published of an arm."""
        return next((one for one in self.cells if one.arm == arm.canonical()), None)

    def arm(self, spec: str, n_max: int = 0, p_min: float = 0.0, **others: Any) -> Arm:
        """The arm of one cell, by what tells it from the others."""
        wanted = {"spec": spec, "n_max": n_max, "p_min": p_min, **others}
        found = [
            one.arm
            for one in self.cells
            if all(getattr(one.arm, key) == value for key, value in wanted.items())
        ]
        assert len(found) == 1, f"{self.name} has {len(found)} cells with {wanted}"
        return found[0]

    def turn_ms(self, arm: Arm) -> float:
        """Published turn time of the workload."""
        cell = self.cell(arm)
        assert cell is not None, f"{arm} was not published"
        assert not cell.failure, f"{arm} did not run: {cell.failure}"
        return self.workload.turn_time_s(
            [cell.turn_ms(at, one) for at, one in enumerate(self.workload.classes)]
        )

    @property
    def ranked(self) -> tuple[Arm, ...]:
        """Arms that ran, the fastest first."""
        return tuple(sorted((one.arm for one in self.cells if not one.failure), key=self.turn_ms))

    @property
    def best(self) -> Arm:
        """The arm with the least published turn time."""
        return self.ranked[0]

    def behind(self, arm: Arm) -> float:
        """How much longer a turn takes than with the published best (ratio)."""
        return self.turn_ms(arm) / self.turn_ms(self.best) - 1

    @property
    def space(self) -> Space:
        """Every published arm, and no other value."""
        families: dict[tuple[str, str], list[Arm]] = {}
        for cell in self.cells:
            families.setdefault(cell.arm.family, []).append(cell.arm)

        def values(arms: list[Arm], name: str) -> tuple[Any, ...]:
            return tuple(sorted({getattr(arm, name) for arm in arms}))

        return Space({
            family: Family(
                n_max=values(arms, "n_max"), p_min=values(arms, "p_min"), fit_mib=(_FIT_MIB,),
                kv=values(arms, "kv"), ubatch=(_UBATCH,), batch=(_BATCH,), threads=(_THREADS,),
            )
            for family, arms in families.items()
        })  # fmt: skip


@cache
def surfaces() -> Mapping[str, Surface]:
    """Every published table by its name."""
    found: dict[str, Surface] = {}
    for path in sorted(_FOLDER.glob("*.toml")):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        for table in data.pop("tables"):
            found[table["name"]] = _surface({**data, **table})
    return found


def _surface(given: Mapping[str, Any]) -> Surface:
    classes = tuple(
        RequestClass(1.0, one["kind"], 0, one["prompt"], one["answer"]) for one in given["classes"]
    )
    cells = tuple(_cell(given, one, classes) for one in given["cells"])
    return Surface(given["name"], cells, Workload(classes))


def _cell(
    given: Mapping[str, Any], cell: Mapping[str, Any], classes: tuple[RequestClass, ...]
) -> Cell:
    told = {"engine": "mainline", "spec": "mtp", "p_min": 0.0, "kv": "q8_0", **given, **cell}
    arm = Arm(
        told["engine"], told["spec"], int(told.get("n_max", 0)), float(told["p_min"]), _FIT_MIB,
        told["kv"], _UBATCH, _BATCH, _THREADS,
    ).canonical()  # fmt: skip
    failure = told.get("failure", "")
    tok_s = tuple(map(float, told.get("tok_s", ())))
    assert failure or len(tok_s) == len(classes), f"{given['name']}, {arm}: one figure a class"
    prompt = tuple(float(told.get("prompt_tok_s", _PROMPT_TOK_S)) for _ in tok_s)
    if "wall_s" in told:
        prompt = tuple(
            one.new_tokens / (wall_s - one.n_predict / speed)
            for one, wall_s, speed in zip(classes, told["wall_s"], tok_s, strict=True)
        )
    return Cell(arm, tok_s, prompt, _drafts(arm, told, classes), failure)


def _drafts(
    arm: Arm, told: Mapping[str, Any], classes: tuple[RequestClass, ...]
) -> tuple[tuple[float, float], ...] | None:
    """Drafted and accepted tokens of each class's answer; None where nobody told."""
    if "drafts" in told:
        return tuple((float(drafted), float(accepted)) for drafted, accepted in told["drafts"])
    if "right" not in told or not arm.drafts:
        return None
    # At p-min 0 everything is drafted; else a draft ends where the first token does not pass.
    passing = float(told["passing"]) if arm.p_min else 1.0
    right = passing * float(told["right_of_passing"] if arm.p_min else told["right"])
    drafted = sum(passing**at for at in range(1, arm.n_max + 1))
    accepted = sum(right**at for at in range(1, arm.n_max + 1))
    steps = [(one.n_predict - 1) / (1 + accepted) for one in classes]  # the prompt gives the first
    return tuple((drafted * count, accepted * count) for count in steps)


class ReplayBox(Timed):
    """Answers with the published speeds, in simulated time."""

    per_request = frozenset[str]()
    context_tokens = _CONTEXT_TOKENS

    def __init__(self, surface: Surface, *, seed: int = 0, noise: Noise | None = None) -> None:
        """Starts at 0 s.

        Args:
            surface: What to replay.
            seed: Of all luck.
            noise: The simulator's usual one if not given.
        """
        self._surface = surface
        self._noise = noise or Noise()
        self._rng = np.random.default_rng([seed, len(surface.name)])
        self._cell: Cell | None = None
        self.started: list[Arm] = []

    def restart(self, arm: Arm) -> Boot:
        self.started.append(arm)
        cell = self._surface.cell(arm)
        seconds = float(self._rng.uniform(*_LOAD_S)) if cell else _REFUSED_S
        self._now += seconds
        failure = "refused" if cell is None else cell.failure
        self._cell = None if failure in {"refused", "oom"} else cell
        self._luck = math.exp(self._noise.process * float(self._rng.normal()))
        if self._cell is None:
            return Boot(ok=False, seconds=seconds, failure=failure)
        return Boot(ok=True, seconds=seconds)

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        if arm is not None:
            raise Refused
        cell = self._cell
        if cell is None:
            raise ServerDied("crash")
        if cell.failure == "hang":
            self._cell = None
            self._now += _HANG_S
            raise ServerDied("hang")
        at = self._class_of(request)
        slow = self._luck * self._noise.weather(self._now) * self._of_request(request, cell.arm)
        n_new = request.cached_tokens + request.new_tokens
        prompt_ms = 1000 * n_new / cell.prompt_tok_s[at] * slow
        predicted_ms = 1000 * request.n_predict / cell.tok_s[at] * slow
        self._now += (prompt_ms + predicted_ms) / 1000
        answer: dict[str, Any] = {
            "cache_n": 0, "prompt_n": n_new, "prompt_ms": prompt_ms,
            "predicted_n": request.n_predict, "predicted_ms": predicted_ms,
            "wall_ms": prompt_ms + predicted_ms,
        }  # fmt: skip
        if cell.drafts is not None:
            share = request.n_predict / self._surface.workload.classes[at].n_predict
            drafted, accepted = (round(share * count) for count in cell.drafts[at])
            answer |= {"draft_n": drafted, "draft_n_accepted": accepted}
        if request.kind == "tool":
            answer["tool_ok"] = True
        return answer

    def _class_of(self, request: Request) -> int:
        """The class that a request is, or else is most like."""
        classes = self._surface.workload.classes

        def distance(at: int) -> tuple[bool, int]:
            one = classes[at]
            tokens = abs(one.new_tokens - request.new_tokens) + abs(
                one.n_predict - request.n_predict
            )
            return one.kind != request.kind, tokens

        return min(range(len(classes)), key=distance)

    def _of_request(self, request: Request, arm: Arm) -> float:
        """What the text, the text with this arm, and chance do to one request."""
        noise, rng = self._noise, self._rng
        log = noise.text * normal(request.prompt_id) + noise.request * float(rng.normal())
        log += noise.pairing * normal(f"{request.prompt_id} {arm}")
        if rng.random() < noise.tail_share:
            log += math.log1p(float(rng.uniform(0.0, noise.tail)))
        return math.exp(log)
