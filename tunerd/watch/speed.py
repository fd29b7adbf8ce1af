"""What guards go by, light enough for the daemon: what `guard check` left, speed, and the fit margin."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tunerd.app import Context
from tunerd.engine.commandline import by_hand
from tunerd.engine.log import Tally, read_requests, tally_of
from tunerd.engine.serving import standing_text
from tunerd.errors import Busy, TunerdError, UsageError
from tunerd.machine.files import lock
from tunerd.production.measurement import read_measurement
from tunerd.profile.files import load_profile
from tunerd.profile.layers import Layer
from tunerd.records import read_or_none
from tunerd.result import ActionResult
from tunerd.units.generations import Generation, HistoryEntry
from tunerd.units.manager import LogSpan
from tunerd.watch.figures import Reading
from tunerd.watch.guards import (
    DRIFT,
    Alike,
    Confirmed,
    Decision,
    DriftState,
    EngineSeen,
    Margin,
    Policy,
    Replanned,
    alike,
    is_of_speed,
    last_stretches_began,
    look_closer,
    look_for_drift,
)
from tunerd.watch.history import history
from tunerd.watch.judgement import Basis
from tunerd.words import sha256

KEY = "memory.fit_mib"
REASON = "guard"
_REQUEST_LINES = 3000
_RESTART_S = 240.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What is known, of which generation; None is not known. `basis` is what a probation goes by."""

    generation: int | None = None
    basis: Basis | None = None
    confirmed: Confirmed | None = None
    replanned: Replanned | None = None
    engine_sha256: str | None = None


def findings_path(ctx: Context) -> Path:
    """Where `check` leaves what it found."""
    return ctx.paths.state_dir / "guards.json"


def read_findings(ctx: Context, seen: object) -> tuple[object, Findings | None]:
    """What was left since `seen`, with the stamp of it; None where that is nothing new."""
    stamp = _stamp(findings_path(ctx))
    if stamp is None or stamp == seen:
        return seen, None
    try:
        data = ctx.files.read_json(findings_path(ctx))
    except TunerdError:
        return stamp, None
    return stamp, read_or_none(Findings, data)


def engine_seen(ctx: Context, driver_version: str | None) -> EngineSeen:
    """A stamp of every file of the engine that serves, and the driver."""
    entry = ctx.generations.serving(ctx.unit)
    if entry is None:
        return EngineSeen(None, driver_version)
    generation = entry.generation
    names = {path for path, _ in generation.engine_components} | set(generation.argv[:1])
    files = []
    for name in sorted(names):
        stamp = _stamp(Path(name))
        if stamp is None:
            return EngineSeen(None, driver_version)
        files.append((name, *stamp))
    return EngineSeen(tuple(files), driver_version)


