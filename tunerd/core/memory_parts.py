"""What an estimate of memory is made of: parts on devices, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tunerd.core.quantity import MiB, have_mib, need_mib


class Device(StrEnum):
    """Where memory is: the GPU, or the machine's RAM."""

    GPU = "gpu0"
    HOST = "host"


class PartKind(StrEnum):
    """What memory is for."""

    WEIGHTS = "weights"
    MTP_WEIGHTS = "mtp weights"
    KV = "kv cache"
    STATE = "recurrent state"
    MTP_KV = "mtp kv cache"
    COMPUTE = "compute buffer"
    MTP_COMPUTE = "mtp compute buffer"
    DRAFT_WEIGHTS = "draft weights"
    DRAFT_KV = "draft kv cache"
    DRAFT_STATE = "draft recurrent state"
    DRAFT_COMPUTE = "draft compute buffer"
    OUTPUT = "output buffer"
    CHECKPOINTS = "context checkpoints"
    PROMPT_CACHE = "prompt cache"


# These grow while the server runs, up to the size given; all others are there after the start.
GROWING = frozenset({PartKind.CHECKPOINTS, PartKind.PROMPT_CACHE})
WEIGHTS = frozenset({PartKind.WEIGHTS, PartKind.MTP_WEIGHTS, PartKind.DRAFT_WEIGHTS})
COMPUTE = frozenset({PartKind.COMPUTE, PartKind.MTP_COMPUTE, PartKind.DRAFT_COMPUTE})
CONTEXT = frozenset(
    {
        PartKind.KV,
        PartKind.STATE,
        PartKind.MTP_KV,
        PartKind.DRAFT_KV,
        PartKind.DRAFT_STATE,
    }
)


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose on one device.

    `n_bytes` is None where a size that it needs is unknown. `formula` says in one line how the
    number came about.
    """

    kind: PartKind
    device: Device
    n_bytes: int | None
    formula: str

    @property
    def mib(self) -> MiB | None:
        """MiB, rounded up."""
        return None if self.n_bytes is None else need_mib(self.n_bytes)

    @property
    def grows(self) -> bool:
        """Whether it is a worst case that the server reaches only with time."""
        return self.kind in GROWING


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much memory a server will need, part by part.

    `n_ctx` is the context over all slots as the engine rounds it, `n_ctx_slot` that of one slot.
    `notes` are what a person should know beside the numbers. `is_locked` says that host weights are
    locked in RAM, `is_mapped` that they are pages of the file, which the kernel can take back.
    """

    parts: tuple[Part, ...]
    n_ctx: int | None
    n_ctx_slot: int | None
    is_locked: bool
    is_mapped: bool
    notes: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every part has a number."""
        return all(part.n_bytes is not None for part in self.parts)

    def on(self, device: Device) -> tuple[Part, ...]:
        """The parts on a device."""
        return tuple(part for part in self.parts if part.device is device)

    def bytes_of(
        self, device: Device, kinds: Iterable[PartKind] = tuple(PartKind), *, at_start: bool = True
    ) -> int:
        """Bytes of all known parts of these kinds on a device.

        Args:
            device: Where.
            kinds: Which.
            at_start: Without what only grows with time.
        """
        wanted = frozenset(kinds)
        parts = (part for part in self.on(device) if part.kind in wanted)
        return sum(part.n_bytes or 0 for part in parts if not (at_start and part.grows))

    def start_mib(self, device: Device) -> MiB:
        """What a device has to hold once the server listens."""
        return need_mib(self.bytes_of(device))

    def worst_mib(self, device: Device) -> MiB:
        """What a device has to hold after a long time."""
        return need_mib(self.bytes_of(device, at_start=False))

    @property
    def movable_mib(self) -> MiB:
        """What an engine that places layers itself could at most keep in RAM instead.

        Compute buffers and what a draft model needs stay on the GPU.
        """
        kinds = (
            PartKind.WEIGHTS,
            PartKind.MTP_WEIGHTS,
            PartKind.KV,
            PartKind.STATE,
            PartKind.MTP_KV,
        )
        return have_mib(self.bytes_of(Device.GPU, kinds))

    def fit_needed_mib(self, free_mib: MiB, margin_mib: int) -> MiB:
        """What has to leave the GPU so that the margin stays free; 0 where everything fits."""
        return MiB(max(0, self.start_mib(Device.GPU) + margin_mib - free_mib))

    @property
    def locked_mib(self) -> MiB:
        """RAM that may not be swapped out, 0 without locking."""
        return need_mib(self.bytes_of(Device.HOST, WEIGHTS) if self.is_locked else 0)
