"""What a server says about its own memory: buffer lines and breakdown tables of its log.

mainline prints a table for each dry run of its fit, for the target and for what drafts, and one for
the target alone when it exits; it and ik_llama.cpp print a line per buffer that they allocate.
mainline needs `--log-verbosity 4` for either.

Source: logs of builds of April to November 2026 (mainline, ik_llama.cpp, BeeLlama).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tunerd.core.memory_parts import Device

_MIB = r"(?P<mib>\d+(?:\.\d+)?) MiB"
_BUFFER = re.compile(
    rf"(?P<label>\S+)\s+(?:(?P<kind>model|KV|RS|compute|output|per-step|shadow) )?"
    rf"buffer(?: size)? =\s*{_MIB}"
)
_TABLE = re.compile(r"\| memory breakdown \[MiB\]\s*\|")
_DEVICE_ROW = re.compile(
    r"\|\s+- (?P<label>[^|]+?)\s*\|\s*(?P<total>\d+) =\s*(?P<free>\d+) \+ \(\s*(?P<self>\d+) =\s*"
    r"(?P<model>\d+) \+\s*(?P<context>\d+) \+\s*(?P<compute>\d+)\) \+\s*(?P<unaccounted>-?\d+) \|"
)
_HOST_ROW = re.compile(
    r"\|\s+- (?P<label>[^|]+?)\s*\|\s*(?P<self>\d+) =\s*(?P<model>\d+) \+\s*(?P<context>\d+) \+\s*"
    r"(?P<compute>\d+)\s*\|"
)
_OFFLOADED = re.compile(r"offloaded (?P<on_gpu>\d+)/(?P<all>\d+) layers to GPU")
_SPLITS = re.compile(r"graph(?:: nodes = \d+,)? splits = (?P<splits>\d+)")
_N_CTX = re.compile(r"\bn_ctx\s+= (?P<n_ctx>\d+)")
# Labels of buffers in RAM: plain, mapped, repacked for the CPU, or pinned for a GPU.
_HOST_LABEL = re.compile(r"CPU|Host$|.*_Host$")
_CONTEXT_BEGINS = re.compile(r"constructing llama_context|llama_init_from_model: n_ctx  ")
_MAX_LINE = 2000


class BufferKind(StrEnum):
    """What a buffer line is about."""

    MODEL = "model"
    KV = "kv"
    STATE = "state"
    COMPUTE = "compute"
    OUTPUT = "output"


class TableRole(StrEnum):
    """Whose memory a table shows."""

    TARGET = "target"
    DRAFT = "draft"
    AT_EXIT = "at exit"


_KINDS = {
    None: BufferKind.MODEL,
    "model": BufferKind.MODEL,
    "KV": BufferKind.KV,
    "RS": BufferKind.STATE,
    "per-step": BufferKind.STATE,
    "shadow": BufferKind.STATE,
    "compute": BufferKind.COMPUTE,
    "output": BufferKind.OUTPUT,
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation. `context` is 0 for the model, 1 for the target's context, 2 for the next."""

    kind: BufferKind
    label: str
    mib: float
    context: int

    @property
    def device(self) -> Device:
        """Where it is."""
        return Device.HOST if _HOST_LABEL.match(self.label) else Device.GPU


@dataclass(frozen=True, slots=True)
class Row:
    """One device of a table, in MiB; `total_mib`, `free_mib` are None for the host.

    `self_mib` is the sum of the three as the server rounds it.
    """

    label: str
    self_mib: int
    model_mib: int
    context_mib: int
    compute_mib: int
    total_mib: int | None
    free_mib: int | None

    @property
    def device(self) -> Device:
        """Where it is."""
        return Device.HOST if _HOST_LABEL.match(self.label) else Device.GPU


