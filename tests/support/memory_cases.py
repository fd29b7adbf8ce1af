"""Estimates against what real servers report: the cases, the flags, the comparison.

mainline measures itself before it loads (its fit makes a dry run and prints a table of the target
and one of what drafts), so a case takes half a second whatever the size of the model. ik_llama.cpp
and mainline before August 2026 have to load it: their buffer lines are compared.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from tests.support.folders import ROOT
from tests.support.ports import free_port
from tests.support.shapes import PlainShape, write_hollow
from tunerd.machine.files import Files
from tunerd.model.files import ModelFiles
from tunerd.model.memory import (
    IK,
    MAINLINE_NOW,
    MAINLINE_SPRING_2026,
    MAINLINE_SUMMER_2026,
    Device,
    EngineLaws,
    MemorySettings,
    estimate,
)
from tunerd.model.verdict import device_of, parse_report
from tunerd.tryout.designed import Shape

# What design.md allows a cold estimate.
ALLOWED_RATIO = 0.10
ALLOWED_MIB = 64

_ROW = re.compile(
    r"\|\s+- (?P<label>[^|]++)\|(?:\s*\d+ =\s*\d+ \+ \()?\s*(?P<mib>\d+) =\s*(?P<model>\d+) \+"
)
_PLANNED = re.compile(r"fitting params to (?:free|device) memory took")
_LISTENING = re.compile(r"listening on|HTTP server listening|model loaded \|")
_FAILED = re.compile(r"error: |exiting due to|GGML_ASSERT|Fatal error")

DENSE = Shape(
    n_layer=16, n_embd=1024, n_ff=4096, n_head=8, n_head_kv=2, head_dim=256, ssm_state_size=128,
    ssm_group_count=8, ssm_time_step_rank=16, n_vocab=32768, context_length=262144,
)  # fmt: skip
MOE = replace(DENSE, is_moe=True, n_expert=32, n_expert_used=4, n_ff_expert=256, n_ff_shared=256)
LLAMA = PlainShape(architecture="llama")
LITTLE = PlainShape(architecture="llama", n_layer=4, n_embd=512, n_ff=2048, n_head=8)
QWEN3_MOE = PlainShape(
    architecture="qwen3moe", n_ff=1024, n_expert=32, n_expert_used=4, n_ff_expert=256
)
GEMMA = PlainShape(
    architecture="gemma3", n_layer=18, n_head=4, n_head_kv=2, head_dim=256, sliding_window=1024
)


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A model under settings, and the shape of a draft model where there is one.

    `settings` is for a GPU, `on_cpu` makes it a case without.
    """

    name: str
    shape: Shape | PlainShape
    settings: MemorySettings
    draft: PlainShape | None = None

    def on_cpu(self) -> MemoryCase:
        plain = replace(self.settings, has_gpu=False, n_gpu_layers=None, n_cpu_moe=0, cpu_moe=False)
        return replace(self, settings=replace(plain, moe_cache_mib=0))


def _case(
    name: str, shape: Shape | PlainShape, *, draft: PlainShape | None = None, **settings: object
) -> MemoryCase:
    kv = settings.pop("kv", "f16")
    draft_kv = settings.pop("draft_kv", "f16")
    n_max = settings.get("n_max", 0)
    values = {
        "cache_type_k": kv,
        "cache_type_v": kv,
        "draft_cache_type_k": draft_kv,
        "draft_cache_type_v": draft_kv,
        "speculation": "draft" if draft else "mtp" if n_max else "off",
        "is_cuda": False,
        **settings,
    }
    return MemoryCase(name, shape, MemorySettings(**values), draft)  # type: ignore[arg-type] # a table


CASES = (
    _case("dense-4k", DENSE, ctx_size=4096),
    _case("dense-16k-mtp2-q8", DENSE, ctx_size=16384, n_max=2, kv="q8_0", draft_kv="q8_0"),
    _case("dense-64k-mtp6-q4", DENSE, ctx_size=65536, n_max=6, kv="q4_0"),
    _case("dense-64k-ub256-mtp2", DENSE, ctx_size=65536, n_ubatch=256, n_max=2, kv="q8_0"),
    _case("dense-8k-ub2048-no-mtp", replace(DENSE, has_mtp=False), ctx_size=8192, n_ubatch=2048),
    _case("dense-8k-ub2048-mtp6", DENSE, ctx_size=8192, n_ubatch=2048, n_max=6),
    _case("dense-16k-ngl10", DENSE, ctx_size=16384, n_gpu_layers=10),
    _case("dense-32k-ngl12-mtp2", DENSE, ctx_size=32768, n_gpu_layers=12, n_max=2),
    _case("dense-32k-4slots-unified", DENSE, ctx_size=32768, n_parallel=4, kv_unified=True),
    _case("dense-16k-2slots-mtp2", DENSE, ctx_size=16384, n_parallel=2, n_max=2),
    _case("moe-32k-mtp2", MOE, ctx_size=32768, n_max=2),
    _case("moe-32k-ncmoe6", MOE, ctx_size=32768, n_cpu_moe=6),
    _case("moe-64k-ncmoe8-mtp2-q8", MOE, ctx_size=65536, n_cpu_moe=8, n_max=2, kv="q8_0"),
    _case("moe-8k-cmoe-ub2048", MOE, ctx_size=8192, cpu_moe=True, n_ubatch=2048),
    _case("moe-16k-cache", MOE, ctx_size=16384, n_cpu_moe=4, moe_cache_mib=64, n_max=2),
    _case("moe-16k-large-cache", MOE, ctx_size=16384, n_cpu_moe=4, moe_cache_mib=4000),
    _case("moe-16k-ngl8", MOE, ctx_size=16384, n_gpu_layers=8),
    _case("llama-32k", LLAMA, ctx_size=32768),
    _case("llama-64k-q4-ngl6", LLAMA, ctx_size=65536, n_gpu_layers=6, kv="q4_0"),
    _case("llama-16k-draft4", LLAMA, draft=LITTLE, ctx_size=16384, n_max=4, kv="q8_0"),
    _case("qwen3moe-16k-ncmoe4", QWEN3_MOE, ctx_size=16384, n_cpu_moe=4),
    _case("gemma-32k", GEMMA, ctx_size=32768),
    _case("gemma-32k-4slots", GEMMA, ctx_size=32768, n_parallel=4),
)


