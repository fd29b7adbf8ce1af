"""A small world in which units are swapped: real files, imagined processes, real HTTP.

The stand-in engine's routes are served by threads of this process, so a running unit has this
process's pid.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from tests.fault.fuse import Fuse, fused_services
from tests.support.fake_gpu import FakeGpuReader
from tests.support.fake_llama.api import Api
from tests.support.fake_llama.arguments import Arguments
from tests.support.fake_llama.behaviour import Behaviour
from tests.support.fake_llama.connection import accept, listen, stop
from tests.support.fake_llama.engine import Engine
from tests.support.fake_llama.records import Log, Record
from tests.support.fakes import FakeClock, FakeServiceManager, Invocation, Life
from tests.support.ports import free_port
from tunerd.app import Context
from tunerd.engine.health import Expectation
from tunerd.engine.server import Address, LlamaServer
from tunerd.errors import ServiceError
from tunerd.machine.files import Files, Look, sync_folder
from tunerd.machine.process import boot_id
from tunerd.paths import Paths
from tunerd.production.journal import SwapRecord
from tunerd.production.recover import recover
from tunerd.production.status import find_drift, verify
from tunerd.production.swap import SwapRequest
from tunerd.result import ignore_progress
from tunerd.settings import ServiceSettings, Settings
from tunerd.tryout.local_service import Ending
from tunerd.units.generations import Generation, Generations, Outcome
from tunerd.words import Mode, sha256

UNIT = "llama-server.service"
# Programs that are there: a rollback looks. What they do is played by functions.
ENGINE = "/bin/true"
BROKEN = "/bin/false"
_MEMORY = Path("/dev/shm")  # noqa: S108 -- tempfile makes a folder of its own there


class _Quiet(Log):
    def _write(self, descriptor: int, line: str) -> None:
        del descriptor, line


class Server:
    """The stand-in engine's routes on a port of this process."""

    def __init__(
        self, argv: Sequence[str], record: Path | None = None, behaviour: Behaviour | None = None
    ) -> None:
        self.behaviour = behaviour = behaviour or Behaviour(needs_model=False)
        arguments = Arguments(list(argv[1:]), behaviour)
        record_path = None if record is None else str(record)
        self.engine = Engine(behaviour, arguments, _Quiet(behaviour), Record(record_path))
        self.api = api = Api(self.engine, _nothing_fails)
        api.is_loaded = True
        self._listener = listen("127.0.0.1", arguments.whole("port", 0))
        accept(self._listener, api)

    def close(self) -> None:
        stop(self._listener)


@functools.cache
def _full_pipe() -> int:
    """Whoever writes there stands still."""
    _, end = os.pipe()
    os.set_blocking(end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, bytes(4096))
    os.set_blocking(end, True)
    return end


class Process(Server):
    """A server with a process of its own, which has its words and its port, and does nothing (coreutils' `echo`, held up)."""

    def __init__(self, argv: Sequence[str], behaviour: Behaviour) -> None:
        super().__init__(argv, behaviour=behaviour)
        self._process = subprocess.Popen(
            argv, executable="/bin/echo", stdout=_full_pipe(), pass_fds=(self._listener.fileno(),)
        )
        self.pid = self._process.pid

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.wait()


def _nothing_fails(failure: object) -> NoReturn:
    raise AssertionError(f"nothing is to fail here: {failure}")


class OwnPids(FakeServiceManager):
    """Its processes have the pid of the process that answers for them: this one, or what `pids` says of a unit."""

    pid = os.getpid()

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self.pids: dict[str, int] = {}

    def _begin(self, unit: Any, at_s: float) -> None:
        self._next_pid = self.pid - 1
        super()._begin(unit, at_s)
        name = unit.definition.unit
        if unit.process is not None and name in self.pids:
            unit.process = replace(unit.process, pid=self.pids.pop(name))

    # The real ones see to it that starting at boot survives a power cut.

    def enable(self, unit: str) -> None:
        super().enable(unit)
        sync_folder(self.unit_dir)

    def disable(self, unit: str) -> None:
        super().disable(unit)
        sync_folder(self.unit_dir)


