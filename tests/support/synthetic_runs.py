"""Runs that nobody measured: plausible numbers of a made-up box, and numbers that write-ups printed.

Everything here is invented or computed from a profile's `[published]` table; targets and engine
versions say so, so that no report made of it can be taken for a measurement.
"""

from __future__ import annotations

import hashlib
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunerd.engine.flags import arguments_sha256
from tunerd.measure.answer import ClientTimes, Mark, Sample, Timings
from tunerd.measure.evidence import (
    ArmRecord,
    Crossover,
    Fingerprint,
    RunOutcome,
    RunRecord,
    SummaryRecord,
    TurnTime,
    VerdictRecord,
)
from tunerd.measure.store import EvidenceStore

PROFILES = Path(__file__).parents[2] / "profiles"
START_S = 1_795_000_000.0
KINDS = ("code_python", "code_cpp", "explain_concept", "summarize", "qa_factual", "translation",
         "creative_short", "stepwise_math", "long_code_review")  # fmt: skip
# How easily a drafter guesses a kind of text: the chance that one more draft token is right.
_EASE = dict(zip(KINDS, (0.9, 0.88, 0.82, 0.8, 0.86, 0.72, 0.6, 0.91, 0.84), strict=True))
_LENGTHS = (100, 500, 1000, 2000)
_DEPTHS = (2048, 8192, 16384, 32768, 49152, 65536, 81920, 98304, 114688, 131072)


@dataclass(frozen=True)
class MadeRun:
    """A run with everything that belongs to it, before it is stored."""

    record: RunRecord
    samples: Mapping[str, Sequence[Sample]]
    summaries: Sequence[SummaryRecord] = ()
    verdicts: Sequence[VerdictRecord] = ()
    outcome: RunOutcome | None = RunOutcome.DONE
    reason: str | None = None

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
            store.end_run(number, self.outcome, ended_s=ended_s, reason=self.reason)
        return number


@dataclass
class Box:
    """A made-up arm: how fast it reads, steps and drafts; `n_max` 0 is without speculation."""

    name: str
    family: str
    n_max: int
    prefill_tok_s: float = 1150.0
    step_ms: float = 33.0
    draft_ms: float = 2.6
    vram_start_mib: int = 3900
    vram_per_token_mib: float = 0.026
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def argv(self) -> tuple[str, ...]:
        speculation = (
            ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(self.n_max),
             "--spec-draft-p-min", "0.75")
            if self.n_max
            else ()
        )  # fmt: skip
        return ("/opt/llama.cpp/build/bin/llama-server", "--model", "/srv/models/made-up.gguf",
                "--alias", "made-up", "--host", "127.0.0.1", "--port", "8080", "--ctx-size",
                "131072", "--parallel", "1", "--flash-attn", "on", "--cache-type-k", "q4_0",
                "--cache-type-v", "q4_0", "--ubatch-size", "256", "--fit", "on",
                "--fit-target", "1024", *speculation)  # fmt: skip

    def arm(self, **changes: Any) -> ArmRecord:
        """Its record."""
        engine = {"mainline": "mainline-0.7.0", "ik": "ik-b4400"}.get(self.family, self.family)
        origins = [("--model /srv/models/made-up.gguf", "model.path", "--set"),
                   ("--ctx-size 131072", "serving.ctx_size", "rtx-3090-ti-24gb.toml"),
                   ("--parallel 1", "serving.n_parallel", "tunerd"),
                   ("--cache-type-k q4_0", "serving.cache_type_k", "rtx-3090-ti-24gb.toml"),
                   ("--fit-target 1024", "memory.fit_mib", "tunerd")]  # fmt: skip
        if self.n_max:
            origins.append((f"--spec-draft-n-max {self.n_max}", "speculation.n_max",
                            "tuned, 12 November"))  # fmt: skip
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
        """One request to it."""
        noise = self.rng.lognormvariate(0, 0.02)
        fresh = depth - cached
        prompt_ms = fresh / self.prefill_tok_s * 1000 * (1 + depth / 400_000) * noise
        timings = self._timings(kind, n_predict, fresh, cached, prompt_ms, depth)
        wall_ms = prompt_ms + (timings.predicted_ms or 0) * concurrency**0.5 + 14
        free = self.vram_start_mib - round((depth + n_predict) * self.vram_per_token_mib)
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
            vram_free_min_mib=free,
            marks=marks,
            problem=problem,
            details={"depth": depth} if suite == "deep" else {},
        )

    def _timings(
        self, kind: str, n_predict: int, fresh: int, cached: int, prompt_ms: float, depth: int
    ) -> Timings:
        slow = 1 + depth / 260_000
        ease = _EASE.get(kind, 0.83)
        accepted = [0] * self.n_max
        done = steps = drafted = 0
        while done < n_predict - 1:
            steps += 1
            right = 0
            while right < self.n_max and self.rng.random() < ease * (0.985**right):
                accepted[right] += 1
                right += 1
            drafted += min(self.n_max, right + 1)
            done += right + 1
        step_ms = self.step_ms + self.draft_ms * drafted / steps
        predicted_ms = steps * step_ms * slow * self.rng.lognormvariate(0, 0.015)
        return Timings(
            cache_n=None if self.family == "ik" else cached,
            prompt_n=fresh,
            prompt_ms=prompt_ms,
            predicted_n=n_predict,
            predicted_ms=predicted_ms,
            draft_n=drafted if self.n_max else None,
            draft_n_accepted=sum(accepted) if self.n_max else None,
            accepted_by_position=tuple(accepted) if self.n_max else None,
        )


