"""What every action works with: settings, folders and seams, wired in one place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunerd.errors import HostError, UsageError
from tunerd.machine.clock import Clock, SystemClock
from tunerd.machine.facts import GpuReader
from tunerd.machine.files import Files
from tunerd.paths import Paths, paths_for
from tunerd.result import Message, Progress, ProgressSink, ignore_progress, warning
from tunerd.settings import Settings, load_settings, settings_or_last_good
from tunerd.units.generations import Generation, Generations
from tunerd.units.manager import ServiceManager
from tunerd.words import Mode, when


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that an action needs of the world.

    `environment` is that of the caller; `data_dir` holds the shipped units and profiles.
    `lacks_manager` says that local mode is a makeshift: the machine runs systemd, the user's own
    manager cannot be reached, and nobody asked for local mode. `own_unit` is the unit that this process
    is, where a lease shall be bound to that. `is_unattended` says that no root sits at a keyboard: a member
    asked for it, a guard, or a watch. `settings_problem` is what is wrong with the settings where others
    than those hold.
    """

    mode: Mode
    paths: Paths
    settings: Settings
    environment: Mapping[str, str]
    data_dir: Path
    clock: Clock
    gpu: GpuReader
    services: ServiceManager
    files: Files
    generations: Generations
    progress: ProgressSink
    lacks_manager: bool = False
    own_unit: str | None = None
    is_unattended: bool = False
    settings_problem: str | None = None

    @property
    def unit(self) -> str:
        """The unit that is deployed."""
        return self.settings.service.unit

    @property
    def unit_path(self) -> Path:
        """Where its file is the live definition."""
        return self.paths.unit_dir / self.unit

    @property
    def systemctl(self) -> str:
        """How a person calls the manager that the server runs under."""
        return self.mode.systemctl

    @property
    def lingers(self) -> bool | None:
        """Whether a user's units outlive the last logout; None where nobody can tell, and for those of the machine."""
        from tunerd.units.systemd import lingers

        return lingers(self.environment) if self.mode is Mode.USER else None

    def until_logout(self) -> tuple[Message, ...]:
        """That a user's units end with the last session, where that is known."""
        text = "without lingering your units end when you log out: the server is down then, and no night begins"
        return (
            (warning("no-linger", text, "loginctl enable-linger"),) if self.lingers is False else ()
        )

    @property
    def restarts_daemon(self) -> str:
        """How a person has the daemon begin anew."""
        if self.mode is Mode.LOCAL:
            return "end `tunerd daemon` and run it again"
        return f"`{self.systemctl} restart tunerd`"

    def log_of(self, unit: str) -> str:
        """How a person reads what a unit wrote."""
        if self.mode is Mode.LOCAL:
            return f"less {self.paths.log_dir / unit}.log"
        return f"{self.mode.systemctl.replace('systemctl', 'journalctl')} -u {unit}"

    def deployed(self) -> Generation | None:
        """The generation that serves; None where tunerd has deployed nothing."""
        entry = self.generations.serving(self.unit)
        return None if entry is None else entry.generation

    def say(self, text: str, **details: float | None) -> None:
        """Report progress."""
        self.report(Progress(text, **details))  # type: ignore[arg-type]

    def report(self, progress: Progress) -> None:
        """Report progress; a terminal that is gone is no reason to stop."""
        with contextlib.suppress(OSError):
            self.progress(progress)

    def demand_settings(self) -> None:
        """Refuse to go by others than those written.

        Raises:
            ConfigError: they are wrong.
        """
        if self.settings_problem is not None:
            load_settings(self.paths, self.environment)

    def settings_messages(self) -> tuple[Message, ...]:
        """That others than those written hold, unless they were mended meanwhile."""
        if self.settings_problem is None:
            return ()
        if settings_or_last_good(self.paths, self.environment)[1] is None:
            return ()
        hint = f"correct `{self.paths.settings_file}` or the environment"
        return (warning("settings", self.settings_problem, hint),)

    def now_text(self) -> str:
        """The time for people."""
        return when(self.clock.now_s())


