"""A real PostgreSQL of Debian's packages, in a folder of its own, as an account without rights."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from tests.support import needs
from tests.support.ports import free_port

_ACCOUNT = "postgres"
# Nothing here outlives its test, so nothing has to reach a disk.
_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off",
             "shared_buffers": "16MB", "max_wal_size": "64MB", "listen_addresses": "127.0.0.1",
             "timezone": "UTC", "max_connections": "40"}  # fmt: skip
# Who comes by the socket is let in; over TCP only with a password.
_HBA = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
PASSWORD = "hush hush"  # noqa: S105  of tests


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        needs.missing("postgres", "no PostgreSQL", "`apt-get install postgresql` brings it")
    return found[-1].parent


@dataclass
class Postgres:
    """A server; each test takes a database of its own."""

    folder: Path
    port: int
    programs: Path
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._program("pg_ctl", "--wait", "--pgdata", self.folder / "data",
                      "--log", self.folder / "log", "start")  # fmt: skip

    def stop(self, mode: str = "fast") -> None:
        """Stop it; `immediate` as a crash would."""
        self._program("pg_ctl", "--wait", "--mode", mode, "--pgdata", self.folder / "data", "stop")

    @property
    def pid(self) -> int:
        """Of its first process."""
        return int((self.folder / "data/postmaster.pid").read_text().split("\n")[0])

    def create(self) -> None:
        """Make its folder."""
        if os.geteuid() == 0:
            shutil.chown(self.folder, _ACCOUNT, _ACCOUNT)
        self._program("initdb", "--no-sync", "--username=tunerd", "--auth=trust", "--encoding=UTF8",
                      "--locale=C", "--pgdata", self.folder / "data")  # fmt: skip
        lines = {**_SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        text = "".join(f"{name} = '{value}'\n" for name, value in lines.items())
        with (self.folder / "data/postgresql.conf").open("a", encoding="utf-8") as file:
            file.write(text)
        (self.folder / "data/pg_hba.conf").write_text(_HBA)

    def query(self, text: str, database: str = "postgres") -> list[str]:
        """Rows of an answer, or of no answer, as psql prints them."""
        done = self._program("psql", "--no-psqlrc", "--quiet", "--tuples-only", "--no-align",
                             "--host", self.folder, "--port", str(self.port), "--username=tunerd",
                             "--set=ON_ERROR_STOP=1", "--command", text, database)  # fmt: skip
        return done.splitlines()

    def dump(self, url: str) -> str:
        """All that a database holds."""
        return self._program("pg_dump", "--host", self.folder, "--port", str(self.port),
                             "--username=tunerd", name_of(url))  # fmt: skip

    def database(self) -> str:
        """A new database; its address by the socket."""
        name = f"t{next(self._numbers)}"
        self.query(f"create database {name}")
        return self.url(name)

    def url(self, name: str, **more: object) -> str:
        """The address of a database by the socket."""
        query = "".join(f"&{key}={quote(str(value))}" for key, value in more.items())
        return f"postgresql+psycopg://tunerd@/{name}?host={quote(str(self.folder))}&port={self.port}{query}"

    def tcp_url(self, name: str, *, port: int | None = None, more: str = "") -> str:
        """Its address over TCP, where a password is wanted."""
        return f"postgresql+psycopg://tunerd@127.0.0.1:{port or self.port}/{name}{more}"

    def _program(self, name: str, *words: object) -> str:
        argv = [str(self.programs / name), *map(str, words)]
        if os.geteuid() == 0:
            who = (f"--reuid={_ACCOUNT}", f"--regid={_ACCOUNT}", "--clear-groups")
            argv = ["setpriv", *who, *argv]
        # A file, for the server keeps what it inherits.
        with tempfile.TemporaryFile() as said:
            done = subprocess.run(argv, stdout=said, stderr=said, stdin=subprocess.DEVNULL,
                                  cwd="/", check=False, timeout=300,
                                  env={"PATH": os.environ["PATH"], "LC_ALL": "C", "PGCTLTIMEOUT": "240"})  # fmt: skip
            said.seek(0)
            text = said.read().decode()
        assert done.returncode == 0, f"{name}: {text}"
        return text


@contextlib.contextmanager
def postgres_server() -> Iterator[Postgres]:
    """A server that runs, with a password for who comes over TCP; nothing of it is left."""
    programs = _programs()
    # Short, for the path of a socket has 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="tunerd-pg-"))
    server = Postgres(folder, free_port(), programs)
    try:
        server.create()
        server.start()
        server.query(f"alter role tunerd password '{PASSWORD}'")
        yield server
    finally:
        if (folder / "data/postmaster.pid").exists():
            server.stop("immediate")
        shutil.rmtree(folder)


def name_of(url: str) -> str:
    """The name of the database of an address."""
    return url.partition("?")[0].rpartition("/")[2]


def password_file(folder: Path, password: str = PASSWORD) -> Path:
    """A file from which libpq takes a password."""
    path = folder / "pgpass"
    path.write_text(f"*:*:*:*:{password}\n")
    path.chmod(0o600)
    return path
