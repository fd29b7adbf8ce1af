"""Whether a server is well, and why it is not: its answers, its last words, and the way it ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tunerd.units.manager import UnitState, cut_lines

_SIGKILL = 9
_MAX_WORDS = 400


class FailureKind(StrEnum):
    """The causes that lead to different advice."""

    OUT_OF_VRAM = "out of VRAM"
    OUT_OF_MEMORY = "out of memory"
    OUT_OF_RAM = "out of RAM"
    BAD_ARGUMENT = "argument refused"
    MODEL_MISSING = "model file missing"
    MODEL_UNREADABLE = "model file may not be read"
    MODEL_DAMAGED = "model file damaged"
    MODEL_UNSUPPORTED = "model not supported by this engine"
    NO_MTP_BLOCK = "model has no MTP block"
    PORT_TAKEN = "port taken"
    CANNOT_START = "program cannot be started"
    DRIVER = "GPU driver fault"
    CRASH = "crash"
    KILLED = "killed"
    HANG = "hang"
    GARBAGE = "garbage instead of text"
    WRONG_MODEL = "another server answers"
    NO_SPECULATION = "speculation did not start"
    STOPPED = "stopped by somebody else"
    EDITED = "edited by hand"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"


class Reason(StrEnum):
    """Why a candidate did not come up or was given up, as the search tells such ends apart."""

    OOM = "oom"
    HANG = "hang"
    CRASH = "crash"
    KILLED = "killed"
    ERROR = "error"  # it runs, and answers with one
    REFUSED = "refused"


_REASONS = {
    FailureKind.OUT_OF_VRAM: Reason.OOM,
    FailureKind.OUT_OF_MEMORY: Reason.OOM,
    FailureKind.HANG: Reason.HANG,
    FailureKind.DRIVER: Reason.CRASH,
    FailureKind.CRASH: Reason.CRASH,
    FailureKind.KILLED: Reason.KILLED,
    FailureKind.OUT_OF_RAM: Reason.KILLED,  # a larger margin of VRAM would need more RAM
    FailureKind.STOPPED: Reason.CRASH,
    FailureKind.EDITED: Reason.CRASH,
    FailureKind.INTERRUPTED: Reason.CRASH,
    FailureKind.UNKNOWN: Reason.CRASH,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A classified failure: what it was, the engine's own words for it, and what to do."""

    kind: FailureKind
    words: str
    hint: str | None

    @property
    def reason(self) -> Reason:
        """What it means for whoever tries candidates; what is not known counts as a crash."""
        return _REASONS.get(self.kind, Reason.REFUSED)