@dataclass(frozen=True, slots=True)
class TestedEngine:
    """How a build takes its flags, what its laws are, and whether it measures itself.

    One that does not run MTP does not even load a model that has it.
    """

    __test__ = False

    style: str
    laws: EngineLaws
    measures_itself: bool
    runs_mtp: bool


# Debian hides its software GPU unless it is asked for.
SOFTWARE_GPU = {"GGML_VK_VISIBLE_DEVICES": "0"}

ENGINES: Mapping[str, TestedEngine] = {
    "mainline-2026-04-26": TestedEngine("mainline", MAINLINE_SPRING_2026, False, False),
    "mainline-2026-05-16": TestedEngine("mainline", MAINLINE_SPRING_2026, False, True),
    "mainline-2026-08-18": TestedEngine("mainline", MAINLINE_SUMMER_2026, True, True),
    "mainline-0.7.0": TestedEngine("mainline", MAINLINE_NOW, True, True),
    "embedded": TestedEngine("mainline", MAINLINE_NOW, True, True),
    "ik-2026-06-02": TestedEngine("ik-may", IK, False, True),
    "ik-2026-08": TestedEngine("ik-now", IK, False, True),
    "bee-2026-05-21": TestedEngine("bee", MAINLINE_SPRING_2026, False, False),
}


def can_run(engine: TestedEngine, case: MemoryCase) -> bool:
    """Whether this build loads the model and knows what the settings ask for."""
    settings = case.settings
    if isinstance(case.shape, Shape) and case.shape.has_mtp and not engine.runs_mtp:
        return False
    # ik refuses MTP and several slots together, and its CPU build has no kernel for q4_0 caches.
    is_ik = engine.style.startswith("ik")
    if case.draft is not None and not engine.measures_itself:
        return False
    return not (is_ik and (settings.n_parallel > 1 or settings.cache_type_k == "q4_0"))


@dataclass(frozen=True, slots=True)
class Difference:
    """An estimate beside what a server says, in MiB."""

    engine: str
    case: str
    device: Device
    estimated_mib: float
    reported_mib: float

    @property
    def is_allowed(self) -> bool:
        allowed = max(ALLOWED_MIB, ALLOWED_RATIO * self.reported_mib)
        return abs(self.estimated_mib - self.reported_mib) <= allowed

    def __str__(self) -> str:
        difference = self.estimated_mib - self.reported_mib
        return (
            f"| {self.engine} | {self.case} | {self.device} | {self.estimated_mib:.0f}"
            f" | {self.reported_mib:.0f} | {difference:+.0f} |"
        )


def flags(case: MemoryCase, engine: TestedEngine, folder: str) -> list[str]:
    """The settings as this build's flags, with models below `folder` as the build sees it."""
    settings = case.settings
    words = [
        *("-m", f"{folder}/{file_name(case.shape)}"),
        *("-c", str(settings.ctx_size), "-b", str(settings.n_batch), "-ub", str(settings.n_ubatch)),
        *("-np", str(settings.n_parallel)),
        *("-ctk", settings.cache_type_k, "-ctv", settings.cache_type_v, "-fa", "on"),
    ]
    if settings.kv_unified:
        words.append("-kvu")
    if settings.drafts:
        words += _speculation(settings, engine.style)
    if case.draft is not None:
        words += ["-md", f"{folder}/{file_name(case.draft)}"]
    if engine.style in ("mainline", "bee"):
        words += ["-lv", "4"]
    if not engine.measures_itself:
        words += ["--no-warmup", *(("-fit", "off") if not engine.style.startswith("ik") else ())]
    if settings.has_gpu:
        layers = 99 if settings.n_gpu_layers is None else settings.n_gpu_layers
        words += ["-ngl", str(layers)]
        words += ["-ncmoe", str(settings.n_cpu_moe)] if settings.n_cpu_moe else []
        words += ["-cmoe"] if settings.cpu_moe else []
        if settings.moe_cache_mib:
            words += ["--moe-cache-mib", str(settings.moe_cache_mib)]
    return words


