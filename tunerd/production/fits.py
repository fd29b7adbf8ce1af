"""`tunerd fits`: whether the servers of several profiles can be loaded at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.app import Context
from tunerd.engine.builds import PlanRequest
from tunerd.model.memory import Device
from tunerd.production.plan import Plan, make_plan
from tunerd.result import ActionResult, error, note, warning
from tunerd.words import MiB, format_mib


@dataclass(frozen=True, slots=True)
class Together:
    """What several servers need of a device at once [MiB]; None is unknown.

    `held_mib` is what others hold there (a desktop, other programs), `margin_mib` the largest that one of the
    profiles keeps free, `left_mib` what would be left, negative where it is not enough.
    """

    device: str
    needs: tuple[tuple[str, MiB | None], ...]
    margin_mib: MiB
    budget_mib: MiB | None
    held_mib: MiB | None

    @property
    def left_mib(self) -> int | None:
        """What would be left, beyond the margin."""
        known = [need for _, need in self.needs if need is not None]
        if self.budget_mib is None or len(known) < len(self.needs):
            return None
        return self.budget_mib - sum(known) - self.margin_mib

    @property
    def fits(self) -> bool | None:
        """Whether all of them fit; None where that cannot be told."""
        return None if self.left_mib is None else self.left_mib >= 0


def together(plans: Sequence[Plan], budget_mib: MiB | None = None) -> Together:
    """What plans come to on the card, or in RAM where none is used, as if all of a model went there.

    Args:
        plans: Made now, so that what serves at present counts as free.
        budget_mib: That they may take; None for what is free.
    """
    device = Device.GPU if any(one.has_gpu for one in plans) else Device.HOST
    needs, free, margins = [], [], [MiB(0)]
    for made in plans:
        found = next((one for one in made.memory.devices if one.name == str(device)), None)
        is_known = found is not None and made.memory.estimate.is_complete
        needs.append(
            (made.resolved.name, found.start_mib if found is not None and is_known else None)
        )
        free.append(None if found is None else found.free_mib)
        if device is Device.GPU:
            margins.append(MiB(made.resolved.profile.memory.fit_mib or 0))
    known = [one for one in free if one is not None]
    available = min(known) if len(known) == len(free) else None
    cards = [gpu.total_mib for gpu in plans[0].host.gpus or () if gpu.total_mib is not None]
    total = max(cards, default=None) if device is Device.GPU else plans[0].host.memory.total_mib
    held = None if total is None or available is None else MiB(max(0, total - available))
    wanted = available if budget_mib is None else budget_mib
    if available is not None and wanted is not None:
        wanted = MiB(min(available, wanted))
    return Together(str(device), tuple(needs), max(margins), wanted, held)


def fits(ctx: Context, requests: Sequence[PlanRequest], *, budget_mib: MiB | None) -> ActionResult:
    """Each need, what others hold, and what is left; exit code 1 where they do not fit, or nobody can tell.

    Raises:
        ConfigError, ModelFileError, EngineError: as of `make_plan`.
    """
    found = together([make_plan(ctx, one) for one in requests], budget_mib)
    payload: dict[str, Any] = {
        "device": found.device,
        "needs": [{"profile": name, "mib": need} for name, need in found.needs],
        "margin_mib": found.margin_mib,
        "budget_mib": found.budget_mib,
        "held_mib": found.held_mib,
        "left_mib": found.left_mib,
        "fits": found.fits,
    }
    if found.left_mib is None:
        told = warning("cannot-tell", "whether they fit together cannot be told: a need or what is free is unknown")  # fmt: skip
    elif found.left_mib < 0:
        told = error(
            "do-not-fit",
            f"they do not fit together: {format_mib(MiB(-found.left_mib))} are missing",
            "lower serving.ctx_size or memory.fit_mib of one, or serve them one at a time: `tunerd emit llama-swap`",
        )
    else:
        told = note("fit", "all of them can be loaded at once")
    return ActionResult("fits", payload, (told,), 0 if found.fits else 1)