# First match wins; within the log the most specific message decides, not the last.
_PATTERNS = tuple(
    (kind, re.compile("|".join(texts)))
    for kind, *texts in (
        (
            FailureKind.PORT_TAKEN,
            r"couldn't bind (HTTP server|to server) socket|[Aa]ddress already in use",
        ),
        (
            FailureKind.BAD_ARGUMENT,
            r"(?<!CUDA )(?<!ROCm )(?<!MUSA )error: invalid argument|error: unknown argument|error while handling argument",
            r"error while handling environment variable|invalid parameter for argument",
            r"legacy speculative option|unknown speculative|expected value for argument",
            r"Unsupported cache type|Invalid cache type|requires (flash_attn|Flash Attention)",
            r"KVarN (requires|cache layer) ",
            r"SPLIT_MODE_TENSOR (not implemented|needs)|invalid value for main_gpu",
            r"cannot be used without flash attention|^sto(i|f|d|l|ul)$",
            r"limited to a single server slot|cannot be used with --fit|chat template is not supported",
            r"recompile with -DGGML_IQK_FA_ALL_QUANTS",
        ),
        (FailureKind.DRIVER, r"cudaMalloc failed: (?!out of memory)"),
        (
            FailureKind.OUT_OF_VRAM,
            r"cudaMalloc failed|CUDA error: out of memory|OutOfDeviceMemory|ErrorOutOfDeviceMemory",
            r"unable to allocate (CUDA|Vulkan|ROCm)\S* buffer",
            r"failed to allocate (CUDA|Vulkan|ROCm)\S* buffer|Unable to auto-fit model",
            r"(CUDA|Vulkan|ROCm).{0,99}out of memory|cuMemCreate|Requested buffer size exceeds device",
            r"CUDA error: (the resource allocation failed|CUBLAS_STATUS_ALLOC_FAILED)",
        ),
        (
            FailureKind.OUT_OF_MEMORY,
            r"std::bad_alloc|Cannot allocate memory|failed to allocate (\w+ )?(buffer|compute|graph)",
            r"unable to allocate \S+ buffer|insufficient memory|out of memory",
            r"failed to allocate buffer for (kv|rs) cache|what\(\): +Resource temporarily unavailable",
            r"GGML_ASSERT\((ctx->)?mem_buffer != NULL\)",
        ),
        (
            FailureKind.NO_MTP_BLOCK,
            r"doesn't contain MTP layers|failed to create MTP context",
            r"not a complete embedded MTP model|contains no MTP tail",
        ),
        (
            FailureKind.MODEL_UNSUPPORTED,
            r"un(known|supported) model architecture|wrong number of tensors|missing tensor|Oops: got unknown",
            r"has invalid ggml type|info->type < GGML_TYPE_COUNT|this software only supports up to version",
            r"cannot be used as (main model|the target model)|\(TYPE_\w{1,40} REMOVED",
            r"key not found in model|unknown pre-tokenizer type|vocabs are not compatible(?! - )",
            r"check_tensor_dims: tensor ",
        ),
        (FailureKind.MODEL_UNREADABLE, r"failed to open .{0,999}Permission denied"),
        # What the model's loader says; a backtrace and a missing library lack files too.
        (
            FailureKind.MODEL_MISSING,
            r"failed to open GGUF file|gguf_init_from_file: failed to open",
            r"loading model: failed to open",
        ),
        (
            FailureKind.MODEL_DAMAGED,
            r"invalid magic|failed to read magic|not within the file bounds|corrupted or incomplete",
            r"failed to read (tensor|key-value pairs)|invalid GGUF|corrupted model: ",
        ),
        (
            FailureKind.DRIVER,
            r"CUDA error: |no kernel image is available|CUDA driver version",
            r"failed to initialize CUDA|GPU is lost|DeviceLost",
        ),
    )
)
_ERROR_LINE = re.compile(
    r"\berror\b|failed|fatal|abort|terminate|assert|exception|exiting", re.IGNORECASE
)
# Mainline's loader says why, once for each try, and its callers behind it only that it failed.
_LOADER = re.compile(r"error loading model: ")
# That memory was not to be had is a warning here, whose words are those of an end.
_WARNING = re.compile(
    r"warning: failed to mlock|RLIMIT_MEMLOCK|of pinned memory: |for prompt cache state: "
)
# What was said before is not why it ended: it has its model, or tried again with less.
_OVERCOME = re.compile(r"[:\]] model loaded\b|retrying without pipeline parallelism")
_USAGE = re.compile(r"usage:")
USAGE_LINES = 600
"""More than any build prints of its options behind an argument that it does not understand; ik 462."""
_PORT_TAKEN, _BAD_ARGUMENT = (pattern for _, pattern in _PATTERNS[:2])
_MAX_LOOKED_AT = 2000
# How programs in general speak of an argument; a line of an engine's log is none of that.
_ARGUMENT_ERROR = re.compile(
    r"^error: |invalid value for|(unknown|unrecogni[sz]ed) (option|argument)"
    r"|to show complete usage|Available buffer types",
    re.IGNORECASE,
)
# mainline's lines, ik's, and those of builds that begin with the function's name.
_LOG = re.compile(r"(?:\d+\.\d+\.\d+\.\d+ [IWED] | *[A-Z]+ \[|(?!error: )\w+: )")
# What systemd says of a process that it could not turn into the program, and with which statuses.
# Source: systemd.exec(5), PROCESS EXIT CODES.
_NO_EXEC_LINE = re.compile(
    r"Failed at step \w+|Failed to locate executable|Unable to locate|error while loading|lookup error"
)
_NOT_EXECUTED = (
    126,  # a shell's, of what it may not execute
    127,  # a shell's, of what is not there; the loader's, of a library that is not there
    *range(200, 246),
)
_ENDED = re.compile(r"\S+\.service: Main process exited, code=(exited|killed|dumped), status=(\d+)")
_OOM_KILLED = re.compile(r"\S+\.service: .*'oom-kill'")
# Any process of the unit, which goes on without it where its OOMPolicy= says so.
_OOM_KILLED_ONE = re.compile(r"\S+\.service: .*killed by the OOM killer")
_LATE = re.compile(r"\S+\.service: (start(-pre|-post)? operation timed out)")
_MANAGER_LINE = re.compile(
    r"\S+\.service: |(Start(ing|ed)|Stopp(ing|ed)|Failed to start|Scheduled restart of) "
)
# mainline's prefix `0.00.068.815 E ` and ANSI colours say nothing.
_PREFIX = re.compile(r"^\d+\.\d+\.\d+\.\d+ [IWED] ")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

