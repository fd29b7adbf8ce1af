"""What the rules are asked of: facts, questions, and what speculation must bring to pay."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tunerd.engine.capabilities import Capabilities, Engine, OffloadDevice
from tunerd.engine.flags import drafts_with_probability, owner_of
from tunerd.engine.health import Failure, said_itself
from tunerd.engine.log import read_requests
from tunerd.machine.facts import CpuFrequency, DriverFiles, Gpu, Host
from tunerd.measure.answer import Sample, Timings
from tunerd.measure.trust import of_others, stages_of
from tunerd.model.facts import ModelFacts
from tunerd.model.memory import Estimate
from tunerd.model.verdict import MemoryReport, parse_report
from tunerd.profile.schema import ProfileFile
from tunerd.result import Level, Message
from tunerd.words import MiB

_SYSTEM_INFO = re.compile(r"system_info: n_threads")
_CUDA_PART = re.compile(r"\| CUDA : (?P<part>[^:]{1,2000}?)(?: \| [A-Za-z]\w* :|$)")
# Builds since September 2026 list their pairs of KV types, those before only said whether they had all.
_KV_PAIRS = re.compile(r"FA_QUANTS = (?P<list>\S+)")
ALL_PAIRS = "all"
_ARCHITECTURES = re.compile(r"\bARCHS = (?P<list>[0-9a-z,; ]{1,200}?)(?: \||$)")
_MLOCK_REFUSED = "failed to mlock"
_MAPPED_OVERRIDES = "tensor overrides to CPU are used with mmap enabled"
_MISPLACED = re.compile(r"is assigned to device CPU but (the )?fused .{1,80} is assigned to device")
_NO_KERNEL = "no kernel image is available"
_NO_CUDA = "failed to initialize CUDA"
_SLOTS = re.compile(r"\bn_slots = (?P<n>\d{1,4})\b")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that a server answered, summed: tokens processed, generated, drafted and accepted.

    `n_prompt` leaves out what came from the cache. `n_drafted` is 0 where nothing was drafted. `n_lost`
    prompt tokens were there, and were read again for want of a snapshot.
    """

    n_requests: int
    n_prompt: int
    n_predicted: int
    n_drafted: int
    n_accepted: int
    n_lost: int = 0

    @property
    def n_steps(self) -> int:
        """Verification steps: every generated token but the first and the accepted ones took one."""
        return self.n_predicted - self.n_requests - self.n_accepted

    @property
    def drafted_per_step(self) -> float | None:
        """Mean drafted tokens of a step."""
        return self.n_drafted / self.n_steps if self.n_steps > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """What the log of one life of a server says.

    `has_cuda`, `cuda_architectures` and `kv_pairs` come from its line about the system, and are
    None where the log does not reach back to it. `kv_pairs` (`q8_0-q4_0`) is empty where the build says none.
    """

    has_cuda: bool | None = None
    cuda_architectures: tuple[int, ...] | None = None
    kv_pairs: frozenset[str] | None = None
    mlock_refused: bool = False
    maps_overridden_tensors: bool = False
    lacks_kernels: bool = False
    lacks_cuda: bool = False
    has_misplaced_layers: bool = False
    n_slots: int | None = None
    traffic: Traffic | None = None
    report: MemoryReport | None = None


def read_server_log(lines: Sequence[str], own: Sequence[Timings] = ()) -> LogFacts | None:
    """The facts in the log of one life of a server; None where there are no lines of its own.

    Requests that were `own` measurements are no traffic.
    """
    if not said_itself(lines):
        return None
    report = parse_report(lines)
    info = next((line for line in reversed(lines) if _SYSTEM_INFO.search(line)), None)
    cuda = _CUDA_PART.search(info) if info is not None else None
    slots = [int(found["n"]) for line in lines if (found := _SLOTS.search(line)) is not None]
    return LogFacts(
        has_cuda=None if info is None else cuda is not None,
        cuda_architectures=_architectures(cuda["part"]) if cuda is not None else None,
        kv_pairs=_kv_pairs(cuda["part"]) if cuda is not None else None,
        mlock_refused=_says(lines, _MLOCK_REFUSED),
        maps_overridden_tensors=_says(lines, _MAPPED_OVERRIDES),
        lacks_kernels=_says(lines, _NO_KERNEL),
        lacks_cuda=_says(lines, _NO_CUDA),
        has_misplaced_layers=any(_MISPLACED.search(line) for line in lines),
        n_slots=slots[-1] if slots else None,
        traffic=_traffic(lines, own),
        report=report,
    )


