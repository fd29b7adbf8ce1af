"""What a server's own log says that no other fact does.

How its build was made, what it refused to do, and the traffic that it served, of which these lines
hold counts and times and no text.

Source: logs of mainline of April to November 2026 and of ik_llama.cpp of June and August 2026; the
words of CUDA builds from the sources of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunerd.core.memory_report import MemoryReport, parse_report
from tunerd.core.own_requests import of_others
from tunerd.core.request_log import read_requests
from tunerd.core.sample import Timings

_SYSTEM_INFO = re.compile(r"system_info: n_threads")
_CUDA_PART = re.compile(r"\| CUDA : (?P<part>[^:]{1,400}?)(?: \| [A-Za-z]\w* :|$)")
_ARCHITECTURES = re.compile(r"\bARCHS = (?P<list>[0-9a-z,; ]{1,200}?)(?: \||$)")
_MLOCK_REFUSED = "failed to mlock"
_MAPPED_OVERRIDES = "tensor overrides to CPU are used with mmap enabled"
_MISPLACED = re.compile(
    r"is assigned to device CPU but the fused .{1,80} tensor is assigned to device"
)
_NO_KERNEL = "no kernel image is available"
_SLOTS = re.compile(r"\bn_slots = (?P<n>\d{1,4})\b")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that a server answered, summed: tokens processed, generated, drafted and accepted.

    `n_prompt` leaves out what came from the cache. `n_drafted` is 0 where nothing was drafted.
    """

    n_requests: int
    n_prompt: int
    n_predicted: int
    n_drafted: int
    n_accepted: int

    @property
    def acceptance_ratio(self) -> float | None:
        """Accepted over drafted; None where nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @property
    def n_steps(self) -> int:
        """Verification steps: every generated token but the first and the accepted ones took one."""
        return self.n_predicted - self.n_requests - self.n_accepted

    @property
    def drafted_per_step(self) -> float | None:
        """Mean drafted tokens of a step."""
        return self.n_drafted / self.n_steps if self.n_steps > 0 else None

    @property
    def accepted_per_step(self) -> float | None:
        """Mean accepted tokens of a step."""
        return self.n_accepted / self.n_steps if self.n_steps > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """What the log of one life of a server says.

    `has_cuda`, `cuda_architectures` and `has_all_kv_pairs` come from its line about the system, and are
    None where the log does not reach back to it. `has_start` tells whether it reaches back to the load.
    """

    has_cuda: bool | None = None
    cuda_architectures: tuple[int, ...] | None = None
    has_all_kv_pairs: bool | None = None
    has_start: bool = False
    mlock_refused: bool = False
    maps_overridden_tensors: bool = False
    lacks_kernels: bool = False
    has_misplaced_layers: bool = False
    n_slots: int | None = None
    traffic: Traffic | None = None
    report: MemoryReport | None = None


def read_server_log(lines: Sequence[str], own: Sequence[Timings] = ()) -> LogFacts | None:
    """The facts in the log of one life of a server; None where there are no lines.

    Requests that were `own` measurements are no traffic.
    """
    if not lines:
        return None
    report = parse_report(lines)
    info = next((line for line in reversed(lines) if _SYSTEM_INFO.search(line)), None)
    cuda = _CUDA_PART.search(info) if info is not None else None
    slots = [int(found["n"]) for line in lines if (found := _SLOTS.search(line)) is not None]
    return LogFacts(
        has_cuda=None if info is None else cuda is not None,
        cuda_architectures=_architectures(cuda["part"]) if cuda is not None else None,
        has_all_kv_pairs=None if cuda is None else "FA_ALL_QUANTS = 1" in cuda["part"],
        has_start=bool(report.buffers),
        mlock_refused=_says(lines, _MLOCK_REFUSED),
        maps_overridden_tensors=_says(lines, _MAPPED_OVERRIDES),
        lacks_kernels=_says(lines, _NO_KERNEL),
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
    )