class LateClock(FakeClock):
    """One on which something happens after a while."""

    _due: tuple[float, Callable[[], object]] | None = None

    def in_s(self, seconds: float, then: Callable[[], object]) -> None:
        """Do this once so much time has passed."""
        self._due = self.monotonic_s() + seconds, then

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self._due is not None and self.monotonic_s() >= self._due[0]:
            (_, then), self._due = self._due, None
            then()


@dataclass
class World:
    """Folders, clock, units and what runs; STATE may stand elsewhere than the units."""

    folder: Path
    state_folder: Path | None = None
    clock: FakeClock = field(default_factory=FakeClock)
    servers: list[Server] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    record: Path | None = None
    """Where to keep what servers are asked."""

    def __post_init__(self) -> None:
        programs = {ENGINE: self._serve, BROKEN: _crash}
        self.manager = OwnPids(self.folder, self.clock, programs)
        self.paths = Paths(
            config_dir=self.folder / "config",
            state_dir=(self.state_folder or self.folder) / "state",
            runtime_dir=self.folder / "run",
            unit_dir=self.manager.unit_dir,
            runtime_unit_dir=self.manager.runtime_unit_dir,
        )

    def _serve(self, invocation: Invocation) -> Life:
        server = Server(invocation.argv, self.record)
        self.servers.append(server)
        return Life(on_end=server.close)

    def serve_in_a_process(self, behaviour: Behaviour, invocation: Invocation) -> Life:
        """As a program whose own words and port are looked at; its time is that of this clock."""
        server = Process(invocation.argv, behaviour)
        server.engine.passes = self.clock.advance
        self.manager.pids[invocation.unit] = server.pid
        self.servers.append(server)
        return Life(on_end=server.close)

    def close(self) -> None:
        for server in self.servers:
            server.close()

    @property
    def unit_path(self) -> Path:
        return self.paths.unit_dir / UNIT

    def drift(self) -> set[str]:
        """What `verify` finds, as codes."""
        ctx = self.context()
        entry = ctx.generations.serving(UNIT)
        return set() if entry is None else {one.code for one in find_drift(ctx, entry, deep=False)}

    def context(self, fuse: Fuse | None = None, *, asks: bool = False) -> Context:
        """What a new process would work with."""
        fuse = fuse or Fuse()
        files = Files(before=fuse.disk)
        service = ServiceSettings(unit=UNIT, settle_s=0.5, stall_s=3.0, start_limit_s=10.0)
        return Context(
            mode=Mode.SYSTEM,
            paths=self.paths,
            settings=Settings(service=service),
            environment={},
            data_dir=self.folder,
            clock=self.clock,
            gpu=FakeGpuReader(),
            services=fused_services(self.manager, fuse, asks=asks),
            files=files,
            generations=Generations(self.paths.generations_dir, files),
            progress=ignore_progress,
        )

    # Units

    def text(
        self,
        alias: str,
        *,
        program: str = ENGINE,
        words: str = "",
        service: str = "",
        starts: int = 1,
    ) -> bytes:
        """A unit whose server calls its model by this name, with words and a line of its own.

        It may be started so often in five minutes, once by default: starts that were counted before must be forgotten.
        """
        return (
            f"# {alias}\n[Unit]\nStartLimitIntervalSec=300\nStartLimitBurst={starts}\n"
            f"[Service]\n{service}\nType=exec\nExecStart={program} {words} --host 127.0.0.1 "
            f"--port {self.port} --alias {alias}\n[Install]\nWantedBy=multi-user.target\n"
        ).encode()

    def request(self, text: bytes | None, *, alias: str | None) -> SwapRequest:
        """To make `text` live."""
        return SwapRequest(
            text=text,
            old_sha256=sha256(self.standing),
            generation=a_generation(sha256(text)),
            address=Address("127.0.0.1", self.port),
            expected=Expectation(None, alias, expects_draft=False),
            model_bytes=None,
            drain=False,
        )

    @property
    def standing(self) -> bytes | None:
        """The unit file as it is."""
        try:
            return self.unit_path.read_bytes()
        except FileNotFoundError:
            return None

    def put(
        self, text: bytes, *, mode: int = 0o644, starts: bool = True, enables: bool = True
    ) -> None:
        """A unit made by hand."""
        self.unit_path.write_bytes(text)
        self.unit_path.chmod(mode)
        self.manager.reload()
        if enables:
            self.manager.enable(UNIT)
        if starts:
            self.manager.start(UNIT)

    def put_drop_in(self, line: str, name: str = "mine.conf") -> Path:
        """A line of a unit's service beside the unit, written now by the clock of this world."""
        path = self.paths.unit_dir / f"{UNIT}.d" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"[Service]\n{line}\n")
        os.utime(path, (self.clock.now_s(),) * 2)
        self.manager.reload()
        return path

    def reboot(self) -> None:
        """Power off and on."""
        packaged = self.paths.runtime_unit_dir / UNIT  # what stands there outlives this reboot
        text = packaged.read_bytes() if packaged.exists() else None
        self.manager.reboot()
        if text is not None:
            packaged.write_bytes(text)
            self.manager.reload()
            if self.manager.state(UNIT).is_enabled:
                with contextlib.suppress(ServiceError):
                    self.manager.start(UNIT)
        record = self.paths.journal_dir / f"{UNIT}.json"
        if record.exists():  # the real boot stays the same
            data = json.loads(record.read_text()) | {"boot_id": "the boot before"}
            record.write_text(json.dumps(data))

    # Looks

    def look(self) -> Look | None:
        return Files().look(self.unit_path)

    def serving_alias(self) -> str | None:
        """Who answers on the port."""
        return LlamaServer(Address("127.0.0.1", self.port), self.clock).alias()

    def snapshot(self) -> Snapshot:
        """What must be the same after a swap that did not happen."""
        state = self.manager.state(UNIT)
        return Snapshot(
            text=self.standing,
            look=self.look(),
            is_active=state.is_active,
            is_enabled=bool(state.is_enabled),
            alias=self.serving_alias(),
        )

    def leftovers(self) -> list[str]:
        """Files that no ended swap may leave."""
        folders = (self.paths.unit_dir, self.paths.state_dir)
        found = [path for folder in folders for path in folder.rglob("*") if path.suffix == ".tmp"]
        found += list(self.paths.journal_dir.glob("*"))
        return sorted(str(path) for path in found)

    def outcomes(self) -> list[Outcome]:
        """How the generations ended, newest first."""
        return [entry.ending.outcome for entry in self.context().generations.entries()]

    def recover(self) -> str | None:
        """Recovery by a new process; what it found."""
        found: str | None = recover(self.context()).payload["found"]
        return found

    def verify(self) -> int:
        """The exit code of `tunerd verify`."""
        return verify(self.context()).exit_code

    def backups(self) -> list[Path]:
        return sorted(self.paths.unit_dir.glob(f"{UNIT}.pre-*"))