_HINTS: dict[FailureKind, str] = {
    FailureKind.OUT_OF_VRAM: (
        "raise memory.fit_mib by 128 MiB, or lower serving.ctx_size, "
        "serving.n_ubatch or speculation.n_max"
    ),
    FailureKind.OUT_OF_MEMORY: (
        "lower serving.ctx_size, serving.ctx_checkpoints or serving.cache_ram_mib, "
        "or choose a smaller model"
    ),
    FailureKind.OUT_OF_RAM: (
        "lower serving.cache_ram_mib, serving.ctx_checkpoints or serving.ctx_size, or map the weights "
        "(serving.load_mode = mmap)"
    ),
    FailureKind.BAD_ARGUMENT: "`tunerd plan PROFILE --explain` shows who set each flag",
    FailureKind.MODEL_MISSING: "`tunerd profiles show PROFILE` says where the file comes from",
    FailureKind.MODEL_UNREADABLE: (
        "let the unit's user read the file and enter its folders, or set service.user"
    ),
    FailureKind.MODEL_DAMAGED: "download the file again; it may be incomplete",
    FailureKind.MODEL_UNSUPPORTED: "`tunerd engines` lists other builds; a newer one may know it",
    FailureKind.NO_MTP_BLOCK: 'use the MTP variant of the model, or set speculation.type = "off"',
    FailureKind.PORT_TAKEN: (
        "`ss -ltnp` shows who listens there; set serving.port, or serving.host if this machine does not "
        "have that address"
    ),
    FailureKind.CANNOT_START: (
        "check that the program, the unit's user and the folders that it names exist, that the program "
        "finds its libraries (`ldd PROGRAM`) and that the user may run it"
    ),
    FailureKind.KILLED: "`journalctl -k` says whether the kernel killed it for lack of memory",
    FailureKind.DRIVER: "`nvidia-smi` and `journalctl -k` show the state of the driver",
}
_LATE_HINT = "TimeoutStartSec= of the unit limits how long its start may take, ExecStartPre= and ExecStartPost= included"


def failed(kind: FailureKind, words: str) -> Failure:
    """A failure with what to do about its kind, as far as that can be said in general."""
    return Failure(kind, words, _HINTS.get(kind))


def classify(
    lines: Sequence[str],
    *,
    exit_kind: str | None = None,
    exit_status: int | None = None,
    result: str | None = None,
) -> Failure:
    """The cause of an engine's end.

    Args:
        lines: What it wrote, oldest first, with what the manager said of it.
        exit_kind: `exited`, `killed` or `dumped`, as systemd says it; None if it still runs, or the
            manager's lines are to tell.
        exit_status: Exit status, or the signal's number.
        result: systemd's result of the unit, such as `oom-kill`.
    """
    told = [found for line in lines if (found := _ENDED.match(line)) is not None]
    if exit_kind is None and told:
        exit_kind, exit_status = told[-1][1], int(told[-1][2])
    if exit_kind == "exited" and exit_status in _NOT_EXECUTED:
        why = [line for line in lines if _NO_EXEC_LINE.search(line)]
        return failed(FailureKind.CANNOT_START, last_words(why or lines))
    by_kernel = [_OOM_KILLED]
    if exit_kind is None or (exit_kind, exit_status) == ("killed", _SIGKILL):
        by_kernel.append(_OOM_KILLED_ONE)
    if result == "oom-kill" or any(one.match(line) for one in by_kernel for line in lines):
        # Whatever it said before, it did not end of that.
        return failed(FailureKind.OUT_OF_RAM, "killed by the kernel")
    late = next((found[1] for line in lines if (found := _LATE.match(line)) is not None), None)
    if late is not None:
        return Failure(FailureKind.HANG, late, _LATE_HINT)
    telling = [line.rstrip() for line in lines if not _WARNING.search(line)]
    overcome = [at for at, line in enumerate(telling) if _OVERCOME.search(line)]
    telling = (telling[overcome[-1] + 1 :] or telling[-1:]) if overcome else telling
    for kind, pattern in _PATTERNS:
        words = next((line for line in telling if pattern.search(line)), None)
        if words is not None:
            return failed(kind, clean_line(words))
    words = last_words(telling)
    if exit_kind == "killed" and exit_status == _SIGKILL:  # by whom, it does not say
        return failed(FailureKind.KILLED, f"signal 9; {words}")
    if exit_kind in {"killed", "dumped"}:
        return Failure(FailureKind.CRASH, f"signal {exit_status}; {words}", None)
    return Failure(FailureKind.UNKNOWN, words, None)


