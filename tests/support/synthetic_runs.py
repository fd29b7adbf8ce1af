"""Runs that nobody measured: made-up numbers of a made-up box.

Targets and engine versions say so, so that no report made of them can be taken for a measurement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.engine.fingerprint import Fingerprint
from tunerd.engine.flags import arguments_sha256
from tunerd.measure.answer import ClientTimes, Mark, Sample, Timings
from tunerd.measure.evidence import (
    ArmRecord,
    Crossover,
    RunOutcome,
    RunRecord,
    SummaryRecord,
    TurnTime,
    VerdictRecord,
)
from tunerd.measure.store import EvidenceStore

START_S = 1_795_000_000.0
_KINDS = ("code_python", "code_cpp", "explain_concept", "summarize", "qa_factual", "translation",
          "creative_short", "stepwise_math", "long_code_review")  # fmt: skip
_LENGTHS = (100, 500, 1000, 2000)
_DEPTHS = (2048, 8192, 16384, 32768, 49152, 65536, 81920, 98304, 114688, 131072)
_ACCEPTED = 0.8


@dataclass(frozen=True)
class MadeRun:
    """A run with everything that belongs to it, before it is stored."""

    record: RunRecord
    samples: Mapping[str, Sequence[Sample]]
    summaries: Sequence[SummaryRecord] = ()
    verdicts: Sequence[VerdictRecord] = ()
    outcome: RunOutcome | None = RunOutcome.DONE

    def put(self, store: EvidenceStore) -> int:
        """Store it; returns its number."""
        number = store.add_run(self.record)
        for arm, samples in self.samples.items():
            store.add_samples(number, samples, arm=arm)
        for summary in self.summaries:
            store.add_summary(number, summary)
        for verdict in self.verdicts:
            store.add_verdict(number, verdict)
        if self.outcome is not None:
            ended_s = self.record.started_s + 900
            store.end_run(number, self.outcome, ended_s=ended_s)
        return number


@dataclass(frozen=True)
class Box:
    """A made-up arm: how fast it reads and steps; `n_max` 0 is without speculation."""

    name: str
    family: str
    n_max: int
    prefill_tok_s: float = 1150.0
    step_ms: float = 33.0

    @property
    def argv(self) -> tuple[str, ...]:
        drafts = ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(self.n_max))
        return ("/opt/llama.cpp/build/bin/llama-server", "--model", "/srv/models/made-up.gguf",
                "--ctx-size", "131072", *(drafts if self.n_max else ()))  # fmt: skip

    def arm(self, **changes: Any) -> ArmRecord:
        """Its record."""
        engine = {"mainline": "mainline-0.7.0", "ik": "ik-b4400"}[self.family]
        origins = [("--model /srv/models/made-up.gguf", "model.path", "--set"),
                   ("--ctx-size 131072", "serving.ctx_size", "rtx-3090-ti-24gb.toml")]  # fmt: skip
        if self.n_max:
            drafts = f"--spec-draft-n-max {self.n_max}"
            origins.append((drafts, "speculation.n_max", "tuned, 12 November"))
        values: dict[str, Any] = {
            "name": self.name,
            "fingerprint": Fingerprint(
                engine_sha256=hashlib.sha256(engine.encode()).hexdigest(),
                driver_version="570.86.16",
                gpu_names=("NVIDIA GeForce RTX 3090 Ti",),
                power_limits_w=(450.0,),
                cpu_model="AMD Ryzen 7 9700X 8-Core Processor",
                model_sha256=hashlib.sha256(b"made-up model").hexdigest(),
                template_sha256=hashlib.sha256(b"made-up template").hexdigest(),
                arguments_sha256=arguments_sha256(self.argv),
                tunerd_version="0.1.0",
            ),
            "engine": engine,
            "family": self.family,
            "engine_version": "made up, not measured",
            "program": self.argv[0],
            "model_path": "/srv/models/made-up.gguf",
            "argv": self.argv,
            "origins": tuple(origins),
            "generation": 14 if self.n_max else None,
        }
        return ArmRecord(**{**values, **changes})

    def sample(
        self,
        suite: str,
        case: str,
        kind: str,
        position: int,
        *,
        n_predict: int,
        depth: int = 300,
        cached: int = 0,
        concurrency: int = 1,
        marks: tuple[Mark, ...] = (),
        problem: str | None = None,
    ) -> Sample:
        """One request to it; no two of a case are alike."""
        slower = 1 + position % 7 / 100
        prompt_ms = (depth - cached) / self.prefill_tok_s * 1000 * slower
        n_steps = max(1, round((n_predict - 1) / sum(self._taken(1.0, self.n_max + 1))))
        predicted_ms = n_steps * (self.step_ms + 2.6 * self.n_max) * slower * (1 + depth / 260_000)
        accepted = tuple(int(count) for count in self._taken(n_steps * _ACCEPTED, self.n_max))
        timings = Timings(
            cache_n=None if self.family == "ik" else cached,
            prompt_n=depth - cached,
            prompt_ms=prompt_ms,
            predicted_n=n_predict,
            predicted_ms=predicted_ms,
            draft_n=n_steps * self.n_max if self.n_max else None,
            draft_n_accepted=sum(accepted) if self.n_max else None,
            accepted_by_position=accepted if self.n_max else None,
        )
        wall_ms = prompt_ms + predicted_ms * concurrency**0.5 + 14
        return Sample(
            suite=suite,
            case=case,
            kind=kind,
            prompt_id=f"{kind}-{position}",
            process=f"life-{self.name}",
            position=position,
            at_s=START_S + position * 7,
            n_predict=n_predict,
            concurrency=concurrency,
            timings=None if problem else timings,
            client=None if problem else ClientTimes(wall_ms, prompt_ms + 12),
            vram_free_min_mib=3900 - round((depth + n_predict) * 0.026),
            marks=marks,
            problem=problem,
            details={"depth": depth} if suite == "deep" else {},
        )

    @staticmethod
    def _taken(first: float, n: int) -> list[float]:
        return [first * _ACCEPTED**position for position in range(n)]


_ON = Box("speculation on", "mainline", 6, prefill_tok_s=880, step_ms=45)
_OFF = Box("speculation off", "mainline", 0)


def made_runs(*, repeats: int = 3) -> tuple[MadeRun, ...]:
    """A bench of every suite on a made-up 24 GB card, and a comparison; `repeats` per case."""
    return (_compare(repeats), _lengths(repeats), _mtp(repeats), _deep(), _rest(repeats))


def _bench(*suites: str, arms: Sequence[Box] = (_ON,), after_s: float) -> RunRecord:
    return _record("bench", suites, arms, after_s)


def _record(kind: str, suites: Sequence[str], arms: Sequence[Box], after_s: float) -> RunRecord:
    return RunRecord(
        kind=kind,
        suites=tuple(suites),
        started_s=START_S + after_s,
        target="made-up box (no measurement)",
        seed=4711,
        unit="llama-server.service",
        profile="rtx-3090-ti-24gb",
        model_name="Made-Up 27B Q4_K_M",
        workload="coding agent and chat" if kind == "compare" else None,
        arms=tuple(arm.arm() for arm in arms),
    )


def _mtp(repeats: int) -> MadeRun:
    kinds = _KINDS * repeats
    samples = {
        box.name: [
            box.sample("mtp", "warm-up", kinds[0], 0, n_predict=192, marks=(Mark.WARM_UP,)),
            *(box.sample("mtp", kind, kind, at, n_predict=192) for at, kind in enumerate(kinds, 1)),
        ]
        for box in (_ON, _OFF)
    }
    n, both = len(samples[_ON.name]), (Mark.FOREIGN_TRAFFIC, Mark.CLOCKS_DISAGREE)
    samples[_ON.name] += [
        _ON.sample("mtp", "translation", "translation", n, n_predict=192, marks=(Mark.THROTTLED,)),
        _ON.sample("mtp", "qa_factual", "qa_factual", n + 1, n_predict=192, marks=both),
        _ON.sample("mtp", "summarize", "summarize", n + 2, n_predict=192,
                   problem="no answer within 60 s"),
    ]  # fmt: skip
    return MadeRun(_bench("mtp", arms=(_ON, _OFF), after_s=300), samples)


def _lengths(repeats: int) -> MadeRun:
    samples = {
        box.name: [
            box.sample("lengths", str(length), "long_code_review", at, n_predict=length,
                       depth=43_000)
            for at, length in enumerate(_LENGTHS * repeats)
        ]
        for box in (_ON, _OFF)
    }  # fmt: skip
    crossover = Crossover(_ON.name, _OFF.name, 640.0, 551.0, 748.0).to_record("lengths")
    return MadeRun(_bench("lengths", arms=(_ON, _OFF), after_s=1200), samples, (crossover,))


def _deep() -> MadeRun:
    samples = [
        _ON.sample("deep", f"{depth} tokens", "long_code_review", at, n_predict=64,
                   depth=depth - 64, cached=_DEPTHS[at - 1] if at else 0)
        for at, depth in enumerate(_DEPTHS)
    ]  # fmt: skip
    return MadeRun(_bench("deep", after_s=2400), {_ON.name: samples})


def _rest(repeats: int) -> MadeRun:
    cases = (("cold", 0), ("warm, identical", 11_900), ("warm, changed tail", 11_200))
    samples = [
        _ON.sample("cache", case, "code_python", at, n_predict=32, depth=12_000, cached=cached)
        for at, (case, cached) in enumerate(cases * repeats)
    ]
    quality = SummaryRecord("quality", "output with speculation on against off", _ON.name,
                            {"tool calls identical": None, "short answers identical": "12 of 12",
                             "letters changed in prose": 0.031})  # fmt: skip
    record = _bench("cache", "quality", after_s=3600)
    return MadeRun(record, {_ON.name: samples}, (quality,))


def _compare(repeats: int) -> MadeRun:
    ours, ik = Box("A", "mainline", 6, prefill_tok_s=880), Box("B", "ik", 3, step_ms=31)
    samples = {
        box.name: [
            box.sample("workload", "coding agent", "code_python", at, n_predict=220, depth=4300)
            for at in range(4 * repeats)
        ]
        for box in (ours, ik)
    }
    turns = [
        TurnTime(ours.name, "coding agent", 4.9, 5.1, 3.2, 0.7),
        TurnTime(ours.name, "chat", 0.4, None, 6.4, 0.3),
        TurnTime(ours.name, None, 3.5, 4.9, 4.2),
        TurnTime(ik.name, "coding agent", 4.3, 4.6, 3.0, 0.7),
        TurnTime(ik.name, "chat", 0.4, 3.9, 5.8, 0.3),
        TurnTime(ik.name, None, 3.1, 4.4, 3.8),
    ]
    verdict = VerdictRecord(
        outcome="B is faster",
        sentence="B is 4.1 % faster on chat, 95 % interval 2.0 to 6.2 %",
        arm_a="A",
        arm_b="B",
        what="turn time on chat",
        ratio=0.959,
        ratio_low=0.938,
        ratio_high=0.980,
        n_pairs=24,
        reasons=("prefill of the deepest class is not worse", "1,216 MiB of VRAM stay free"),
    )
    record = _record("compare", ("workload",), (ours, ik), after_s=0)
    return MadeRun(record, samples, [turn.to_record("workload") for turn in turns], (verdict,))