def data_dir() -> Path:
    """Where shipped units and profiles are: inside the wheel, or at the top of a checkout."""
    package = Path(__file__).parent
    packaged = package / "_data"
    return packaged if packaged.is_dir() else package.parent


def choose_mode(wanted: str | None, environment: Mapping[str, str]) -> Mode:
    """The mode of a call: as asked for, else root means system and others user, else local.

    Raises:
        UsageError: `TUNERD_MODE` names no mode.
    """
    from tunerd.units.systemd import has_system_manager, has_user_manager

    name = wanted or environment.get("TUNERD_MODE")
    if name:
        try:
            return Mode(name)
        except ValueError as error:
            raise UsageError(f"no such mode: `{name}`", hint=f"one of {', '.join(Mode)}") from error
    if os.geteuid() == 0:
        return Mode.SYSTEM if has_system_manager() else Mode.LOCAL
    return Mode.USER if has_user_manager(environment) else Mode.LOCAL


def build_context(
    *,
    mode: str | None = None,
    environment: Mapping[str, str] | None = None,
    progress: ProgressSink = ignore_progress,
    start_supervisor: bool = False,
    needs_settings: bool = True,
) -> Context:
    """The real context of this process.

    Args:
        mode: As given on the command line.
        environment: Of the caller; None for this process's own.
        progress: Where progress goes.
        start_supervisor: Whether local mode may start its supervisor.
        needs_settings: Whether it is an error that settings are wrong; else the last good ones hold.

    Raises:
        ConfigError: settings are wrong.
        HostError: the mode cannot work here.
    """
    from tunerd.machine.gpu import NvmlReader
    from tunerd.units.systemd import has_system_manager

    environment = _with_runtime_folder(os.environ if environment is None else environment)
    chosen = choose_mode(mode, environment)
    is_asked_for = bool(mode or environment.get("TUNERD_MODE"))
    paths = paths_for(chosen, environment)
    settings, settings_problem = settings_or_last_good(paths, environment)
    if needs_settings and settings_problem is not None:
        load_settings(paths, environment)  # which says what is wrong
    if mode is None and "TUNERD_MODE" not in environment and settings.mode is not None:
        is_asked_for = True
        chosen = Mode(settings.mode)
        paths = paths_for(chosen, environment)
    if chosen is Mode.SYSTEM and os.geteuid() != 0 and "TUNERD_STATE_DIR" not in environment:
        hint = "use sudo, or `--user` for a unit of your own"
        held = paths.generations_dir if paths.generations_dir.exists() else paths.state_dir
        if not os.access(held, os.R_OK):
            raise HostError("system mode needs root", hint=hint)
    files = Files()
    return Context(
        mode=chosen,
        paths=paths,
        settings=settings,
        environment=environment,
        data_dir=data_dir(),
        clock=SystemClock(),
        gpu=NvmlReader(),
        services=_services(chosen, paths, environment, may_start=start_supervisor),
        files=files,
        generations=Generations(paths.generations_dir, files),
        progress=progress,
        lacks_manager=chosen is Mode.LOCAL and not is_asked_for and has_system_manager(),
        settings_problem=settings_problem,
    )


def _with_runtime_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """With the folder in which what measures from cron or after `su`, and the daemon, meet."""
    from tunerd.units.systemd import runtime_dir

    found, runtime = dict(environment), runtime_dir(environment)
    left = found.pop("XDG_RUNTIME_DIR", None)
    if runtime is not None:
        found["XDG_RUNTIME_DIR"] = str(runtime)
    if left not in {None, str(runtime)}:  # whose bus is that of the same account
        found.pop("DBUS_SESSION_BUS_ADDRESS", None)
    return found


def _services(
    mode: Mode, paths: Paths, environment: Mapping[str, str], *, may_start: bool
) -> ServiceManager:
    if mode is Mode.LOCAL:
        from tunerd.tryout.local import Local

        return Local(paths, may_start=may_start, environment=environment)
    from tunerd.units.systemd import Systemd

    return Systemd(mode, paths, environment)
