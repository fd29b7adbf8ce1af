"""Why an engine failed, from its own last words and the way it ended.

Source: the messages were seen from real builds (mainline of April to November 2026, ik of June and
August 2026, BeeLlama of May 2026) on the CPU and on a software GPU; CUDA's own texts are from the
engines' sources and public reports.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_SIGKILL = 9
_MAX_WORDS = 400


class FailureKind(StrEnum):
    """The causes that lead to different advice."""

    OUT_OF_VRAM = "out of VRAM"
    OUT_OF_MEMORY = "out of memory"
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
    HANG = "hang"
    GARBAGE = "garbage instead of text"
    WRONG_MODEL = "another server answers"
    NO_SPECULATION = "speculation did not start"
    STOPPED = "stopped by somebody else"
    EDITED = "edited by hand"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Failure:
    """A classified failure: what it was, the engine's own words for it, and what to do."""

    kind: FailureKind
    words: str
    hint: str | None


# First match wins; within the log the most specific message decides, not the last.
_TEXTS: tuple[tuple[FailureKind, str], ...] = (
    (
        FailureKind.PORT_TAKEN,
        r"couldn't bind (HTTP server|to server) socket|[Aa]ddress already in use",
    ),
    (
        FailureKind.BAD_ARGUMENT,
        (
            r"error: invalid argument|error: unknown argument|error while handling argument"
            r"|error while handling environment variable|invalid parameter for argument"
            r"|legacy speculative option|unknown speculative|expected value for argument"
            r"|Unsupported cache type|Invalid cache type|requires flash_attn"
            r"|cannot be used without flash attention|^sto(i|f|d|l|ul)$"
            r"|limited to a single server slot|cannot be used with --fit"
        ),
    ),
    (
        FailureKind.OUT_OF_VRAM,
        (
            r"cudaMalloc failed|CUDA error: out of memory|OutOfDeviceMemory|ErrorOutOfDeviceMemory"
            r"|unable to allocate (CUDA|Vulkan|ROCm)\S* buffer"
            r"|failed to allocate (CUDA|Vulkan|ROCm)\S* buffer|Unable to auto-fit model"
            r"|(CUDA|Vulkan|ROCm).*out of memory|cuMemCreate|Requested buffer size exceeds device"
        ),
    ),
    (
        FailureKind.OUT_OF_MEMORY,
        (
            r"std::bad_alloc|Cannot allocate memory|failed to allocate (\w+ )?(buffer|compute|graph)"
            r"|unable to allocate \S+ buffer|insufficient memory|out of memory"
            r"|failed to allocate buffer for (kv|rs) cache|what\(\): +Resource temporarily unavailable"
        ),
    ),
    (
        FailureKind.NO_MTP_BLOCK,
        r"doesn't contain MTP layers|failed to create MTP context|not a complete embedded MTP model",
    ),
    (
        FailureKind.MODEL_UNSUPPORTED,
        r"unknown model architecture|wrong number of tensors|missing tensor|Oops: got unknown",
    ),
    (
        FailureKind.MODEL_UNREADABLE,
        r"failed to open .*Permission denied",
    ),
    (
        FailureKind.MODEL_MISSING,
        r"failed to open GGUF file|gguf_init_from_file: failed to open|No such file or directory",
    ),
    (
        FailureKind.MODEL_DAMAGED,
        (
            r"invalid magic|failed to read magic|not within the file bounds|corrupted or incomplete"
            r"|failed to read (tensor|key-value pairs)|invalid GGUF"
        ),
    ),
    (
        FailureKind.DRIVER,
        (
            r"CUDA error: (?!out of memory)|no kernel image is available|CUDA driver version"
            r"|failed to initialize CUDA|GPU is lost"
        ),
    ),
)
_PATTERNS = tuple((kind, re.compile(text)) for kind, text in _TEXTS)
_ERROR_LINE = re.compile(
    r"\berror\b|failed|fatal|abort|terminate|assert|exception|exiting", re.IGNORECASE
)
_WARNING = re.compile(r"warning: failed to mlock|RLIMIT_MEMLOCK")
_USAGE = re.compile(r"usage:")
_BAD_ARGUMENT = next(pattern for kind, pattern in _PATTERNS if kind is FailureKind.BAD_ARGUMENT)
# How programs in general speak of an argument; a line of an engine's log is none of that.
_ARGUMENT_ERROR = re.compile(
    r"^(\x1b\[[0-9;]*m)*error: |invalid.*argument|argument.*invalid|invalid value for|unknown (option|argument)"
    r"|unrecogni[sz]ed (option|argument)|to show complete usage|Available buffer types",
    re.IGNORECASE,
)
# mainline's lines, ik's, and those of builds that begin with the function's name.
_LOG = re.compile(r"(?:\x1b\[[0-9;]*m)*(?:\d+\.\d+\.\d+\.\d+ [IWED] | *[A-Z]+ \[|(?!error: )\w+: )")
_STOP_LINE = re.compile(r"Stopping( .+\.\.\.)?")
# What systemd says of a process that it could not turn into the program, and with which statuses.
# Source: systemd.exec(5), PROCESS EXIT CODES.
_NO_EXEC_LINE = re.compile(r"Failed at step \w+|Failed to locate executable|Unable to locate")
_NOT_EXECUTED = range(200, 246)
_MANAGER_LINE = re.compile(
    r"\S+\.service: |(Start(ing|ed)|Stopp(ing|ed)|Failed to start|Scheduled restart of) "
)
# mainline's prefix `0.00.068.815 E ` and the ANSI colours of old builds say nothing.
_PREFIX = re.compile(r"^(?:\x1b\[[0-9;]*m)*(?:\d+\.\d+\.\d+\.\d+ [IWED] )?")