@dataclass(frozen=True, slots=True)
class Table:
    """One memory breakdown."""

    role: TableRole
    rows: tuple[Row, ...]

    def mib(self, device: Device, *, with_model: bool = True) -> int:
        """What is taken on a device."""
        rows = [row for row in self.rows if row.device is device]
        return sum(row.self_mib - (0 if with_model else row.model_mib) for row in rows)

    def models(self) -> tuple[int, ...]:
        """The model's MiB by device, to see whether two tables show the same model."""
        return tuple(row.model_mib for row in self.rows)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What the log says; empty tuples and None where it says nothing.

    `buffers` are those of the last load, dry runs left out. `n_layers_on_gpu` of
    `n_layers_to_place` counts the output layer, and is printed even where there is no GPU.
    """

    buffers: tuple[Buffer, ...]
    tables: tuple[Table, ...]
    n_ctx: int | None
    n_layers_on_gpu: int | None
    n_layers_to_place: int | None
    n_splits: int | None

    def allocated_mib(self, device: Device, *kinds: BufferKind) -> float | None:
        """Sum of the buffers of these kinds (all without any) on a device; None without buffers.

        Weights that are repacked for the CPU count once where the file is mapped: the pages that
        they came from are not needed any more.
        """
        if not self.buffers:
            return None
        is_mapped = any(buffer.label.endswith("_Mapped") for buffer in self.buffers)
        return sum(
            buffer.mib
            for buffer in self.buffers
            if (not kinds or buffer.kind in kinds)
            and buffer.device is device
            and not (is_mapped and buffer.label.endswith("_REPACK"))
        )

    def planned_mib(self, device: Device) -> int | None:
        """What the first dry run expects on a device, with what drafts; None without a dry run."""
        targets = [table for table in self.tables if table.role is TableRole.TARGET]
        drafts = [table for table in self.tables if table.role is TableRole.DRAFT]
        if not targets:
            return None
        total = targets[0].mib(device)
        if drafts:
            is_same_model = drafts[0].models() == targets[0].models()
            total += drafts[0].mib(device, with_model=not is_same_model)
        return total

    def at_exit_mib(self, device: Device) -> int | None:
        """What the target held when the server exited, without what drafted."""
        ends = [table for table in self.tables if table.role is TableRole.AT_EXIT]
        return ends[-1].mib(device) if ends else None


class _Reader:
    """Goes through a log once."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tables: list[tuple[TableRole, list[Row]]] = []
        self.numbers: dict[str, int] = {}
        self._next_role = TableRole.TARGET
        self._context = 0
        self._in_models = False

    def read(self, line: str) -> None:
        """Take in one line."""
        if _CONTEXT_BEGINS.search(line):
            self._context += 1
            self._details(line)
        elif _TABLE.search(line):
            self.tables.append((self._next_role, []))
        elif "cleaning up before exit" in line:
            self._next_role = TableRole.AT_EXIT
        elif "memory data for the extra model" in line:
            self._next_role = TableRole.DRAFT
        elif "getting device memory data for" in line:
            self._next_role = TableRole.TARGET
        elif "[spec] estimated memory usage" in line and self.tables:
            # Builds of summer 2026 measure what drafts first and say so afterwards.
            self.tables[-1] = (TableRole.DRAFT, self.tables[-1][1])
        else:
            self._details(line)

    def _details(self, line: str) -> None:
        row = _DEVICE_ROW.search(line) or _HOST_ROW.search(line)
        if row is not None and self.tables:
            self.tables[-1][1].append(_row(row))
            return
        buffer = _BUFFER.search(line)
        if buffer is not None:
            self._buffer(buffer)
            return
        for pattern in (_OFFLOADED, _SPLITS, _N_CTX):
            found = pattern.search(line)
            if found is not None:
                self.numbers.update({name: int(text) for name, text in found.groupdict().items()})

    def _buffer(self, found: re.Match[str]) -> None:
        """A buffer; a new model's first one forgets an earlier load that was a dry run.

        A context that plans its compute buffer again replaces the earlier plan.
        """
        kind, label, mib = _KINDS[found["kind"]], found["label"], float(found["mib"])
        if kind is BufferKind.MODEL and not self._in_models:
            loaded = (one.mib for one in self.buffers if one.kind is BufferKind.MODEL)
            if not any(loaded):
                self.buffers.clear()
            self._context = 0
        self._in_models = kind is BufferKind.MODEL
        context = 0 if self._in_models else max(1, self._context)
        if kind is BufferKind.COMPUTE:
            same = (kind, label, context)
            self.buffers = [
                one for one in self.buffers if (one.kind, one.label, one.context) != same
            ]
        self.buffers.append(Buffer(kind, label, mib, context))


def _row(found: re.Match[str]) -> Row:
    fields = found.groupdict()
    return Row(
        label=fields["label"],
        self_mib=int(fields["self"]),
        model_mib=int(fields["model"]),
        context_mib=int(fields["context"]),
        compute_mib=int(fields["compute"]),
        total_mib=int(fields["total"]) if "total" in fields else None,
        free_mib=int(fields["free"]) if "free" in fields else None,
    )


def parse_report(lines: Iterable[str]) -> MemoryReport:
    """What a log says about memory; lines that say nothing of it are passed over."""
    reader = _Reader()
    for line in lines:
        reader.read(line[:_MAX_LINE])
    if not any(buffer.mib for buffer in reader.buffers if buffer.kind is BufferKind.MODEL):
        reader.buffers = []
    return MemoryReport(
        buffers=tuple(reader.buffers),
        tables=tuple(Table(role, tuple(rows)) for role, rows in reader.tables),
        n_ctx=reader.numbers.get("n_ctx"),
        n_layers_on_gpu=reader.numbers.get("on_gpu"),
        n_layers_to_place=reader.numbers.get("all"),
        n_splits=reader.numbers.get("splits"),
    )
