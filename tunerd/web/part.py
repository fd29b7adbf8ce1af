"""The daemon's side of the API and the page: it answers the web part, which is a process of its own.

Under systemd that is `tunerd-web.service`, of an account that can do nothing by itself. Elsewhere there
is no such account, and the daemon starts it, and starts it again where it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

import structlog

from tunerd.app import Context
from tunerd.errors import ConfigError, HostError, TunerdError
from tunerd.machine.peers import (
    DAEMON_SOCKET,
    account_number,
    inherited_sockets,
    say_not_served,
    unix_socket,
)
from tunerd.machine.process import Child, Setting, own_command, start
from tunerd.paths import FROM_ELSEWHERE
from tunerd.watch.history import Telemetry
from tunerd.web.asking import Answering
from tunerd.web.desk import Desk
from tunerd.words import Mode

# The only one that is heard.
ACCOUNT = "tunerd-web"
UNIT = "tunerd-web.service"
_AGAIN_S = 5.0

log = structlog.get_logger()


class ApiPart:
    """Answers from `start` until `stop`, on the socket that systemd holds or on one of its own."""

    def __init__(self, ctx: Context, telemetry: Telemetry) -> None:
        self._ctx = ctx
        self._desk = Desk(ctx, telemetry)
        self._answering: Answering | None = None
        self._keeper: _Keeper | None = None

    def start(self) -> None:
        """Begin to answer, as far as that is possible; what is not is said in the log."""
        inherited = inherited_sockets(self._ctx.environment)
        if not inherited and self._ctx.mode is Mode.SYSTEM:  # else it would speak HTTP as root
            say_not_served(HostError("the web part is not started: systemd handed over no socket",
                           hint="`systemctl status tunerd-daemon.socket` says why"))  # fmt: skip
            return
        uid = account_number(ACCOUNT) if inherited else os.geteuid()
        try:
            listener = self._listener(inherited)
        except TunerdError as problem:
            say_not_served(problem)
            return
        self._answering = Answering(listener, uid, self._desk.answer)
        self._answering.start()
        page = self._ctx.settings.page
        if page.token_file is not None:
            say_not_served(ConfigError("page.token_file is not used any more: the page has no tokens",
                             hint=f"remove it from `{self._ctx.paths.settings_file}`; {FROM_ELSEWHERE}"))  # fmt: skip
        if not inherited:
            self._keeper = _Keeper(self._ctx)
            self._keeper.begin()
        elif page.listen is not None:  # without a port whoever connects starts it
            self._do(lambda: self._ctx.services.start(UNIT))

    def take_over(self, ctx: Context) -> None:
        """Answer by other settings from now on; where the page listens as well."""
        before, self._ctx = self._ctx, ctx
        self._desk.take_over(ctx)
        if self._answering is None or ctx.settings.page == before.settings.page:
            return
        if self._keeper is not None:
            self._keeper.again()
        else:
            self._do(lambda: ctx.services.restart(UNIT))

    def stop(self) -> None:
        """Answer no more; jobs go on."""
        if self._keeper is not None:
            self._keeper.end()
        if self._answering is not None:
            self._answering.stop()

    def _listener(self, inherited: tuple[socket.socket, ...]) -> socket.socket:
        if inherited:
            return inherited[0]
        return unix_socket(self._ctx.paths.runtime_dir / DAEMON_SOCKET, group=None)

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except TunerdError as problem:
            say_not_served(problem)


class _Keeper:
    """Keeps a web part of the daemon's own account running."""

    def __init__(self, ctx: Context) -> None:
        self._argv = own_command(ctx.mode, "web")
        # It ends with the thread that started it, and so with the daemon, however that ends.
        self._setting = Setting(env=dict(ctx.environment), keeps_together=True)
        self._child: Child | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="web", daemon=True)

    def begin(self) -> None:
        """Start it from now on, again and again."""
        self._thread.start()

    def again(self) -> None:
        """Have it end, so that it is started with what holds now."""
        if self._child is not None:
            self._child.send(signal.SIGTERM)

    def end(self) -> None:
        """End it for good."""
        self._ends.set()
        self.again()
        self._thread.join(timeout=2 * _AGAIN_S)

    def _keep(self) -> None:
        while not self._ends.is_set():
            try:
                self._child = start(self._argv, self._setting, log=sys.stderr.fileno())
            except TunerdError as problem:
                say_not_served(problem)
            else:
                if self._ends.is_set():  # it was not there yet when it was to end
                    self.again()
                log.info("web.ended", how=str(self._child.reap()))
            self._ends.wait(_AGAIN_S)