def findings_stamp(ctx: Context, life: str | None, engine: EngineSeen | None) -> object:
    """What the findings rest on; another value means that they are old."""
    return (
        life,
        None if engine is None else (engine.files, engine.driver_version),
        _stamp(ctx.paths.generations_dir),
        _stamp(ctx.paths.evidence),
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


class Speed:
    """Whether a server decodes as was measured of it: its counters find that it does not, its own log decides.

    A guard and a probation go by it, each with its own floor.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._state = DriftState()
        self._others_mib: tuple[str | None, int | None] = (None, None)

    def take_over(self, ctx: Context) -> None:
        """Go by other settings from now on."""
        self._ctx = ctx

    @property
    def tok_s(self) -> float | None:
        """Of the last stretch [tok/s]; None before the first."""
        return self._state.stretches[-1].tok_s if self._state.stretches else None

    def after(
        self,
        reading: Reading,
        confirmed: Confirmed,
        policy: Policy,
        *,
        engine_sha256: str | None = None,
        demands_log: bool = False,
    ) -> Decision | None:
        """Take a look into account; `demands_log` as for `drift.look_closer`."""
        engine = reading.engine
        if self._others_mib[0] != engine.life or self._others_mib[1] is None:
            self._others_mib = (engine.life, reading.others_mib)
        counted = None if engine.counters is None else engine.counters.generated
        known = replace(confirmed, others_mib=self._others_mib[1])
        self._state, decision = look_for_drift(self._state, reading, known, policy, engine_sha256)
        if decision is None or decision.kind != DRIFT:
            return decision
        if not is_of_speed(self._state, known):
            return decision
        alike = self._alike(counted, known)
        self._state, decision = look_closer(
            self._state, decision, alike, known, demands_log=demands_log
        )
        return decision

    def _alike(self, counted: Tally | None, confirmed: Confirmed) -> Alike:
        """Whether requests like those that were measured are slow as well, by the server's own log.

        That counts where it says what the counters counted in the same time: others may write in it.
        """
        first = last_stretches_began(self._state)
        try:
            span = self._ctx.services.log_since(
                self._ctx.unit, first.since_s, max_lines=_REQUEST_LINES
            )
        except TunerdError:
            span = LogSpan((), None)
        # Local mode has whole lives, of which the counters begin at nothing.
        is_whole = span.begins_s is not None and span.begins_s < first.since_s - 1.0
        before = Tally(0, 0.0) if is_whole else first.before
        if not tally_of(span.lines).agrees_with(before, counted):
            return Alike(None, is_known=False)
        return alike(read_requests(span.lines).requests, confirmed)


def margin_now(ctx: Context) -> Margin:
    """The margin that is deployed, and what was done to it.

    Raises:
        UsageError: no profile is deployed.
        ConfigError: its files are wrong.
    """
    serving = serving_by_profile(ctx)
    generation = serving.generation
    raised = _raised(ctx, generation)
    resolved = load_profile(
        ctx, str(generation.profile), options=dict(generation.pins), with_tuned=generation.with_tuned,
        engine_names=() if generation.engine is None else (generation.engine,),
    )  # fmt: skip
    setting = resolved.settings.get(KEY)
    is_in_force = setting is not None and not by_hand(resolved)
    fit_mib = int(setting.value) if setting is not None and is_in_force else None
    tried = [int(one.pins[KEY]) for one in raised]
    by_person = setting is not None and setting.origin.layer in {Layer.PIN, Layer.SET}
    return Margin(
        fit_mib=None if fit_mib is None else max([fit_mib, *tried]),
        steps_taken=len(raised),
        is_pinned=by_person and not is_raise(generation),
        left_alone=None if _stands(ctx, generation) else "its unit was edited by hand",
        counts_less="--fit-margin" in generation.argv,
    )


def _stands(ctx: Context, generation: Generation) -> bool:
    """Whether the unit is what was deployed; a guard replaces nothing that a person wrote."""
    return sha256(standing_text(ctx)) == generation.unit_sha256


def serving_by_profile(ctx: Context) -> HistoryEntry:
    """The generation that serves.

    Raises:
        UsageError: it was not made from a profile, or there is none.
    """
    entry = ctx.generations.serving(ctx.unit)
    if entry is None or entry.generation.profile is None:
        raise UsageError(
            "nothing that serves was deployed from a profile", hint="`tunerd apply PROFILE`"
        )
    return entry


def _raised(ctx: Context, serving: Generation) -> list[Generation]:
    """Raises since a person deployed something, whether they led to a server or not, newest first."""
    found = []
    for entry in ctx.generations.entries():
        one = entry.generation
        if one.unit != serving.unit or one.profile != serving.profile:
            break
        if is_raise(one):
            found.append(one)
        elif entry.ending.outcome.is_done:
            break
    return found


def is_raise(generation: Generation) -> bool:
    """Whether this guard raised the margin in it.

    A probation that goes back has the same reason, from a generation.
    """
    return (
        generation.reason == REASON
        and generation.from_generation is None
        and KEY in generation.pins
    )


def restart_server(ctx: Context) -> None:
    """Restart the unit as it stands.

    Raises:
        Busy: it is being changed or measured.
        ServiceError: it does not start.
    """
    with lock(ctx.paths.lock, purpose="guard restart", since=ctx.now_text()):
        if read_measurement(ctx) is not None:
            raise Busy("a measurement is under way", state="nothing was restarted")
        ctx.services.reset_failed(ctx.unit)
        ctx.services.restart(ctx.unit, timeout_s=_RESTART_S)


def show_guards(ctx: Context) -> ActionResult:
    """Reads only."""
    settings = ctx.settings.guards
    kept = history(ctx, 0.0, 0.0, events=500)
    rows = [
        ("oom", settings.oom, ("oom", "guard-acted", "guard-failed"),
         ("two deaths within half an hour, or one after which systemd gave up, with the engine's words for "
         "no VRAM"),
         f"deploy a larger fit margin (128 MiB more; ik: 1664, 1792, 2048, then 256 more), {settings.oom_steps} times at most"),
        ("hang", settings.hang, ("hang",),
         (f"health is ok, nobody asks, nothing was generated for {settings.hang_every_s:.0f} s, and two tiny "
         f"generations get no answer in {settings.hang_limit_s:.0f} s"),
         f"restart it, {settings.hang_restarts_per_hour} times an hour at most"),
        ("drift", settings.drift, ("drift", "drift-over"),
         "three stretches of 512 tokens and more in a row below what was measured of this server",
         "say so with the likely cause; act: restart one that decays within its life, when idle"),
        ("upgrade", settings.upgrade, ("upgrade", "upgrade-refused"),
         "files of the engine or the driver's version changed",
         ("plan and try the deployed command line again, and say what its next start will refuse; act: the "
          "next night compares a kept copy of the build before with the one after")),
    ]  # fmt: skip
    _, findings = read_findings(ctx, None)
    guards = []
    for name, policy, kinds, evidence, may in rows:
        last = next((event for event in kept.events if event.kind in kinds), None)
        guards.append(
            {"name": name, "policy": policy, "evidence": evidence, "may": may,
             "last": None if last is None else asdict(last)}
        )  # fmt: skip
    confirmed = findings.confirmed if findings is not None else None
    payload = {
        "guards": guards,
        "confirmed": None if confirmed is None else asdict(confirmed),
        "problem": kept.problem,
    }
    return ActionResult("guard show", payload)
