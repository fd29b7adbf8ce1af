"""The placement that an engine's own fit chose, in words of a profile: frozen, so that it stays as it is.

Fit places the model anew for whatever it is started with, so that speculation, which needs memory of its
own, also moves layers. Only where both sides lie alike does their difference belong to speculation.

Source: logs of llama.cpp 0.7 over Vulkan and of builds of April to August 2026; the words of
ik_llama.cpp's `--fit` from its build of August 2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tunerd.core.memory import estimate
from tunerd.core.memory_laws import EngineLaws
from tunerd.core.memory_parts import Device
from tunerd.core.memory_settings import MemorySettings
from tunerd.core.model import ModelFacts

LOG, ESTIMATE = "the log of the server that runs", "the memory estimate"
_MAX_LINE = 2000
_FIT_BEGINS = "fitting params to device memory"
_FIT_FAILED = "to fit params to free device memory"
_ROW = re.compile(
    r"- (?P<device>\S[^:]*): +\d+ layers(?: \( *(?P<partly>\d+) overflowing\))?, +\d+ MiB used"
)
_OFFLOADED = re.compile(r"offloaded (?P<on_gpu>\d+)/(?P<all>\d+) layers to GPU")
_IK_MOVES = re.compile(r"Adding experts CPU overrides for layer (?P<layer>\d+)")


@dataclass(frozen=True, slots=True)
class FitSaid:
    """What a log says of the last fit.

    `n_on_gpu` of `n_to_place` layers, the output layer counted, are on the GPU; None where it does not
    say. Of those, `n_partly` have experts in RAM, the last of them perhaps only some.
    """

    n_on_gpu: int | None
    n_to_place: int | None
    n_partly: int
    n_devices: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """A placement: layers on the GPU, and layers whose experts stay in RAM; `remark` is for people."""

    n_gpu_layers: int
    n_cpu_moe: int
    found_by: str
    remark: str | None = None

    @property
    def values(self) -> dict[str, int]:
        """As keys of a profile."""
        experts = {"memory.n_cpu_moe": self.n_cpu_moe} if self.n_cpu_moe else {}
        return {"memory.n_gpu_layers": self.n_gpu_layers, **experts}

    @property
    def text(self) -> str:
        """For people."""
        return ", ".join(f"{key} = {value}" for key, value in self.values.items())


def read_fit(lines: Iterable[str]) -> FitSaid:
    """What a log says of the fit of its last start; mainline needs `--log-verbosity 4` for it."""
    devices: dict[str, int] = {}
    moved: set[int] = set()
    offloaded: tuple[int, int] | None = None
    for whole in lines:
        line = whole[:_MAX_LINE]
        if _FIT_BEGINS in line:
            devices, moved, offloaded = {}, set(), None
        elif _FIT_FAILED in line and "successfully" not in line:
            devices = {}  # it loads as if nothing had been tried
        elif row := _ROW.search(line):
            devices[row["device"]] = int(row["partly"] or 0)
        elif row := _IK_MOVES.search(line):
            moved.add(int(row["layer"]))
        elif offloaded is None and (row := _OFFLOADED.search(line)):
            offloaded = int(row["on_gpu"]), int(row["all"])
    on_gpu, to_place = offloaded or (None, None)
    # mainline counts the output layer among those that overflow, and it has no experts.
    partly = max(0, sum(devices.values()) - 1) + len(moved)
    return FitSaid(on_gpu, to_place, partly, max(1, len(devices)))


def frozen_from_log(
    said: FitSaid, facts: ModelFacts, laws: EngineLaws, *, uses_mtp: bool
) -> Frozen | str | None:
    """What fit chose, as a placement by hand; why there is none; None where the log does not tell.

    As many layers' experts stay in RAM as fit moved, but those of the first layers (of the last of the
    trunk on ik_llama.cpp): fit begins with the last block, which is the MTP block where there is one, and
    that runs once for each drafted token. One layer that fit split goes to RAM whole.
    """
    if said.n_on_gpu is None or said.n_to_place is None:
        return None
    if said.n_devices > 1:
        return "there is more than one GPU, and no key says which layer lies on which"
    on_gpu, remark = said.n_on_gpu, None
    if said.n_on_gpu == said.n_to_place and not said.n_partly:
        return "fit moved nothing: the whole model is on the GPU"
    if on_gpu == said.n_to_place - 1 and facts.has_mtp and not uses_mtp:
        # Source: ggml-org/llama.cpp#24712; fit counts the trunk's layers, the loader the MTP block too.
        on_gpu = said.n_to_place
        remark = "fit left one layer in RAM because it does not count the MTP block; it is on the GPU here"
    experts = _experts_in_ram(facts, laws, said.n_to_place - on_gpu, said.n_partly)
    return Frozen(on_gpu, experts, LOG, remark)


def _experts_in_ram(facts: ModelFacts, laws: EngineLaws, first: int, wanted: int) -> int:
    """The number by which an engine leaves the experts of so many layers from `first` on in RAM."""
    if laws.cpu_moe_takes_last or not wanted:
        return wanted
    left = wanted
    for block in facts.blocks:
        left -= block.index >= first and block.expert_bytes > 0
        if left == 0:
            return block.index + 1
    return len(facts.blocks)


def frozen_from_estimate(
    facts: ModelFacts, settings: MemorySettings, free_mib: int | None, fit_mib: int
) -> Frozen | str:
    """The least that must go to RAM so that a margin stays free, or why that cannot be told.

    Args:
        facts: The model.
        settings: As it would be started, everything on the GPU.
        free_mib: VRAM that is there for it; None where unknown.
        fit_mib: The margin.
    """
    if free_mib is None:
        return "the log does not say what fit chose, and how much VRAM is free is unknown"

    def fits(n_gpu_layers: int, n_cpu_moe: int) -> bool:
        placed = replace(settings, n_gpu_layers=n_gpu_layers, n_cpu_moe=n_cpu_moe)
        return estimate(facts, placed).start_mib(Device.GPU) + fit_mib <= free_mib

    everything = len(facts.blocks) + 1
    if fits(everything, 0):
        return "fit has nothing to move: by the memory estimate the whole model fits on the GPU"
    most = len(facts.blocks) if facts.is_moe else 0
    for n_cpu_moe in range(1, most + 1):
        if fits(everything, n_cpu_moe):
            return Frozen(everything, n_cpu_moe, ESTIMATE)
    for n_gpu_layers in range(everything - 1, 0, -1):
        if fits(n_gpu_layers, most):
            return Frozen(n_gpu_layers, most, ESTIMATE)
    return "by the memory estimate not even one layer fits on the GPU"
