"""A machine for tests: a real systemd, booted without a display in a container.

Its root is a copy-on-write view of a `Root` (see roots.py), its network is its own loopback, so
every machine has port 8080 to itself. It ends with `poweroff`, or with `power_cut`, which kills
everything at once; on a lossy disk that also loses what was not synced.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.support import overlay, preloaded, run_folder
from tests.support.container import PATH, Container, MachineError
from tests.support.lossy_disk import LossyDisk
from tests.support.overlay import Root
from tests.support.programs import program
from tests.support.roots import PREFIX, SOURCES_INSIDE, cache_folder

_BOOT_LIMIT_S = 240.0
_POWEROFF_LIMIT_S = 180.0
_TIMED_OUT = (124, 137)  # timeout(1): ended it, had to kill it
# By the Python of `tunerd`, whose own packages come first.
_AS_TUNERD = 'exec "$(sed -n "1s/^#!//p" "$(command -v tunerd)")" "$@"'
_PRELOADED = f"import sys; sys.path.append('{SOURCES_INSIDE}'); from tests.support import preloaded; preloaded.main()"


class Machine:
    """One machine; use it as a context manager, or call `boot` and `close`.

    Args:
        root: What it boots from.
        disk_mib: Size of a lossy disk for everything that it writes; without, its changes are
            kept in memory and outlive a power cut as if every write had been synced.
        strict_disk: The disk does not sync for programs that forget to.
        binds: Host folders that are seen read-only at the given places inside.
        options: More options of systemd-nspawn.
    """

    def __init__(
        self,
        root: Root,
        *,
        disk_mib: int | None = None,
        strict_disk: bool = False,
        binds: Mapping[str, Path] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.boot_state = ""
        """What systemd said at its end: `running` or `degraded`."""
        self._binds = {**root.binds, **(binds or {})}
        self._options = options
        self._folder = run_folder.create(cache_folder())
        self.name = self._folder.name
        self._disk: LossyDisk | None = None
        if disk_mib is not None:
            self._disk = LossyDisk(self._folder, size_mib=disk_mib, strict=strict_disk)
        self._merged: Path | None = None
        self._container: Container | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._preloaded: dict[str | None, list[str]] = {}
        self._accounts: dict[str, tuple[str, str, str]] = {}

    def __enter__(self) -> Self:
        try:
            return self.boot()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    # Life and death

    @property
    def is_on(self) -> bool:
        """Whether it is booted."""
        return self._container is not None and self._container.is_alive

    def boot(self) -> Self:
        """Switch it on and wait until systemd has started everything.

        Raises:
            AssertionError: it did not get there in time; the text has its console.
        """
        self._preloaded.clear()
        self._container = Container(
            self.name,
            self._mounted(),
            console=self._folder / "console.log",
            binds=self._binds,
            options=self._options,
        )
        self._container.wait_ready(_BOOT_LIMIT_S)
        self.boot_state = self.systemctl("is-system-running", "--wait", check=False)
        if self.boot_state not in {"running", "degraded"}:
            raise MachineError(f"boot ended as {self.boot_state!r}\n{self._container.console()}")
        return self

    def poweroff(self) -> None:
        """Shut down in order; `boot` boots again.

        systemd stops every process for a moment before it ends them. An nsenter that sees its child
        stop stops itself, and the child, once ended, stays a zombie that systemd waits for: 180 s.
        """
        for started in self._started:
            started.kill()  # the way in alone: what it led to is PID 1's child from here
        self._booted().poweroff(_POWEROFF_LIMIT_S)
        self._container = None

    def reboot(self) -> None:
        """Shut down in order and boot again."""
        self.poweroff()
        self.boot()

    def power_cut(self) -> None:
        """Kill everything at once, nothing is told; a lossy disk loses what was not synced.

        What the machine has kept can be read afterwards, and `boot` boots again.
        """
        self._booted().kill()
        self._container = None
        if self._disk is not None and self._merged is not None:
            image = self._disk.crash_image()
            program("umount", self._merged)
            self._merged = None
            self._disk.come_back(image)
            self._mounted()

    def close(self) -> None:
        """End it at once and remove all of it."""
        if self._container is not None:
            self._container.kill()
            self._container = None
        for started in self._started:
            started.kill()
            started.wait()
            for stream in (started.stdin, started.stdout, started.stderr):
                if stream is not None:
                    stream.close()
        run_folder.destroy(self._folder)

    # Commands

    def run(
        self,
        *argv: str | Path,
        user: str | None = None,
        check: bool = True,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        folder: str | Path = "/",
        limit_s: float = 400.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program inside, as root or as this user, and return what it printed.

        While the machine is off, root may still run what only needs its file system.

        Raises:
            MachineError: it ended with an error and `check` holds, or took longer than `limit_s`.
        """
        words = [str(word) for word in argv]
        inside = self._entering(
            ["timeout", "--kill-after=5", f"{limit_s:g}", *self._as(user), *words],
            {**self._environment(user), **(env or {})},
            folder,
        )
        typed = stdin.encode() if isinstance(stdin, str) else stdin
        shown = f"in {self.name}: {shlex.join(words)}"
        started_s = time.monotonic()
        try:
            done = subprocess.run(
                inside, input=typed, capture_output=True, timeout=limit_s + 20, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"{shown} hangs") from error
        output, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        if done.returncode in _TIMED_OUT and time.monotonic() - started_s >= limit_s:
            raise MachineError(f"{shown} took over {limit_s:g} s\n{output}{errors}")
        if check and done.returncode:
            raise MachineError(f"{shown} ended with {done.returncode}\n{output}{errors}")
        return subprocess.CompletedProcess(words, done.returncode, output, errors)

    def tunerd(
        self,
        *words: str | Path,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        limit_s: float = 400.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run `tunerd` inside, forked from a process in there that has loaded it already; see preloaded.py.

        What the machine starts, and what is to be a Python of its own, goes by `run` and `start`.
        """
        if not self.is_on or preloaded.of_a_start(env or {}):
            return self.run(
                "tunerd", *words, user=user, check=False, env=env, stdin=stdin, limit_s=limit_s
            )
        if user not in self._preloaded:
            name = f"tunerd-test-{self.name}-{len(self._started)}"
            argv = ("sh", "-c", _AS_TUNERD, "sh", "-I", "-c", _PRELOADED)
            self._started.append(preloaded.begin(name, *self.command(*argv, user=user)))
            self._preloaded[user] = preloaded.client(name)
        told = [str(word) for word in words]
        try:
            done = subprocess.run(
                [*self._preloaded[user], *told], input=stdin.encode(), capture_output=True,
                env={**self._environment(user), **(env or {})}, cwd="/", timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"in {self.name}: tunerd {shlex.join(told)} hangs") from error
        output, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(told, done.returncode, output, errors)

    def sh(self, script: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a POSIX sh script inside; see `run`."""
        return self.run("sh", "-c", script, **options)

    def start(self, *argv: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start a program inside and return at once, with its standard streams in pipes.

        It ends with the machine at the latest. `Popen.kill` ends only the way into the machine:
        to kill the program itself, use `kill` with its pid in there, or `pkill` with a pattern
        like `[n]ame`, which does not match the pkill itself. Options are those of `command`.
        """
        pipe = subprocess.PIPE
        started = subprocess.Popen(
            self.command(*argv, **options), stdin=pipe, stdout=pipe, stderr=pipe
        )
        self._started.append(started)
        return started

    def command(
        self,
        *argv: str | Path,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        folder: str | Path = "/",
    ) -> list[str]:
        """The command line that runs a program inside, for whoever starts it on the host himself."""
        words = [*self._as(user), *(str(word) for word in argv)]
        return self._entering(words, {**self._environment(user), **(env or {})}, folder)

    def kill(self, pid: int | str, signal_name: str = "KILL") -> None:
        """Send a signal to a process inside, by its pid in there."""
        self.run("kill", "-s", signal_name, "--", str(pid))

    def systemctl(self, *arguments: str, user: str | None = None, check: bool = True) -> str:
        """What systemctl prints, without the last newline; with `user` that user's own manager."""
        scope = ["--user"] if user else []
        return self.run(
            "systemctl", *scope, *arguments, user=user, check=check
        ).stdout.removesuffix("\n")

    def show(self, unit: str, name: str, *, user: str | None = None) -> str:
        """One property of a unit, as systemd prints it."""
        return self.systemctl("show", "--value", f"--property={name}", unit, user=user)

    def journal(self, *arguments: str, user: str | None = None) -> list[str]:
        """Journal lines, only their messages; `arguments` are journalctl's."""
        scope = ["--user"] if user else []
        plain = ["--quiet", "--no-pager", "--output=cat"]
        return self.run("journalctl", *scope, *plain, *arguments, user=user).stdout.splitlines()

    def pytest(
        self, *arguments: str, user: str | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run tests of this repository inside, in the installed environment; see `run`.

        `TUNERD_TEST_INSIDE` is set in there to the name of the root.
        """
        inside = {"TUNERD_TEST_INSIDE": self.root.name, **(env or {})}
        words = ("-m", "pytest", "-p", "no:cacheprovider", *arguments)
        return self.python(*words, user=user, env=inside)

    def python(
        self, *words: str, user: str | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with all that is installed, amid tunerd's sources; see `run`."""
        python = (f"{PREFIX}/bin/python", "-B")
        return self.run(*python, *words, user=user, env=env, folder=SOURCES_INSIDE, limit_s=900.0)

    # Files

    def write(
        self, path: str | Path, content: str | bytes, *, mode: int = 0o644, owner: str = "root"
    ) -> None:
        """Write a file, with its folders; not synced."""
        script = 'mkdir -p "${1%/*}/" && cat > "$1" && chmod "$2" "$1" && chown "$3:" "$1"'
        self.run("sh", "-c", script, "sh", path, f"{mode:o}", owner, stdin=content)

    def read(self, path: str | Path) -> str:
        """Content of a text file; bytes that are no text are replaced."""
        return self.run("cat", "--", path).stdout

    def exists(self, path: str | Path) -> bool:
        """Whether anything is there, a broken link included."""
        test = '[ -e "$1" ] || [ -L "$1" ]'
        return self.run("sh", "-c", test, "sh", path, check=False).returncode == 0

    def files(self, folder: str | Path) -> list[str]:
        """Names in a folder, sorted; a missing folder has none."""
        return sorted(self.run("ls", "-A", "--", folder, check=False).stdout.splitlines())

    # Below

    def _mounted(self) -> Path:
        """Its file system, as it is when it is off."""
        if self._merged is not None:
            return self._merged
        top = self._folder / "memory" if self._disk is None else self._disk.mount_point
        fresh = not top.exists()
        if fresh and self._disk is not None:
            self._disk.create()
        elif fresh:
            top.mkdir()
            program("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", top)
        self._merged = overlay.mount(self.root, self._folder, top)
        if fresh:
            program("sync", "--file-system", top)
        return self._merged

    def _booted(self) -> Container:
        if self._container is None:
            raise MachineError(f"{self.name} is off")
        return self._container

    def _entering(
        self, words: list[str], environment: Mapping[str, str], folder: str | Path
    ) -> list[str]:
        variables = [f"{name}={value}" for name, value in environment.items()]
        command = ["env", "-i", "-C", str(folder), *variables, *words]
        if self._container is None:
            return ["chroot", str(self._mounted()), *command]
        return self._container.entering(command)

    def _as(self, user: str | None) -> list[str]:
        if user is None:
            return []
        uid, gid, _ = self._account(user)
        return ["setpriv", "--reuid", uid, "--regid", gid, "--init-groups"]

    def _environment(self, user: str | None) -> dict[str, str]:
        common = {"PATH": PATH, "LANG": "C.UTF-8", "TERM": "dumb"}
        if user is None:
            return {**common, "HOME": "/root"}
        uid, _, home = self._account(user)
        runtime = f"/run/user/{uid}"
        return {
            **common,
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "XDG_RUNTIME_DIR": runtime,
            "DBUS_SESSION_BUS_ADDRESS": f"unix:path={runtime}/bus",
        }

    def _account(self, user: str) -> tuple[str, str, str]:
        if user not in self._accounts:
            fields = self.run("getent", "passwd", user).stdout.strip().split(":")
            self._accounts[user] = (fields[2], fields[3], fields[5])
        return self._accounts[user]