def says_port_taken(lines: Sequence[str]) -> bool:
    """Whether an engine says that it could not have its port."""
    return any(_PORT_TAKEN.search(line[:_MAX_LOOKED_AT]) for line in lines)


def said_itself(lines: Sequence[str]) -> list[str]:
    """What the program wrote, without what the service manager says of its unit."""
    return [line for line in lines if line.strip() and not _MANAGER_LINE.match(line)]


def without_usage(lines: Sequence[str]) -> list[str]:
    """Lines without the options that a program prints behind what it says, with all of its manager's."""
    begin = next((n for n, line in enumerate(lines) if n and _USAGE.match(line)), len(lines))
    return [*lines[:begin], *filter(_MANAGER_LINE.match, lines[begin:])]


def last_words(lines: Sequence[str]) -> str:
    """The line that most likely tells a person why: the loader's, else the last error, else the last line.

    What the service manager says of the unit counts only where the program itself said nothing.
    """
    said = said_itself(lines) or [line for line in lines if line.strip()]
    said = without_usage(said)
    errors = [line for line in said if _LOADER.search(line)] or [
        line for line in said if _ERROR_LINE.search(line)
    ]
    telling = errors[-1] if errors else (said[-1] if said else "it said nothing")
    return clean_line(telling)


def clean_line(line: str) -> str:
    """A log line without prefix and control characters, bounded."""
    text = _PREFIX.sub("", _COLOUR.sub("", line.strip()))
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_MAX_WORDS]


def argument_error(returncode: int | None, output: str) -> str | None:
    """What a dry run with a missing model file complained about; None if the arguments are good.

    Every family checks arguments before it looks for the model, and prints what is wrong with one
    itself, at the start of a line, before its log begins. The log comes from a thread that may be
    slower than the end of the process, so it may be cut anywhere, in mid-line too: that it lacks
    the missing file says nothing. Source: dry runs of seven builds.

    Args:
        returncode: None where a signal ended it, which good arguments do not lead to.
        output: What it wrote.
    """
    lines = cut_lines(_COLOUR.sub("", output))
    for line in lines:
        if _BAD_ARGUMENT.search(line) or (_speaks_of_argument(line) and not _LOG.match(line)):
            return clean_line(line)
    is_answered_with_usage = returncode != 0 and any(_USAGE.match(line) for line in lines)
    return last_words(lines) if is_answered_with_usage or returncode is None else None


def _speaks_of_argument(line: str) -> bool:
    words = line.lower()
    return ("invalid" in words and "argument" in words) or _ARGUMENT_ERROR.search(line) is not None


RUN_OF_ONE_TOKEN = 16
WHOLLY_REPEATED = 1.0
_LONGEST_TOKEN = 16  # letters, of those that stand for nothing: `<unused49>`
_RUN_LETTERS, _LEAST_REPEATED = 24, 80
_KNOWN_SHARE, _LEAST_SHARE, _SHARE_OF_SHORT = 0.9, 0.1, 0.4
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
    `is_asked` unless nobody can ask it. `may_refuse`: it is not of our making, and may be a server of another
    kind, such as a router, which answers that it does not generate. `is_container`: others hold its port for it.
    """

    old_invocation: str | None
    alias: str | None
    expects_draft: bool
    must_draft: bool = False
    n_restarts: int = 0
    is_asked: bool = True
    may_refuse: bool = False
    is_container: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a starting server.

    `listener_pid` is the process that owns the port, None if that could not be told.
    """

    at_s: float
    unit: UnitState
    http: HttpState
    listener_pid: int | None
    alias: str | None


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
    stall_s: float,
    limit_s: float,
) -> Lost | str | None:
    """What an observation means: None once it answers, what to tell people as long as one should wait.

    Args:
        now: The latest look.
        first_s: When the waiting began, on the observations' clock.
        moved_s: When the loading last made progress.
        expected: Who should answer.
        stall_s: So long without any sign of loading means a hang.
        limit_s: The end in any case.
    """
    unit = now.unit
    if unit.has_failed or unit.active_state == "inactive":
        return Lost(None, f"the unit is {unit.active_state} ({unit.result})")
    if (unit.n_restarts or 0) > expected.n_restarts:
        return Lost(None, f"it ended and was started again {unit.n_restarts} times")
    is_new = unit.invocation_id != expected.old_invocation or expected.old_invocation is None
    runs = unit.is_active and is_new and unit.main_pid is not None
    if runs and not expected.is_asked:
        return None
    # What answers is in time, however late somebody looks.
    if runs and now.http in {HttpState.READY, HttpState.WRONG}:
        return _judge_answer(now, expected)
    if now.at_s - first_s > limit_s:
        return Lost(FailureKind.HANG, f"not ready after {limit_s:.0f} s")
    if now.at_s - moved_s > stall_s:
        return Lost(FailureKind.HANG, f"no sign of progress for {stall_s:.0f} s")
    if not runs:
        return "waiting for the process"
    return "loading the model" if now.http is HttpState.LOADING else "starting"


