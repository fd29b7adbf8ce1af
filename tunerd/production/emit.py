"""`tunerd emit` and `fits`: plans, or what serves now, written down for other programs; and whether they fit at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from tunerd import __version__
from tunerd.app import Context
from tunerd.engine.choice import PlanRequest
from tunerd.engine.emit import DEFAULT_PORT, Flag, Server, Target, emit, flags_of
from tunerd.engine.flags import margin_in_force
from tunerd.engine.serving import read_live_unit, specifiers_of
from tunerd.errors import UsageError
from tunerd.machine.files import Files, demand_free, destination, real_path
from tunerd.machine.host import read_host
from tunerd.model.memory import Device
from tunerd.production.checks import explain
from tunerd.production.plan import Plan, cards_of, make_plan
from tunerd.result import ActionResult, Level, Message, error, note, warning
from tunerd.units.live import LiveUnit, read_live
from tunerd.units.text import parse_unit
from tunerd.words import MiB, all_known, format_mib

# What speaks against the words themselves; the rest is about this machine at this moment.
_OF_WORDS = frozenset({"argument-refused", "argument-check", "unit-refused"})
# What engines and drivers are told so; a unit's file of variables may hold anything else, and be root's alone.
_OF_ENGINES = ("LLAMA_ARG_", "GGML_", "CUDA_", "NVIDIA_", "OMP_")
_ENOUGH_PARTS = 3  # of a folder to be mounted: `/`, and two below


def write_down(
    ctx: Context, target: Target, requests: Sequence[PlanRequest], *, image: str | None = None
) -> ActionResult:
    """The text for a target, of these profiles; of none what serves now.

    Raises:
        UsageError: nothing serves here, or the target cannot hold what does.
        ConfigError, ModelFileError, EngineError: as of `make_plan`.
    """
    plans = [make_plan(ctx, one) for one in requests]
    found = [_planned(ctx, one) for one in plans] or [(_serving(ctx), ())]
    at_once = all_fit(together(plans)) if len(plans) > 1 else None
    made = emit(target, [server for server, _ in found], image=image, together=at_once)
    messages = (
        *dict.fromkeys(message for _, told in found for message in told),
        *(warning("not-carried", f"not carried over: {line}") for line in made.lost),
    )
    payload = {
        "target": str(target),
        "text": made.text,
        "not_carried": list(made.lost),
        "path": None,
    }
    return ActionResult("emit", payload, messages)


def _planned(ctx: Context, made: Plan) -> tuple[Server, tuple[Message, ...]]:
    wrong = [one for one in made.errors if one.code in _OF_WORDS]
    if wrong:
        raise UsageError(
            f"profile {made.resolved.name}: {wrong[0].text}",
            state="nothing was written",
            hint=wrong[0].hint or f"`tunerd plan {made.resolved.name} --explain`",
        )
    unit = read_live(unit=ctx.unit, text=made.unit_text, specifiers=specifiers_of(ctx, ctx.unit))
    unit = replace(unit, argv=made.command.argv)
    server = _server(
        ctx, unit, f"profile {made.resolved.name}", made.resolved.name,
        explain(made.command, made.resolved), has_gpu=made.has_gpu,
    )  # fmt: skip
    told = (replace(one, level=Level.WARNING) for one in made.messages if one.level is not Level.NOTE)  # fmt: skip
    return server, tuple(told)


def _serving(ctx: Context) -> Server:
    live = read_live_unit(ctx)
    if live.argv is None:
        raise UsageError(
            f"{ctx.unit} serves nothing here: {live.problem or 'there is no such unit'}",
            state="nothing was written",
            hint="name a profile: `tunerd profiles list`",
        )
    generation = ctx.deployed() if live.is_ours else None
    origins = () if generation is None else generation.origins
    profile = None if generation is None else generation.profile
    title = f"what {ctx.unit} serves" + (f", profile {profile}" if profile else "")
    has_gpu = bool(read_host(ctx.gpu).gpus)
    name = profile or ctx.unit.removesuffix(".service")
    return _server(ctx, live, title, name, origins, has_gpu=has_gpu)


def _server(
    ctx: Context,
    unit: LiveUnit,
    title: str,
    name: str,
    origins: Sequence[tuple[str, str, str]],
    *,
    has_gpu: bool,
) -> Server:
    argv, serving = unit.argv or (), unit.serving
    n_program = len(argv) - len(unit.arguments)
    folder = parse_unit(unit.text or "").value("Service", "WorkingDirectory") or "/"
    found = partial(_from_the_root, unit, folder.removeprefix("-"))
    flags = tuple(one.led(found) for one in flags_of(argv[n_program:], origins))
    key = None if serving.api_key_file is None else found(serving.api_key_file)
    unsaid = sorted(one for one in unit.file_environment if not one.startswith(_OF_ENGINES))
    aliases = tuple(part.strip() for part in (serving.alias or "").split(",") if part.strip())
    return Server(
        title=f"{title}, written by tunerd {__version__}",
        names=tuple(dict.fromkeys((*aliases, name))),
        program=tuple(argv[:n_program]),
        flags=flags,
        environment={n: v for n, v in unit.environment.items() if n not in unsaid},
        host=serving.host,
        port=serving.port or DEFAULT_PORT,
        api_key_file=key,
        user=unit.user,
        has_gpu=has_gpu,
        folders=_folders(flags, key),
        locks_memory=any("mlock" in word for one in flags for word in one.words),
        stop_timeout_s=ctx.settings.service.stop_timeout_s,
        load_limit_s=int(ctx.settings.service.start_limit_s),
        unsaid=tuple(unsaid),
    )


def _folders(flags: Sequence[Flag], key: str | None) -> dict[str, tuple[str, str]]:
    """For each file or folder that is named: what has to be mounted, and where it is in that."""
    return {
        word: _folder_of(Path(word))
        for one in flags
        for word in one.values
        if word.startswith("/") and word != key and os.path.exists(word)  # noqa: PTH110 -- or unseen
    }


def _from_the_root(unit: LiveUnit, folder: str, word: str) -> str:
    """A word of a server; a file from `/`: others start it in another folder, and without its unit's credentials."""
    source = unit.source_of(word)
    path = os.path.join(folder, source)  # noqa: PTH118 -- pathlib raises where a folder is closed
    is_file = ("/" in source or "." in source) and os.path.isfile(path)  # noqa: PTH113
    return path if is_file else source