@dataclass(frozen=True)
class Snapshot:
    """The part of a world that a swap changes."""

    text: bytes | None
    look: Look | None
    is_active: bool
    is_enabled: bool
    alias: str | None


@contextlib.contextmanager
def in_memory(otherwise: Path) -> Iterator[Path]:
    """A folder in memory: thousands of syncs are made in it, and none has to last."""
    if not os.access(_MEMORY, os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name:
        yield Path(name)


@contextlib.contextmanager
def a_world(folder: Path) -> Iterator[World]:
    """A world; its servers end with it."""
    world = World(folder)
    try:
        yield world
    finally:
        world.close()


def _crash(invocation: Invocation) -> Life:
    del invocation
    return Life(prints=("error: it fell over",), ends_after_s=0.5, ending=Ending(code=1))


def a_record(**changes: Any) -> SwapRecord:
    """The intent record of a swap that was cut short in this boot."""
    record = SwapRecord(
        unit=UNIT, unit_path=f"/etc/systemd/system/{UNIT}", generation=1, reason="apply",
        old_sha256="0" * 64, new_sha256="1" * 64, backup=f"{UNIT}.pre-x", boot_id=boot_id() or "unknown",
        started_s=1.0, was_active=True, was_healthy=True, was_enabled=True, old_invocation=None,
    )  # fmt: skip
    return replace(record, **changes)


def a_generation(unit_sha256: str | None) -> Generation:
    """A generation of no profile; the swap fills in the rest."""
    return Generation(unit=UNIT, reason="apply", unit_sha256=unit_sha256)