def made_runs(*, repeats: int = 3, seed: int = 7) -> tuple[MadeRun, ...]:
    """A bench of every suite on a made-up 24 GB card, and a comparison; `repeats` per case."""
    rng = random.Random(seed)
    on = Box("speculation on", "mainline", 6, prefill_tok_s=880, step_ms=45, rng=rng)
    off = Box("speculation off", "mainline", 0, vram_start_mib=4600, rng=rng)
    return (
        _compare(on, rng, repeats),
        _lengths(on, off, repeats),
        _mtp(on, off, repeats),
        _deep(on),
        _rest(on, repeats),
    )


def _record(kind: str, suites: Sequence[str], arms: Sequence[ArmRecord], **more: Any) -> RunRecord:
    values: dict[str, Any] = {
        "kind": kind,
        "suites": tuple(suites),
        "started_s": START_S,
        "target": "made-up box (no measurement)",
        "seed": 4711,
        "unit": "llama-server.service",
        "profile": "rtx-3090-ti-24gb",
        "model_name": "Made-Up 27B Q4_K_M",
        "tunerd_version": "0.1.0",
        "host": {"kernel": "6.12.0", "memory": {"total_mib": 64000}},
        "arms": tuple(arms),
    }
    return RunRecord(**{**values, **more})


def _mtp(on: Box, off: Box, repeats: int) -> MadeRun:
    samples: dict[str, list[Sample]] = {}
    for box in (on, off):
        warm_up = box.sample("mtp", "warm-up", "code_python", 0, n_predict=192,
                             marks=(Mark.WARM_UP,))  # fmt: skip
        mine = [warm_up]
        mine += [
            box.sample("mtp", kind, kind, 1 + turn * len(KINDS) + index, n_predict=192)
            for turn in range(repeats)
            for index, kind in enumerate(KINDS)
        ]
        samples[box.name] = mine
    n = len(samples[on.name])
    samples[on.name] += [
        on.sample("mtp", "translation", "translation", n, n_predict=192, marks=(Mark.THROTTLED,)),
        on.sample("mtp", "qa_factual", "qa_factual", n + 1, n_predict=192,
                  marks=(Mark.FOREIGN_TRAFFIC, Mark.CLOCKS_DISAGREE)),
        on.sample("mtp", "summarize", "summarize", n + 2, n_predict=192,
                  problem="no answer within 60 s"),
    ]  # fmt: skip
    return MadeRun(_record("bench", ("mtp",), (on.arm(), off.arm()), started_s=START_S + 300),
                   samples)  # fmt: skip


def _lengths(on: Box, off: Box, repeats: int) -> MadeRun:
    samples = {
        box.name: [
            box.sample("lengths", str(length), "long_code_review", turn * 4 + index,
                       n_predict=length, depth=43_000)
            for turn in range(repeats)
            for index, length in enumerate(_LENGTHS)
        ]
        for box in (on, off)
    }  # fmt: skip
    crossover = _crossover(on, off, samples).to_record("lengths")
    record = _record("bench", ("lengths",), (on.arm(), off.arm()), started_s=START_S + 1200)
    return MadeRun(record, samples, (crossover,))


def _crossover(on: Box, off: Box, samples: Mapping[str, Sequence[Sample]]) -> Crossover:
    """Where the straight lines through the walls of both cross, with an invented interval."""
    ends = {}
    for box in (on, off):
        walls = {n: [s.client.wall_ms for s in samples[box.name] if s.n_predict == n and s.client]
                 for n in (_LENGTHS[0], _LENGTHS[-1])}  # fmt: skip
        short, long = (sum(found) / len(found) for found in walls.values())
        ends[box.name] = (short, (long - short) / (_LENGTHS[-1] - _LENGTHS[0]))
    tax = ends[on.name][0] - ends[off.name][0]
    at = _LENGTHS[0] + tax / (ends[off.name][1] - ends[on.name][1])
    return Crossover(on.name, off.name, at, at * 0.86, at * 1.17)


