"""`tunerd verify`: is the machine what was deployed? Each difference is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunerd.app import Context
from tunerd.engine.serving import read_live_unit, standing_text
from tunerd.errors import ServiceError
from tunerd.production.journal import read_record
from tunerd.production.measurement import measuring, read_measurement
from tunerd.result import ActionResult, Message, warning
from tunerd.units.generations import Generation, HistoryEntry
from tunerd.units.text import unified_diff
from tunerd.words import Mode, sha256

DRIFT = 6
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference: what kind, in words, and what to do."""

    code: str
    text: str
    hint: str


def verify(ctx: Context) -> ActionResult:
    """Exit code 0 as deployed, 6 drift, 1 could not tell."""
    entry = ctx.generations.serving(ctx.unit)
    if entry is None:
        text = f"tunerd has deployed nothing as {ctx.unit} yet"
        return _result(None, [], (warning("nothing-deployed", text, "tunerd apply PROFILE"),), 1)
    try:
        drifts = list(find_drift(ctx, entry, deep=True))
    except ServiceError as problem:
        message = warning("cannot-tell", f"{problem.message}: {problem.cause}", problem.hint)
        return _result(entry.generation, [], (message,), 1)
    messages = tuple(warning(drift.code, drift.text, drift.hint) for drift in drifts)
    record = read_measurement(ctx)
    if record is not None:
        messages += (measuring(ctx, record),)
    return _result(entry.generation, drifts, messages, DRIFT if drifts else 0)


def find_drift(ctx: Context, entry: HistoryEntry, *, deep: bool) -> list[Drift]:
    """Every difference between what a generation deployed and what is there.

    Args:
        ctx: Where.
        entry: The generation that should serve.
        deep: Whether to read the engine's files again, which takes as long as they are large.
    """
    generation = entry.generation
    drifts = [*_unit_drift(ctx, generation), *_state_drift(ctx, entry)]
    if generation.unit_sha256 is not None:
        drifts += _model_drift(generation)
        if deep:
            drifts += _engine_drift(generation)
    return drifts


def _engine_drift(generation: Generation) -> list[Drift]:
    from tunerd.engine.probe import changed_files

    changes = changed_files(generation.engine_components)
    if not changes:
        return []
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    text = f"the engine changed: {'; '.join(changes[:_SHOWN])}{more}"
    hint = "`tunerd plan` shows whether the profile still works on it"
    return [Drift("engine-changed", text, hint)]


def _unit_drift(ctx: Context, generation: Generation) -> list[Drift]:
    standing, record = standing_text(ctx), read_record(ctx)
    ours = {generation.unit_sha256}
    if record is not None:
        ours |= {record.old_sha256, record.new_sha256}
    drifts = []
    known = None if sha256(standing) in ours else _generation_of(ctx, sha256(standing))
    if known is not None and known.number > generation.number:
        pass  # that it serves could not be written, on a full disk; recovery settles it
    elif known is not None and standing is not None:
        hint = f"`tunerd rollback --to {generation.number}` returns to the newest"
        text = f"the unit is that of generation {known.number} again, put there by hand"
        drifts.append(Drift("unit-edited", text, hint))
    elif sha256(standing) not in ours:
        wanted = ctx.generations.unit_text(generation.number)
        if standing is None:
            text = f"the unit file is gone: `{ctx.unit_path}`"
        elif not standing:
            text = f"the unit is masked, or its file is empty: `{ctx.unit_path}`"
        elif wanted is None:
            text = f"a unit file stands where generation {generation.number} had removed it"
        else:
            difference = unified_diff(_text(wanted), _text(standing), ctx.unit)
            changed = [line for line in difference.splitlines()[2:] if line[:1] in {"+", "-"}]
            text = f"the unit was edited by hand: {'; '.join(changed[:6])}"
        drifts.append(Drift("unit-edited", text, "`tunerd apply` or `tunerd rollback --to "
                            f"{generation.number}` puts back what was deployed"))  # fmt: skip
    if record is not None:
        drifts.append(Drift("interrupted", "a swap was cut short", "tunerd recover"))
    return drifts


def _generation_of(ctx: Context, text_sha256: str | None) -> Generation | None:
    """The newest generation that had this text deployed."""
    found = (entry.generation for entry in ctx.generations.entries())
    return next((g for g in found if (g.unit, g.unit_sha256) == (ctx.unit, text_sha256)), None)


def _state_drift(ctx: Context, entry: HistoryEntry) -> list[Drift]:
    generation, known = entry.generation, entry.ending.drop_ins
    state = ctx.services.state(ctx.unit)
    live = read_live_unit(ctx)
    drifts = []
    if generation.unit_sha256 is None:
        return []
    if state.fragment_path is not None and state.fragment_path != ctx.unit_path:
        drifts.append(Drift("other-file", f"another file is in force: `{state.fragment_path}`",
                            "remove it, or set service.unit"))  # fmt: skip
    if known is None:  # how it ended was settled by recovery
        known = tuple(generation.host.get("drop_ins", ()))
    drifts.extend(
        Drift("drop-in", f"a drop-in was added: `{path}`", f"systemctl cat {ctx.unit} shows it")
        for path in live.drop_ins
        if str(path) not in known
    )
    if ctx.mode is Mode.LOCAL:
        drifts.extend(
            Drift("drop-in", f"a drop-in does nothing without systemd: `{path}`",
                  "say it in the profile, and `tunerd apply`")
            for path in sorted(ctx.unit_path.with_name(f"{ctx.unit}.d").glob("*.conf"))
        )  # fmt: skip
    if state.needs_reload:
        drifts.append(Drift("not-reloaded", "the unit changed on disk since it was loaded",
                            "systemctl daemon-reload"))  # fmt: skip
    if not state.is_active and read_measurement(ctx) is None:
        drifts.append(Drift("not-running", f"the unit is {state.active_state} ({state.result})",
                            f"systemctl start {ctx.unit}, or `tunerd rollback`"))  # fmt: skip
    if state.is_enabled is False:
        drifts.append(Drift("not-enabled", "the unit does not start at boot",
                            f"systemctl enable {ctx.unit}"))  # fmt: skip
    return drifts


def _model_drift(generation: Generation) -> list[Drift]:
    drifts = []
    for file in (generation.model_identity or {}).get("files", ()):
        path = Path(file["path"])
        try:
            status = path.stat()
        except OSError:
            drifts.append(Drift("model-gone", f"the model file is gone: `{path}`",
                                "put it back, or `tunerd rollback`"))  # fmt: skip
            continue
        if (status.st_size, status.st_mtime_ns) != (file["size_bytes"], file["mtime_ns"]):
            drifts.append(Drift("model-changed", f"the model file changed: `{path}`",
                                "apply the profile again if that was meant"))  # fmt: skip
    return drifts


def _result(
    generation: Generation | None, drifts: list[Drift], messages: tuple[Message, ...], code: int
) -> ActionResult:
    payload = {
        "generation": generation.number if generation is not None else None,
        "profile": generation.profile if generation is not None else None,
        "as_deployed": code == 0,
        "drift": [{"code": d.code, "text": d.text, "hint": d.hint} for d in drifts],
    }
    return ActionResult("verify", payload, messages, code)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")