def _folder_of(path: Path) -> tuple[str, str]:
    if path.is_dir():
        return str(path), "."
    if not path.is_symlink():
        return str(path.parent), path.name
    real = real_path(path)
    both = Path(os.path.commonpath([path.parent, real.parent]))
    if path.readlink().is_absolute() or len(both.parts) < _ENOUGH_PARTS:
        return str(real.parent), real.name
    return str(both), str(path.relative_to(both))


def write_text(path: Path, made: ActionResult, *, replace_it: bool) -> ActionResult:
    """Put the text of `write_down` into a file; a script may be run.

    Raises:
        HostError: it cannot be written.
        UsageError: something stands there by now.
    """
    goes_to = destination(path)
    Files().write(
        goes_to,
        str(made.payload["text"]).encode(),
        mode=0o755 if made.payload["target"] == Target.SHELL else 0o644,
        check=lambda: None if replace_it else demand_free(path),
    )
    return replace(made, payload={**made.payload, "path": str(goes_to)})


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
        known = all_known(need for _, need in self.needs)
        if self.budget_mib is None or not known:
            return None
        return self.budget_mib - sum(known) - self.margin_mib

    @property
    def fits(self) -> bool | None:
        """Whether all of them fit; None where that cannot be told."""
        return None if self.left_mib is None else self.left_mib >= 0


def together(plans: Sequence[Plan], budget_mib: MiB | None = None) -> tuple[Together, ...]:
    """What plans come to on the card, as if all of a model went there; and in RAM where one uses no card.

    Args:
        plans: Made now, so that what serves at present counts as free.
        budget_mib: That they may take of the card, or of RAM where none is used; None for what is free.
    """
    on_card = [one for one in plans if one.has_gpu]
    found = [_on(Device.GPU, on_card, budget_mib)] if on_card else []
    if len(on_card) < len(plans):
        found.append(_on(Device.HOST, plans, None if found else budget_mib))
    return tuple(found)


def _on(device: Device, plans: Sequence[Plan], budget_mib: MiB | None) -> Together:
    needs, free, margins = [], [], [MiB(0)]
    for made in plans:
        need = made.memory.estimate
        needs.append((made.resolved.name, need.start_mib(device) if need.is_complete else None))
        free.append(made.memory.free_mib.get(device))
        if device is Device.GPU:
            margins.append(MiB(margin_in_force(made.resolved, made.engine.capabilities) or 0))
    available = min(all_known(free), default=None)
    cards = [cards_of(made.host, made) for made in plans] if device is Device.GPU else []
    if len({tuple(gpu.index for gpu in one) for one in cards}) > 1:  # each has cards of its own
        return Together(str(device), tuple(needs), max(margins), None, None)
    own = sum(all_known(gpu.total_mib for gpu in cards[0])) if cards else 0
    total = (MiB(own) or None) if cards else plans[0].host.memory.total_mib
    held = None if total is None or available is None else MiB(max(0, total - available))
    wanted = available if budget_mib is None else budget_mib
    if available is not None and wanted is not None:
        wanted = MiB(min(available, wanted))
    return Together(str(device), tuple(needs), max(margins), wanted, held)


def all_fit(found: Sequence[Together]) -> bool | None:
    """Whether they fit on each device; None where that cannot be told of one, and on no other they do not."""
    each = [one.fits for one in found]
    return False if False in each else None if None in each else True


def fits(ctx: Context, requests: Sequence[PlanRequest], *, budget_mib: MiB | None) -> ActionResult:
    """Each need, what others hold, and what is left; exit code 1 where they do not fit, or nobody can tell.

    Raises:
        ConfigError, ModelFileError, EngineError: as of `make_plan`.
    """
    found = together([make_plan(ctx, one) for one in requests], budget_mib)
    devices = [
        {
            **asdict(one),
            "needs": [{"profile": name, "mib": need} for name, need in one.needs],
            "left_mib": one.left_mib,
            "fits": one.fits,
        }
        for one in found
    ]
    fit = all_fit(found)
    missing = [(one.left_mib or 0, one.device) for one in found if one.fits is False]
    if missing:
        left_mib, device = min(missing)
        kind = "VRAM" if device == Device.GPU else "RAM"
        told = error(
            "do-not-fit",
            f"they do not fit together: they need {format_mib(MiB(-left_mib))} more {kind} than may be taken",
            "lower serving.ctx_size or memory.fit_mib of one, or serve them one at a time: `tunerd emit llama-swap`",
        )
    elif fit is None:
        told = warning("cannot-tell", "tunerd cannot tell whether they fit together: what one needs, or what is free, is unknown, or they use different cards")  # fmt: skip
    else:
        told = note("fit", "all of them can be loaded at once")
    return ActionResult("fits", {"devices": devices, "fits": fit}, (told,), 0 if fit else 1)