def _deep(on: Box) -> MadeRun:
    samples = [
        on.sample("deep", f"{depth} tokens", "long_code_review", index, n_predict=64,
                  depth=depth - 64, cached=_DEPTHS[index - 1] if index else 0)
        for index, depth in enumerate(_DEPTHS)
    ]  # fmt: skip
    record = _record("bench", ("deep",), (on.arm(),), started_s=START_S + 2400)
    return MadeRun(record, {on.name: samples})


def _rest(on: Box, repeats: int) -> MadeRun:
    cases = (("cold", 0), ("warm, identical", 11_900), ("warm, changed tail", 11_200))
    samples = [
        on.sample("cache", case, "code_python", index, n_predict=32, depth=12_000, cached=cached)
        for index, (case, cached) in enumerate(cases * repeats)
    ]
    samples += [
        on.sample("concurrency", f"{streams} stream{'s' * (streams > 1)}", "explain_concept", 100 + streams * 10 + turn,
                  n_predict=128, concurrency=streams)
        for streams in (1, 2, 4)
        for turn in range(streams * repeats)
    ]  # fmt: skip
    quality = SummaryRecord("quality", "output with speculation on against off", on.name,
                            {"tool calls identical": None, "short answers identical": "12 of 12",
                             "letters changed in prose": 0.031})  # fmt: skip
    record = _record("bench", ("cache", "concurrency", "quality"), (on.arm(),),
                     started_s=START_S + 3600)  # fmt: skip
    return MadeRun(record, {on.name: samples}, (quality,))


def _compare(on: Box, rng: random.Random, repeats: int) -> MadeRun:
    ik = Box("B", "ik", 3, prefill_tok_s=1010, step_ms=31, rng=rng)
    ours = Box("A", "mainline", 6, prefill_tok_s=880, rng=rng)
    samples = {
        box.name: [
            box.sample("workload", "coding agent", "code_python", index, n_predict=220, depth=4300)
            for index in range(4 * repeats)
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
    del on
    record = _record("compare", ("workload",), (ours.arm(), ik.arm()),
                     workload="coding agent and chat", started_s=START_S)  # fmt: skip
    return MadeRun(record, samples, [turn.to_record("workload") for turn in turns], (verdict,))


def published_runs(profile: str) -> Iterator[MadeRun]:
    """What the `[published]` table of a profile says, as if it had been measured once here."""
    table = tomllib.loads((PROFILES / f"{profile}.toml").read_text())["published"]
    for family, kinds in table.get("by_kind", {}).items():
        samples = [_published_kind(kind, figures) for kind, figures in kinds.items()]
        yield _published(profile, table, "mtp", family, samples)
    if "by_length" in table:
        prefill_ms = float(table.get("prefill_ms", 0)) or None
        samples = [
            _published_length(int(length), figures, prefill_ms, table.get("prefill_tokens"))
            for length, figures in table["by_length"].items()
        ]
        family = "bee" if "dflash" in profile else "mainline"
        yield _published(profile, table, "lengths", family, samples)


def _published(
    profile: str, table: Mapping[str, Any], suite: str, family: str, samples: Sequence[Sample]
) -> MadeRun:
    fingerprint = Fingerprint(gpu_names=(str(table.get("card", "unknown")),))
    arm = ArmRecord(name=profile, fingerprint=fingerprint, family=family,
                    engine=family, engine_version=f"published: {table.get('engine', family)}")  # fmt: skip
    record = RunRecord(
        kind="bench",
        suites=(suite,),
        started_s=START_S,
        target=f"published in: {table.get('source')}",
        profile=profile,
        arms=(arm,),
    )
    return MadeRun(record, {arm.name: samples})


def _published_kind(kind: str, figures: Mapping[str, float]) -> Sample:
    predicted = int(figures["predicted"])
    timings = Timings(
        predicted_n=predicted,
        predicted_ms=(predicted - 1) / figures["tok_s"] * 1000,
        draft_n=int(figures["draft"]),
        draft_n_accepted=int(figures["accepted"]),
    )
    return _published_sample("mtp", kind, kind, predicted, timings, None)


def _published_length(
    length: int, figures: Mapping[str, float], prefill_ms: float | None, tokens: int | None
) -> Sample:
    timings = Timings(
        prompt_n=tokens,
        prompt_ms=prefill_ms,
        predicted_n=length,
        predicted_ms=(length - 1) / figures["tok_s"] * 1000,
    )
    client = ClientTimes(float(figures["wall_ms"])) if "wall_ms" in figures else None
    return _published_sample("lengths", str(length), "published", length, timings, client)


def _published_sample(
    suite: str, case: str, kind: str, n: int, timings: Timings, client: ClientTimes | None
) -> Sample:
    return Sample(suite=suite, case=case, kind=kind, prompt_id=f"published-{case}",
                  process="published", position=0, at_s=START_S, n_predict=n, concurrency=1,
                  timings=timings, client=client)  # fmt: skip
