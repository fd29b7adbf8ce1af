"""What the rules look at; None is unknown everywhere, except where a field says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tunerd.core.doctor.break_even import NOTHING_MEASURED, BreakEven
from tunerd.core.doctor.server_log import LogFacts
from tunerd.core.engine import Capabilities, Engine, OffloadDevice
from tunerd.core.host import CpuFrequency, DriverFiles, Gpu, Host
from tunerd.core.memory_parts import Estimate
from tunerd.core.model import ModelFacts
from tunerd.core.profile import ProfileFile
from tunerd.core.quantity import MiB

MTP = "mtp"
NO_GRAPHS = "GGML_CUDA_DISABLE_GRAPHS"
PLAIN_TYPES = frozenset({"f32", "f16", "bf16"})
DEFAULT_KV_TYPE = "f16"  # of every build that was probed
_NO_SPECULATION = (None, "off")


@dataclass(frozen=True, slots=True)
class Locking:
    """How much a process may lock, and has locked; `limit_mib` is None when unlimited."""

    is_unlimited: bool
    limit_mib: MiB | None
    locked_mib: MiB | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """The unit that serves, or would.

    `argv` is the command of the unit's text. Where the process that runs was started with another one,
    `was_edited` is true, and what only this process shows (slots, locks, log) is unknown.
    `settings` are the keys that its command line and environment set; what they leave to the build
    is None there. `settings_problem` says why they cannot be read. `foreign_flags` are flags on the
    command line that the build does not take; empty where the build is not known.
    """

    unit: str
    is_active: bool
    pid: int | None = None
    was_edited: bool = False
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: ProfileFile | None = None
    settings_problem: str | None = None
    foreign_flags: tuple[str, ...] = ()
    engine: Engine | None = None
    devices: tuple[OffloadDevice, ...] | None = None
    model: ModelFacts | None = None
    model_problem: str | None = None
    estimate: Estimate | None = None
    n_slots: int | None = None
    locking: Locking | None = None
    swapped_mib: MiB | None = None
    log: LogFacts | None = None

    @property
    def capabilities(self) -> Capabilities | None:
        """What its build accepts."""
        return self.engine.capabilities if self.engine is not None else None


@dataclass(frozen=True, slots=True)
class GraphControl:
    """By how much decoding is faster without CUDA graphs: 0.04 is 4 %, below 0 it is slower.

    `low` and `high` bound it at 95 %; None where there were too few pairs of fresh servers.
    """

    gain: float
    low: float | None
    high: float | None
    n_pairs: int


@dataclass(frozen=True, slots=True)
class KeptControl:
    """The newest control run of the command line that serves, and whether it still counts.

    `holds` is None where that cannot be told; `changes` say what changed since, or is unknown.
    """

    run: int
    control: GraphControl
    holds: bool | None
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFacts:
    """What is stored of measurements.

    `holds` tells whether the newest run of the command line that serves still counts; `changes` say
    what changed since. `newest_run` is its number, None where what serves was never measured.
    `damage` names what of the store could not be read.
    """

    n_runs: int
    newest_run: int | None = None
    holds: bool | None = None
    changes: tuple[str, ...] = ()
    break_even: BreakEven | None = None
    no_break_even: str = NOTHING_MEASURED
    damage: tuple[str, ...] = ()
    graphs: KeptControl | None = None


@dataclass(frozen=True, slots=True)
class PortFacts:
    """Where the server listens or would; `others` are the processes of others that listen there."""

    port: int
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that `doctor` gathered. `server` is None where there is no unit to look at."""

    host: Host
    frequency: CpuFrequency | None = None
    driver: DriverFiles | None = None
    server: ServerFacts | None = None
    port: PortFacts | None = None
    evidence: EvidenceFacts | None = None
    graphs: GraphControl | None = None

    def card(self) -> Gpu | None:
        """The GPU that the server uses, as far as can be told: where its process is, else the largest."""
        gpus = self.host.gpus or ()
        pid = self.server.pid if self.server is not None else None
        if pid is not None:
            for gpu in gpus:
                if any(process.pid == pid for process in gpu.processes or ()):
                    return gpu
        return max(gpus, key=lambda gpu: gpu.total_mib or 0, default=None)


def speculates(settings: ProfileFile) -> bool:
    """Whether a command line asks for any kind of speculation."""
    return settings.speculation.type not in _NO_SPECULATION