def _speculation(settings: MemorySettings, style: str) -> list[str]:
    depth = str(settings.n_max)
    if style == "ik-now":
        return ["--spec-type", f"mtp:n_max={depth},p_min=0.0"]
    if style == "ik-may":
        return ["-mtp", "--draft-max", depth, "--draft-p-min", "0.0"]
    types = ["-ctkd", settings.draft_cache_type_k, "-ctvd", settings.draft_cache_type_v]
    kind = f"draft-{'mtp' if settings.speculation == 'mtp' else 'simple'}"
    return ["--spec-type", kind, "--spec-draft-n-max", depth, *types]


def file_name(shape: Shape | PlainShape) -> str:
    """What the model of a shape is called."""
    return f"{sha256(repr(shape).encode()).hexdigest()[:16]}.gguf"


def write_models(case: MemoryCase, folder: Path) -> None:
    """The case's models in this folder, where they are not there yet; they take no room."""
    for shape in (case.shape, case.draft):
        if shape is not None and not (folder / file_name(shape)).exists():
            write_hollow(folder / file_name(shape), shape)


def said_by(command: Sequence[str], folder: Path, *, until: re.Pattern[str]) -> list[str]:
    """What a server says until a line matches or it fails; it is ended then."""
    argv = [*command, "--host", "127.0.0.1", "--port", str(free_port()), "-t", "1"]
    lines: list[str] = []
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT)}, cwd=folder,
        text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        alarm = threading.Timer(240.0, _end, [process])
        alarm.start()
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                if until.search(line) or _FAILED.search(line):
                    break
        finally:
            alarm.cancel()
            _end(process)
    return lines


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it and what it started; the group is the process's own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def differences(
    name: str, program: Sequence[str], case: MemoryCase, folder: Path, *, seen_as: str | None = None
) -> list[Difference]:
    """Run a case on an engine and set the estimate beside its report, for every device.

    Args:
        name: The engine, as in `ENGINES`.
        program: The server and what starts it, for example a `chroot` in front of it.
        case: What to run; `case.on_cpu()` for an engine without a GPU.
        folder: Where the models are put; files of holes.
        seen_as: That folder as the server sees it, if it has another root.
    """
    engine = ENGINES[name]
    write_models(case, folder)
    # It is ended as soon as it has said it; ik leaves a log file where it runs.
    argv = [*program, *flags(case, engine, seen_as or str(folder))]
    lines = said_by(argv, folder, until=_PLANNED if engine.measures_itself else _LISTENING)
    models = ModelFiles(folder, Files())
    draft = models.read_facts(folder / file_name(case.draft)) if case.draft is not None else None
    asked = replace(case.settings, laws=engine.laws, draft=draft)
    need = estimate(models.read_facts(folder / file_name(case.shape)), asked)
    found = []
    for device in Device:
        if device is Device.GPU and not case.settings.has_gpu:
            continue
        said = (
            planned_mib(lines, device)
            if engine.measures_itself
            else parse_report(lines).allocated_mib(device)
        )
        assert said is not None, f"{name} said nothing about {case.name}"
        mib = need.bytes_of(device) / 1024 / 1024
        found.append(Difference(name, case.name, device, mib, float(said)))
    return found


def planned_mib(lines: Iterable[str], device: Device) -> int | None:
    """What mainline's first dry run expects on a device, with what drafts; None without a dry run.

    It prints a breakdown table for the target, and one for what drafts. Builds of summer 2026 measure what
    drafts first and say so afterwards. Source: logs of builds of May to November 2026 (mainline, BeeLlama).
    """
    tables: list[list[tuple[Device, int, int]]] = []
    drafts: list[int] = []
    is_draft = False
    for line in lines:
        if "| memory breakdown [MiB]" in line:
            drafts += [len(tables)] * is_draft
            tables.append([])
        elif "cleaning up before exit" in line:
            break
        elif "memory data for the extra model" in line:
            is_draft = True
        elif "getting device memory data for" in line:
            is_draft = False
        elif "[spec] estimated memory usage" in line and tables:
            drafts.append(len(tables) - 1)
        elif tables and (row := _ROW.search(line)):
            place = device_of(row["label"].strip())
            tables[-1].append((place, int(row["mib"]), int(row["model"])))
    target = next((one for number, one in enumerate(tables) if number not in drafts), None)
    if target is None:
        return None
    total = sum(mib for place, mib, _ in target if place is device)
    for number in drafts[:1]:
        # A model that drafts for itself is there once.
        is_same = [model for *_, model in tables[number]] == [model for *_, model in target]
        rows = [row for row in tables[number] if row[0] is device]
        total += sum(mib - (model if is_same else 0) for _, mib, model in rows)
    return total