def _judge_answer(now: Observation, expected: Expectation) -> Lost | None:
    if now.listener_pid not in {None, now.unit.main_pid}:
        text = f"process {now.listener_pid} answers on the port, not the unit"
        return Lost(FailureKind.PORT_TAKEN, text)
    if now.http is HttpState.WRONG:
        return Lost(FailureKind.WRONG_MODEL, "what answers there is not a llama-server")
    # Of several names mainline tells one, ik all of them as one text.
    names, told = _names(expected.alias), _names(now.alias)
    if names and told and names.isdisjoint(told):
        return Lost(
            FailureKind.WRONG_MODEL,
            f"it serves `{(now.alias or '')[:100]}`, not `{expected.alias}`",
        )
    return None


def _names(alias: str | None) -> set[str]:
    """Of a text with commas; builds take the blanks around them away."""
    return {name for one in (alias or "").split(",") if (name := one.strip())}


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request, as far as it could be read.

    `is_refused`: there was an answer, and it says that this server does not do that, or not for us.
    `wants_key`: it refuses because it was asked without a key.
    """

    text: str | None = None
    n_predicted: int | None = None
    n_drafted: int | None = None
    problem: str | None = None
    timed_out: bool = False
    is_refused: bool = False
    wants_key: bool = False
    n_accepted: int | None = None


def judge_generation(completion: Completion) -> Lost | None:
    """What is wrong with the first real generation; None if nothing is."""
    if completion.problem is not None:
        return Lost(FailureKind.GARBAGE, completion.problem)
    if not completion.n_predicted:
        return Lost(FailureKind.GARBAGE, "the answer holds no tokens")
    why = why_garbage(completion.text or "", completion.n_predicted)
    return None if why is None else Lost(FailureKind.GARBAGE, why)


def why_garbage(text: str, n_predicted: int) -> str | None:
    """Why an answer of so many tokens is none that a model writes; None where it may be.

    It is undecodable, or one token over and over, which is how a broken kernel or a damaged model shows.
    """
    if text.count(_REPLACEMENT) * 2 > len(text):
        return "the answer is not readable text"
    if repeated_ratio(text, n_predicted) == WHOLLY_REPEATED:
        return f"the answer repeats one token: {text.strip()[:20]!r}"
    return None


def repeated_ratio(text: str, n_predicted: int) -> float | None:
    """The share of an answer, at its end, that only says again what it said; 0 where it does not.

    That is its longest end of which nine tenths stand in runs of letters that came before, of
    80 letters (of a short answer two fifths) and a tenth of the answer at least, so that a counter or a slip of
    sampling does not hide a loop. 1 is one token over and over. None where so few tokens tell nothing.

    Source: docs/benchmarks.md, Answers that repeat themselves.
    """
    solid = text.strip()
    n = len(solid)
    if n_predicted < RUN_OF_ONE_TOKEN or not n:
        return None
    for size in range(1, min(_LONGEST_TOKEN, n // RUN_OF_ONE_TOKEN) + 1):
        if solid[size:] == solid[:-size]:
            return WHOLLY_REPEATED
    known, seen = bytearray(n), set[str]()
    for at in range(n - _RUN_LETTERS + 1):
        run = solid[at : at + _RUN_LETTERS]
        if run in seen:
            known[at : at + _RUN_LETTERS] = _RUN_LETTERS * b"\1"
        seen.add(run)
    n_known = longest = 0
    for length, is_known in enumerate(reversed(known), start=1):
        n_known += is_known
        longest = length if is_known and n_known >= _KNOWN_SHARE * length else longest
    least = max(min(_LEAST_REPEATED, _SHARE_OF_SHORT * n), _LEAST_SHARE * n)
    return longest / n if longest >= least else 0.0


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