def _says(lines: Iterable[str], words: str) -> bool:
    return any(words in line for line in lines)


def _architectures(part: str) -> tuple[int, ...] | None:
    """`ARCHS = 860,890` as compute capabilities times ten."""
    found = _ARCHITECTURES.search(part)
    if found is None:
        return None
    numbers = [int(digits) // 10 for digits in re.findall(r"\d{3,4}", found["list"])]
    return tuple(sorted(set(numbers))) or None


def _kv_pairs(part: str) -> frozenset[str]:
    """Pairs of KV types with kernels of their own."""
    if "FA_ALL_QUANTS = 1" in part:
        return frozenset({ALL_PAIRS})
    found = _KV_PAIRS.search(part)
    return frozenset(found["list"].split(",")) if found is not None else frozenset()


def _traffic(lines: Sequence[str], own: Sequence[Timings]) -> Traffic | None:
    """Sums over the requests of a log; None where it has none."""
    logged = of_others(read_requests(lines).requests, own)
    requests = [one for one in logged if one.predicted_n]
    if not requests:
        return None
    return Traffic(
        n_requests=len(requests),
        n_prompt=sum(one.prompt_n for one in requests),
        n_predicted=sum(one.predicted_n for one in requests),
        n_drafted=sum(one.drafted_n or 0 for one in requests),
        n_accepted=sum(one.accepted_n or 0 for one in requests),
        n_lost=sum(one.lost_n for one in requests),
    )


MIN_SAMPLES = 3
DEFAULT_UBATCH = 512  # of every build that was probed
# Depths count as alike within this: a step slows by about 0.3 % for each thousand tokens
# (the prior of a step in sweep/laws), which keeps what is left of it below a few percent.
_ALIKE_TOKENS = 1024
_ALIKE_SHARE = 0.2
NOTHING_MEASURED = "a run with speculation and one without, of what serves"
NOT_ALIKE = "runs with and without speculation at a comparable depth of context"


@dataclass(frozen=True, slots=True)
class BreakEven:
    """What speculation costs on this box.

    `step_ms` are the coefficients (base, per drafted token) of a step with speculation, `token_ms` the
    time of a token without, both at about `depth_tokens` of context. `prompt_ms` and `plain_prompt_ms` are coefficients of a prompt with and
    without it (per batch, per token); None where no sample shows one of them.
    """

    step_ms: tuple[float, float]
    token_ms: float
    prompt_ms: tuple[float, float] | None
    plain_prompt_ms: tuple[float, float] | None
    n_ubatch: int
    depth_tokens: int

    def tax_ms(self, n_prompt: float) -> float | None:
        """What speculation adds to a prompt of so many tokens [ms]; None where that is unknown."""
        if self.prompt_ms is None or self.plain_prompt_ms is None:
            return None
        batches = math.ceil(n_prompt / self.n_ubatch)
        laws = (self.prompt_ms, self.plain_prompt_ms)
        with_it, without = (batch * batches + token * n_prompt for batch, token in laws)
        return with_it - without

    def acceptance_ratio(self, traffic: Traffic) -> float | None:
        """The share of drafts that must be accepted for this traffic to gain; above 1 where all would not do.

        None where the traffic drafted nothing. An unknown tax on prompts counts as none.
        """
        drafted = traffic.drafted_per_step
        if not drafted:
            return None
        tax = self.tax_ms(traffic.n_prompt / traffic.n_requests) or 0.0
        spread = tax * traffic.n_requests / traffic.n_predicted
        if spread >= self.token_ms:
            return math.inf
        base, per_draft = self.step_ms
        accepted = (base + per_draft * drafted) / (self.token_ms - spread) - 1
        return max(0.0, accepted / drafted)


def break_even(
    drafting: Sequence[Sample], plain: Sequence[Sample], n_ubatch: int = DEFAULT_UBATCH
) -> BreakEven | str:
    """What samples of one command line with speculation and without show.

    Args:
        drafting: With it, as it serves.
        plain: The same server without it.
        n_ubatch: Physical batch of both.

    Returns:
        What would have to be measured first, where there is no depth at which either side has three samples that count.
    """
    import numpy as np

    from tunerd.sweep.laws import fit_line

    all_on = [one for one in _usable(drafting) if one.drafted]
    all_off = [one for one in _usable(plain) if not one.drafted]
    depth = _common_depth(all_on, all_off)
    if depth is None:
        is_measured = min(len(all_on), len(all_off)) >= MIN_SAMPLES
        return NOT_ALIKE if is_measured else NOTHING_MEASURED
    on, off = ([one for one in side if _alike(one.depth, depth)] for side in (all_on, all_off))
    steps = np.array([(one.step_ms, one.steps, one.drafted / one.steps) for one in on])
    on_prompts, off_prompts = _like_prompts(all_on, all_off), _like_prompts(all_off, all_on)
    return BreakEven(
        step_ms=fit_line(*steps.T),
        token_ms=sum(one.step_ms * one.steps for one in off) / sum(one.steps for one in off),
        prompt_ms=_prompt_law(on_prompts, n_ubatch),
        plain_prompt_ms=_prompt_law(off_prompts, n_ubatch),
        n_ubatch=n_ubatch,
        depth_tokens=round(depth),
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer of a single stream; `depth` is its mean context, None where the log cannot tell."""

    step_ms: float
    steps: int
    drafted: int
    depth: float | None
    start: float
    prompt_n: int | None
    prompt_ms: float | None


def _alike(depth: float | None, other: float | None) -> bool:
    if depth is None or other is None:
        return False
    return abs(depth - other) <= max(_ALIKE_TOKENS, _ALIKE_SHARE * max(depth, other))


def _common_depth(on: Sequence[_Answer], off: Sequence[_Answer]) -> float | None:
    """The depth around which the side that has fewer samples has most; None where one has too few."""
    best: tuple[int, int, float] | None = None
    half = _ALIKE_TOKENS / 2  # finer would find the same answers again
    depths = {half * round(one.depth / half) for one in (*on, *off) if one.depth is not None}
    for depth in sorted(depths):
        counts = [sum(_alike(one.depth, depth) for one in side) for side in (on, off)]
        if min(counts) >= MIN_SAMPLES and (best is None or (min(counts), sum(counts)) > best[:2]):
            best = (min(counts), sum(counts), depth)
    return None if best is None else best[2]


def _like_prompts(own: Sequence[_Answer], others: Sequence[_Answer]) -> list[_Answer]:
    """Answers whose prompt has one of like length, at a like depth, on the other side."""
    return [
        one
        for one in own
        if any(
            _alike(one.prompt_n, other.prompt_n) and _alike(one.start, other.start)
            for other in others
            if other.prompt_ms
        )
    ]


def _usable(samples: Sequence[Sample]) -> list[_Answer]:
    """Answers to a single stream that may enter an average and have a decode time."""
    return [
        _answer(sample, sample.timings)
        for sample in samples
        if sample.is_usable
        and sample.concurrency == 1
        and sample.timings is not None
        and sample.steps
        and sample.timings.predicted_ms
    ]


def _answer(sample: Sample, timings: Timings) -> _Answer:
    start, prompt = sample.n_cached or 0, timings.prompt_n
    return _Answer(
        step_ms=timings.step_ms or 0.0,
        steps=sample.steps or 0,
        drafted=timings.draft_n or 0,
        depth=None if prompt is None else start + prompt + (timings.predicted_n or 0) / 2,
        start=float(start),
        prompt_n=prompt,
        prompt_ms=timings.prompt_ms,
    )


def _prompt_law(answers: Sequence[_Answer], n_ubatch: int) -> tuple[float, float] | None:
    from tunerd.sweep.laws import PromptRow, fit_prompts

    rows = [
        PromptRow("", one.prompt_ms, one.prompt_n, n_ubatch, 0.0)
        for one in answers
        if one.prompt_n and one.prompt_ms
    ]
    law = fit_prompts(rows)
    return None if law is None else (float(law.mean[0]), float(law.mean[1]))


@dataclass(frozen=True, slots=True)
class Locking:
    """How much a process may lock, and has locked; `limit_mib` is None when unlimited."""

    limit_mib: MiB | None
    locked_mib: MiB | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """The unit that serves, or would.

    `argv` is the command of the unit's text, or of the server that its script has started. Where the process that runs was started with another one,
    `was_edited` is true, and what only this process shows (slots, locks, log) is unknown.
    `settings` are the keys that its command line and environment set; what they leave to the build
    is None there. `margin_mib` is what fit leaves free, by the build's own choice too; None where it places nothing. `settings_problem` says why they cannot be read. `foreign_flags` are flags on the
    command line, and variables, that the build does not take; empty where the build is not known. `no_start` says why
    nothing starts on what stands in the unit and on disk by now, `death` how a server that failed ended.
    `is_silent`: the journal has what the manager says of it, and nothing of its own. `was_deployed`: tunerd has put a unit there.
    """

    unit: str
    is_active: bool
    systemctl: str = "systemctl"
    no_start: str | None = None
    death: Failure | None = None
    pid: int | None = None
    was_edited: bool = False
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: ProfileFile | None = None
    margin_mib: int | None = None
    settings_problem: str | None = None
    foreign_flags: tuple[str, ...] = ()
    engine: Engine | None = None
    devices: tuple[OffloadDevice, ...] | None = None
    model: ModelFacts | None = None
    model_problem: str | None = None
    draft: ModelFacts | None = None
    estimate: Estimate | None = None
    n_slots: int | None = None
    locking: Locking | None = None
    swapped_mib: MiB | None = None
    log: LogFacts | None = None
    is_silent: bool = False
    was_deployed: bool = False

    @property
    def capabilities(self) -> Capabilities | None:
        """What its build accepts."""
        return self.engine.capabilities if self.engine is not None else None

    @property
    def said(self) -> LogFacts:
        """What its log says; nothing where it cannot be read."""
        return self.log or LogFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFacts:
    """What is stored of measurements.

    `holds` tells whether the newest run of the command line that serves still counts; `changes` say
    what changed since. `newest_run` is its number, None where what serves was never measured. `break_even` says
    what would have to be measured where it is not known.
    """

    newest_run: int | None = None
    holds: bool | None = None
    changes: tuple[str, ...] = ()
    break_even: BreakEven | str = NOTHING_MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that `doctor` gathered. `server` is None where there is no unit to look at.

    `port` is what keeps the server from its address, None where that cannot be told; `own` is what is the matter with tunerd itself, by the code of the rule that tells it.
    """

    host: Host
    frequency: CpuFrequency | None = None
    driver: DriverFiles | None = None
    server: ServerFacts | None = None
    port: Sequence[Message] | None = None
    evidence: EvidenceFacts | None = None
    own: Mapping[str, Message | None] | None = None

    # Questions that several rules ask; each ends the rule that lacks the answer.

    def unit(self) -> ServerFacts:
        """The unit that serves."""
        return need(self.server, "a unit that serves")

    def settings(self) -> ProfileFile:
        """What the unit's command line sets."""
        server = self.unit()
        what = f"the settings of {server.unit}{_because(server.settings_problem)}"
        return need(server.settings, what)

    def capabilities(self) -> Capabilities:
        """What the unit's build accepts."""
        server = self.unit()
        problem = None if server.engine is None else server.engine.problem
        what = f"what the build of {server.unit} accepts{_because(problem)}"
        return need(server.capabilities, what)

    def model(self) -> ModelFacts:
        """The model that is served."""
        server = self.unit()
        return need(server.model, f"the header of the served model{_because(server.model_problem)}")

    def drafter(self) -> ModelFacts:
        """What drafts: a file of its own where the command line names one, else the model."""
        if self.settings().speculation.draft_model is None:
            return self.model()
        return need(self.unit().draft, "the header of the draft model")

    def log(self) -> LogFacts:
        """What the unit wrote since it was started."""
        server = self.unit()
        edited = "the one that runs was started with another command line"
        why = _because(edited if server.was_edited else None)
        return need(server.log, f"the log of the running server{why}")

    def traffic(self) -> Traffic:
        """What the unit answered since it was started, as far back as its log goes."""
        return need(self.log().traffic, "requests in the log of the running server")

    def cards(self) -> Sequence[Gpu]:
        """All cards; empty where there certainly are none."""
        return need(self.host.gpus, f"the GPUs{_because(self.host.gpu_problem)}")

    def used_cards(self) -> Sequence[Gpu]:
        """The cards that the server uses: where its process is, else all."""
        gpus, server = self.cards(), self.server
        if server is None or server.pid is None:
            return gpus
        own = [
            gpu
            for gpu in gpus
            if any(server.pid == one.pid or server.unit == one.unit for one in gpu.processes or ())
        ]
        return own or gpus

    def used_card(self) -> Gpu | None:
        """The largest of them; None where there is no card."""
        return max(self.used_cards(), key=lambda gpu: gpu.total_mib or 0, default=None)

    def served_card(self) -> Gpu | None:
        """The same; None also where the build of the server offloads to no device."""
        card = self.used_card()
        return None if self.server is not None and self.server.devices == () else card

    def is_starved(self) -> bool:
        """Whether the card is too small for the model, so that weights of it stay on the CPU.

        By what the engine placed where its log says so, else by the command line, else by the estimate.

        Raises:
            Missing: none of them says.
        """
        card = self.served_card()
        if card is None:
            return False
        server = self.unit()
        if server.settings is not None and experts_by_hand(server.settings):
            return True
        report = server.said.report
        placed = report.n_layers_on_gpu if report is not None else None
        if report is not None and placed is not None and placed < (report.n_layers_to_place or 0):
            return True
        if server.estimate is not None and card.total_mib is not None:
            return server.estimate.fit_needed_mib(card.total_mib, server.margin_mib or 0) > 0
        raise Missing("where the weights are: neither the log of a load nor an estimate says")


_T = TypeVar("_T")
_ORDER = (Level.ERROR, Level.WARNING, Level.NOTE)
_EXIT = {Level.ERROR: 7, Level.WARNING: 6, Level.NOTE: 0}


class Missing(Exception):
    """What a rule would have to know to tell, in words.

    It ends the rule that raises it; one that yields it has more to tell.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def need(value: _T | None, what: str) -> _T:
    """A fact without which the rule cannot tell.

    Raises:
        Missing: it is unknown.
    """
    if value is None:
        raise Missing(what)
    return value


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that may be wrong.

    `looks_for` and `why` are sentences for people, `source` says where the rule or its threshold
    comes from. `check` yields nothing where all is well, what it saw and what to do about it elsewhere, and may raise
    Missing.
    """

    code: str
    looks_for: str
    why: str
    source: str
    check: Callable[[Facts], Iterator[Message | Missing]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know, with what to do about it."""

    code: str
    severity: Level
    seen: str
    why: str
    do: str
    source: str


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A rule that could not tell, at least of a part of what it looks at."""

    code: str
    looks_for: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What all rules said: findings with the worst first, then the order of the rules."""

    findings: tuple[Finding, ...]
    not_checked: tuple[NotChecked, ...]
    passed: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 for nothing or notes, 6 for warnings, 7 for errors."""
        return max((_EXIT[finding.severity] for finding in self.findings), default=0)


def diagnose(facts: Facts, rules: Iterable[Rule]) -> Diagnosis:
    """Ask every rule."""
    findings: list[Finding] = []
    not_checked: list[NotChecked] = []
    passed: list[str] = []
    for rule in rules:
        n_before, missing = len(findings), []
        try:
            for said in rule.check(facts):
                if isinstance(said, Missing):
                    missing.append(said.what)
                else:
                    do = said.hint or "tunerd status"
                    found = Finding(rule.code, said.level, said.text, rule.why, do, rule.source)
                    findings.append(found)
        except Missing as unknown:
            missing.append(unknown.what)
        if missing:
            not_checked.append(NotChecked(rule.code, rule.looks_for, tuple(missing)))
        elif len(findings) == n_before:
            passed.append(rule.code)
    findings.sort(key=lambda finding: _ORDER.index(finding.severity))
    return Diagnosis(tuple(findings), tuple(not_checked), tuple(passed))


_OF_A_STAGE = ("n_max", "n_min", "p_min")


def _because(problem: str | None) -> str:
    return f" ({problem})" if problem else ""


def with_stages(settings: ProfileFile, argv: Sequence[str]) -> ProfileFile:
    """The same with the stages of speculation that a profile has no word for, and so leaves to the engine."""
    stages = [(kind, values) for kind, values in stages_of(argv) if kind != "none"]
    if settings.speculation.kinds or not stages:
        return settings
    words = {owner_of(word): value for word, value in itertools.pairwise(argv)}
    named = {key: words.get(f"speculation.{key}") for key in _OF_A_STAGE}
    texts = {key: text for key, text in named.items() if text is not None}
    for kind, values in stages:
        if drafts_with_probability({kind}):
            texts |= {key: values[key] for key in _OF_A_STAGE if key in values}
    found: dict[str, object] = {"type": ",".join(kind for kind, _ in stages)}
    found |= (
        {"draft_model": words["speculation.draft_model"]}
        if "speculation.draft_model" in words
        else {}
    )
    with contextlib.suppress(ValueError):  # which the engine refuses
        found |= {key: (float if key == "p_min" else int)(text) for key, text in texts.items()}
    speculation = settings.speculation.model_copy(update=found)
    return settings.model_copy(update={"speculation": speculation})


def experts_by_hand(settings: ProfileFile) -> bool:
    """Whether the command line itself keeps weights on the CPU."""
    memory = settings.memory
    return bool(
        memory.n_cpu_moe
        or memory.cpu_moe
        or memory.n_cpu_ffn
        or any(rule.rpartition("=")[2].startswith("CPU") for rule in memory.override_tensor or ())
    )
