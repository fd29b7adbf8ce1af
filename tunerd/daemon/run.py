"""`tunerd daemon`: recovers, reports ready, then looks, guards and keeps times until it is told to end.

It never stands in production's way: the server's unit neither waits for it nor ends with it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Protocol

import structlog

from tunerd.actions.context import Context
from tunerd.actions.notices import forget_old_notices, leave_notice, send_left_notices
from tunerd.actions.telemetry import Telemetry
from tunerd.core.telemetry.history import Event
from tunerd.daemon.guarding import Guarding
from tunerd.daemon.loop import Loop
from tunerd.daemon.nights import LONGEST_WAIT_S, Nights
from tunerd.daemon.recovery import Recovery
from tunerd.daemon.swaps import Swaps
from tunerd.daemon.watching import TIDY_S, Watching
from tunerd.errors import Busy, ConfigError, HostError, TunerdError
from tunerd.settings_sources import load_settings
from tunerd.system.files import lock
from tunerd.system.notify import Notifier

LOCK = "daemon.lock"
RECOVERY_S = 5.0
_FIRST_TIDY_S = 120.0

log = structlog.get_logger()


class Part(Protocol):
    """Something that runs beside the loop, in threads of its own, such as the API."""

    def start(self) -> None:
        """Begin; returns at once."""
        ...

    def take_over(self, ctx: Context) -> None:
        """Go by other settings from now on."""
        ...

    def stop(self) -> None:
        """End within some seconds."""
        ...


MakePart = Callable[[Context, Telemetry], Part]


def run_daemon(ctx: Context, parts: Sequence[MakePart] = ()) -> int:
    """Run until SIGTERM or SIGINT; the exit status. SIGHUP reads the settings again.

    Raises:
        Busy: another daemon looks after the same state: both would act.
    """
    with contextlib.ExitStack() as alone:
        try:
            alone.enter_context(
                lock(ctx.paths.state_dir / LOCK, purpose="daemon", since=ctx.now_text())
            )
        except Busy as problem:
            raise Busy(
                "another tunerd daemon runs here",
                cause=problem.cause,
                state="this one did nothing",
                hint="`systemctl status tunerd`; end that one first",
            ) from problem
        except HostError as problem:  # a disk that takes nothing is no reason not to watch
            log.warning("daemon.not_locked", message=problem.message, cause=problem.cause)
        return Daemon(ctx, parts).run()


class Daemon:
    """All that the daemon does, in one loop."""

    def __init__(self, ctx: Context, parts: Sequence[MakePart] = ()) -> None:
        self._ctx = ctx
        self._notifier = Notifier(ctx.environment)
        self.telemetry = Telemetry()
        self._parts = [make(ctx, self.telemetry) for make in parts]
        each_s = min(RECOVERY_S, self._notifier.watchdog_s or RECOVERY_S)
        self.loop = Loop(ctx.clock, self._alive, each_s, self._plan)
        self._recovery = Recovery(ctx, self._notifier, self.tell)
        self._swaps = Swaps(ctx, self.tell)
        self._wants_reload = False
        self._refused = False
        self._look_problem = ""
        self._settings_changed_ns = self._settings_stamp()
        self._set_up()

    def run(self) -> int:
        """Until it is told to end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_end)
        signal.signal(signal.SIGHUP, self._on_reload)
        self._recovery.recover()
        for part in self._parts:
            part.start()
        self._notifier.ready(f"watching {self._ctx.unit}")
        log.info("daemon.ready", unit=self._ctx.unit, mode=str(self._ctx.mode))
        self._watching.begin()
        self._plan()
        self.loop.run()
        self._notifier.stopping()
        for part in self._parts:
            part.stop()
        self._watching.close()
        log.info("daemon.stopped")
        return 0

    def tell(self, event: Event) -> None:
        """Say something once: to the journal, to the history, and to whoever wants to be told."""
        say = {"warning": log.warning, "error": log.error}.get(event.level, log.info)
        say(f"event.{event.kind}", text=event.text, hint=event.hint)
        self._watching.keeper.add_event(event)
        try:
            leave_notice(self._ctx, event)
        except TunerdError as problem:
            log.warning("notice.not_sent", message=problem.message, cause=problem.cause)

    def _set_up(self) -> None:
        self._watching = Watching(self._ctx, self.telemetry, self.tell)
        self._nights = Nights(self._ctx, self.tell)
        self._guarding = Guarding(self._ctx, self._notifier, self.tell, self._watching.server)

    def _plan(self) -> None:
        self.loop.in_s("look", 0.0, self.look)
        self.loop.in_s("recovery", RECOVERY_S, self._recover)
        self.loop.in_s("tidy", _FIRST_TIDY_S, self._tidy)
        self.loop.in_s("night", 0.0, self._night)
        self.loop.in_s("notices", 0.0, self._send_left_notices)

    def look(self) -> None:
        """One look, and what follows from it; the next is planned."""
        try:
            reading = self._watching.look()
            self._guarding.after(reading)
            self._swaps.look()
            self._look_problem = ""
        except TunerdError as problem:  # of a disk or a service manager; said once, not every time
            if problem.message != self._look_problem:
                log.warning("look.cut_short", message=problem.message, cause=problem.cause)
            self._look_problem = problem.message
        finally:
            self.loop.in_s("look", self._watching.wait_s, self.look)

    def _recover(self) -> None:
        try:
            self._recovery.look()
        finally:
            self.loop.in_s("recovery", RECOVERY_S, self._recover)

    def _tidy(self) -> None:
        try:
            self._watching.tidy()
            forget_old_notices(self._ctx)
            self._send_left_notices()
        finally:
            self.loop.in_s("tidy", TIDY_S, self._tidy)

    def _send_left_notices(self) -> None:
        try:
            names = send_left_notices(self._ctx)
        except TunerdError as problem:
            log.warning("notice.not_sent", message=problem.message, cause=problem.cause)
            return
        if names:
            log.info("notices.sent_anew", names=", ".join(names))

    def _night(self) -> None:
        wait_s = LONGEST_WAIT_S
        try:
            wait_s = self._nights.look()
        finally:
            self.loop.in_s("night", wait_s, self._night)

    def _alive(self) -> None:
        self._notifier.alive()
        stamp = self._settings_stamp()
        if self._wants_reload or stamp != self._settings_changed_ns:
            self._wants_reload = False
            self._settings_changed_ns = stamp
            self._reload()

    def _reload(self) -> None:
        """Take over settings that changed; wrong ones change nothing.

        Another unit or mode is another daemon's business: that needs a restart.
        """
        ctx = self._ctx
        try:
            settings = load_settings(ctx.paths, ctx.environment)
        except ConfigError as problem:
            self._refuse(problem)
            return
        if self._refused:
            self._refused = False
            self.tell(Event(ctx.clock.now_s(), "settings-mended", "note",
                            "the settings can be read again, and are in force"))  # fmt: skip
        if settings == ctx.settings:
            return
        if settings.service.unit != ctx.unit or settings.mode != ctx.settings.mode:
            text = "another unit or mode in the settings is another daemon's business: none is taken over"
            self.tell(Event(ctx.clock.now_s(), "settings-need-restart", "warning", text,
                            "systemctl restart tunerd"))  # fmt: skip
            return
        self._ctx = replace(ctx, settings=settings)
        self._recovery = Recovery(self._ctx, self._notifier, self.tell)
        for part in self._parts:
            part.take_over(self._ctx)
        self._watching.close()
        self._set_up()
        self.loop.in_s("night", 0.0, self._night)
        log.info("settings.reloaded")

    def _refuse(self, problem: ConfigError) -> None:
        self._refused = True
        text = f"{problem.message}, so those of before stay: {problem.cause}"
        self.tell(Event(self._ctx.clock.now_s(), "settings-refused", "error", text, problem.hint))

    def _settings_stamp(self) -> int | None:
        try:
            return self._ctx.paths.settings_file.stat().st_mtime_ns
        except OSError:
            return None

    def _on_end(self, _number: int, _frame: FrameType | None) -> None:
        self.loop.end()

    def _on_reload(self, _number: int, _frame: FrameType | None) -> None:
        self._wants_reload = True
        self.loop.wake()