_HINTS: dict[FailureKind, str] = {
    FailureKind.OUT_OF_VRAM: (
        "raise memory.fit_mib by a step (1664, 1792, 2048 ...), or lower serving.ctx_size, "
        "serving.n_ubatch or speculation.n_max"
    ),
    FailureKind.OUT_OF_MEMORY: (
        "lower serving.ctx_size, serving.ctx_checkpoints or serving.cache_ram_mib, "
        "or choose a smaller model"
    ),
    FailureKind.BAD_ARGUMENT: "`tunerd plan PROFILE --explain` shows who set each flag",
    FailureKind.MODEL_MISSING: "`tunerd profiles show PROFILE` says where the file comes from",
    FailureKind.MODEL_UNREADABLE: (
        "let the unit's user read the file and enter its folders, or set service.user"
    ),
    FailureKind.MODEL_DAMAGED: "fetch the file again; its download may have been cut short",
    FailureKind.MODEL_UNSUPPORTED: "`tunerd engines` lists other builds; a newer one may know it",
    FailureKind.NO_MTP_BLOCK: 'use the MTP variant of the model, or set speculation.type = "off"',
    FailureKind.PORT_TAKEN: (
        "`ss -ltnp` shows who listens there; set serving.port, or serving.host if that address is "
        "not one of this machine"
    ),
    FailureKind.CANNOT_START: "check that the program is there and may be run by the unit's user",
    FailureKind.DRIVER: "`nvidia-smi` and `journalctl -k` show the state of the driver",
}


def hint_for(kind: FailureKind) -> str | None:
    """What to do about a failure of this kind, as far as that can be said in general."""
    return _HINTS.get(kind)


def classify(
    lines: Sequence[str],
    *,
    exit_kind: str | None = None,
    exit_status: int | None = None,
    result: str | None = None,
) -> Failure:
    """The cause of an engine's end.

    Args:
        lines: What it wrote, oldest first.
        exit_kind: `exited`, `killed` or `dumped`, as systemd says it; None if it still runs.
        exit_status: Exit status, or the signal's number.
        result: systemd's result of the unit, such as `oom-kill`.
    """
    if exit_kind == "exited" and exit_status in _NOT_EXECUTED:
        why = [line for line in lines if _NO_EXEC_LINE.search(line)]
        hint = _HINTS[FailureKind.CANNOT_START]
        return Failure(FailureKind.CANNOT_START, last_words(why or lines), hint)
    # That memory could not be locked is a warning, whose words are those of an end.
    telling = [line.rstrip() for line in lines if not _WARNING.search(line)]
    for kind, pattern in _PATTERNS:
        words = next((line for line in telling if pattern.search(line)), None)
        if words is not None:
            return Failure(kind, clean_line(words), _HINTS.get(kind))
    words = last_words(lines)
    if result == "oom-kill" or (exit_kind == "killed" and exit_status == _SIGKILL):
        words = words if result != "oom-kill" else "killed by the kernel: out of memory"
        return Failure(FailureKind.OUT_OF_MEMORY, words, _HINTS[FailureKind.OUT_OF_MEMORY])
    if exit_kind in {"killed", "dumped"}:
        return Failure(FailureKind.CRASH, f"signal {exit_status}; {words}", None)
    return Failure(FailureKind.UNKNOWN, words, None)


def was_stopped(lines: Sequence[str]) -> bool:
    """Whether a service manager was asked to end it: it says so, and says nothing of an own end.

    Source: job_start_message_format of systemd 249 to 262; tunerd's own supervisor.
    """
    return any(_STOP_LINE.fullmatch(line.strip()) for line in lines)


def last_words(lines: Sequence[str]) -> str:
    """The line that most likely tells a person why: the last error, else the last line.

    What the service manager says of the unit counts only where the program itself said nothing.
    """
    said = [line for line in lines if line.strip()]
    said = [line for line in said if not _MANAGER_LINE.match(line)] or said
    usage = next((n for n, line in enumerate(said) if n and _USAGE.match(line)), len(said))
    said = said[:usage]  # ik prints all its options after the one that it did not understand
    errors = [line for line in said if _ERROR_LINE.search(line)]
    telling = errors[-1] if errors else (said[-1] if said else "it said nothing")
    return clean_line(telling)


def clean_line(line: str) -> str:
    """A log line without prefix and control characters, bounded."""
    text = _PREFIX.sub("", line.strip())
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
    lines = output.splitlines()
    for line in lines:
        if _BAD_ARGUMENT.search(line) or (_ARGUMENT_ERROR.search(line) and not _LOG.match(line)):
            return clean_line(line)
    is_answered_with_usage = returncode != 0 and any(_USAGE.match(line) for line in lines)
    return last_words(lines) if is_answered_with_usage or returncode is None else None
