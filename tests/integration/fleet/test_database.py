"""The shared database when the world is against it: away, full, shut, hanging, older and newer."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.integration.fleet.test_hand_in import a_box, measure, samples_in
from tests.integration.measure.test_store import RUN, SAMPLE
from tests.support import needs
from tests.support.lossy_disk import tiny_disk
from tests.support.needs import needs_root
from tests.support.ports import free_port
from tests.support.postgres import PASSWORD, Postgres, name_of, password_file
from tests.support.programs import program
from tests.support.stores import open_store
from tests.support.waiting import until
from tunerd.errors import Busy, HostError
from tunerd.fleet.shared import STEPS, Database, fleet_status, hand_in
from tunerd.machine.net import can_bind
from tunerd.measure.store import EvidenceStore, Step

NEXT = max(STEPS) + 1


def add_column(connection: sa.Connection) -> None:
    connection.execute(sa.text("alter table box add column rack text"))
    connection.execute(sa.text("select pg_sleep(0.2)"))


NEWER: Mapping[int, Step] = {**STEPS, NEXT: add_column}


def refused(url: str) -> HostError | Busy:
    """How an address is refused; no password is in any of it."""
    with pytest.raises((HostError, Busy)) as caught:
        Database(url, writable=True, limit_s=15.0).close()
    error = caught.value
    said = f"{error.message} {error.cause} {error.state} {error.hint} {error.__cause__}"
    assert PASSWORD not in said
    assert "wrong-one" not in said
    assert isinstance(error, HostError | Busy)
    return error


def test_several_boxes_that_upgrade_at_once_all_succeed_and_one_does_it(
    postgres: Postgres, url: str
) -> None:
    with open_store(url) as store:
        number = store.add_run(RUN)
    with ThreadPoolExecutor(5) as pool:  # raises what one raised
        list(pool.map(lambda _: Database(url, writable=True, steps=NEWER).close(), range(5)))

    versions = postgres.query("select version from schema_versions order by 1", name_of(url))
    assert versions == [str(one) for one in sorted(NEWER)]
    with EvidenceStore(Database(url, writable=False, steps=NEWER)) as store:
        assert [run.number for run in store.runs()] == [number]


def test_an_upgrade_that_is_cut_short_leaves_the_version_before(
    postgres: Postgres, url: str
) -> None:
    Database(url, writable=True).close()

    def fails(connection: sa.Connection) -> None:
        add_column(connection)
        connection.execute(sa.text("select pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(HostError):
        Database(url, writable=True, steps={**STEPS, NEXT: fails})
    assert postgres.query("select max(version) from schema_versions", name_of(url)) == [
        str(max(STEPS))
    ]
    Database(url, writable=True, steps=NEWER).close()


def test_an_older_tunerd_refuses_what_a_newer_one_wrote_and_keeps_its_samples(
    tmp_path: Path, postgres: Postgres, url: str
) -> None:
    Database(url, writable=True, steps=NEWER).close()
    box = a_box(tmp_path / "gpu1", url)
    measure(box, 3)
    for act in (hand_in, fleet_status):
        with pytest.raises(HostError, match="was written by a newer tunerd") as caught:
            act(box.context)
        assert caught.value.state == "nothing in it was changed"
    assert samples_in(postgres, url) == (0, 0)
    with EvidenceStore(box.context.paths.evidence) as store:
        assert store.count_runs() == 1


def test_a_database_of_another_program_is_left_alone(postgres: Postgres, url: str) -> None:
    postgres.query("create table bookmarks (url text)", name_of(url))
    assert "of another program" in refused(url).message
    tables = postgres.query(
        "select tablename from pg_tables where schemaname = 'public'", name_of(url)
    )
    assert tables == ["bookmarks"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("?passfile={wrong}", "it does not let this account in"),
        ("?passfile=/nowhere/pgpass", "it does not let this account in"),
        ("?passfile={right}&sslmode=require", "TLS is refused"),
    ],
)
def test_what_keeps_it_from_connecting_is_said_without_the_password(
    tmp_path: Path, postgres: Postgres, url: str, more: str, says: str
) -> None:
    (tmp_path / "wrong").mkdir()
    files = {
        "wrong": password_file(tmp_path / "wrong", "wrong-one"),
        "right": password_file(tmp_path),
    }
    assert says in refused(postgres.tcp_url(name_of(url), more=more.format(**files))).message


def test_a_database_that_is_not_there_or_not_ours_is_said(postgres: Postgres, url: str) -> None:
    assert "there is no such database" in refused(postgres.url("nowhere")).message
    with contextlib.suppress(AssertionError):  # from another test of this server
        postgres.query("create role guest login")
    postgres.query("revoke create on schema public from public", name_of(url))
    theirs = postgres.url(name_of(url)).replace("tunerd@", "guest@")
    assert "this account may not do that" in refused(theirs).message


@contextlib.contextmanager
def pooled(postgres: Postgres, *lines: str) -> Iterator[int]:
    """The port of a real PgBouncer before that server."""
    found = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        needs.missing("postgres", "no PgBouncer", "`apt-get install pgbouncer` brings it")
    file, port = postgres.folder / "pooler.ini", free_port()
    (postgres.folder / "users").write_text(f'"tunerd" "{PASSWORD}"\n')
    file.write_text("\n".join([
        "[databases]", f"* = host=127.0.0.1 port={postgres.port}", "[pgbouncer]", "auth_type = trust",
        f"auth_file = {postgres.folder}/users", f"listen_port = {port}", "listen_addr = 127.0.0.1",
        "unix_socket_dir =", *lines,
    ]))  # fmt: skip
    # It does not run as root.
    who = (
        ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
        if os.geteuid() == 0
        else ()
    )
    with subprocess.Popen([*who, found, "--quiet", str(file)]) as pooler:
        try:
            until(lambda: not can_bind("127.0.0.1", port), "PgBouncer listens")
            yield port
        finally:
            pooler.terminate()


@pytest.mark.parametrize("mode", ["transaction", "session"])
@pytest.mark.parametrize("options", ["", "ignore_startup_parameters = options"])
def test_a_pooler_in_between_is_refused_by_name(
    postgres: Postgres, url: str, mode: str, options: str
) -> None:
    """Two boxes held the same claim at once, and no limit of time was kept."""
    with pooled(postgres, f"pool_mode = {mode}", options) as port:
        error = refused(postgres.tcp_url(name_of(url), port=port))
    assert "a pooler of connections, such as PgBouncer, stands before it" in error.message
    assert error.hint is not None
    assert "store.url" in error.hint


def test_a_server_that_is_away_is_said_at_once(tmp_path: Path) -> None:
    error = refused("postgresql+psycopg://tunerd@127.0.0.1:1/tunerd")
    assert "it cannot be reached" in error.message
    assert error.state is not None
    assert "stays on this box" in error.state
    gone = f"postgresql+psycopg://tunerd@/tunerd?host={tmp_path}"
    assert "it cannot be reached" in refused(gone).message
    for hosts in ("host=a&host=b&port=5432", "host=a,b&port=5432"):  # which cannot be told apart
        error = refused(f"postgresql+psycopg://tunerd@/tunerd?{hosts}")
        assert "cannot be read" in error.message
        assert "host=a:5432&host=b:5432" in str(error.hint)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def hasty(url: str) -> Database:
    """One of little patience, for which the tables are there already."""
    Database(url, writable=True).close()
    return Database(url, writable=True, limit_s=0.5)


@pytest.mark.timeout(180)
def test_a_server_that_takes_connections_and_says_nothing_is_given_up(
    postgres: Postgres, url: str
) -> None:
    with stopped(postgres.pid):
        assert "it cannot be reached" in refused(url).message


@pytest.mark.timeout(180)
def test_a_server_that_stops_in_the_middle_is_cut_off(url: str) -> None:
    database = hasty(url)

    def write() -> None:
        with database.writing() as connection:
            pid = int(connection.execute(sa.text("select pg_backend_pid()")).scalar_one())
            with stopped(pid):
                connection.execute(sa.text("select 1"))

    with pytest.raises(HostError, match="it does not answer"):
        write()
    with EvidenceStore(database) as store:
        assert store.count_runs() == 0, "the next connection is another one"


def test_a_statement_that_takes_too_long_is_ended_by_the_server(url: str) -> None:
    database = hasty(url)
    with pytest.raises(HostError, match="it takes too long"), database.reading() as connection:
        connection.execute(sa.text("select pg_sleep(60)"))
    database.close()


def test_a_database_that_takes_no_changes_is_said(postgres: Postgres, url: str) -> None:
    with open_store(url) as store:
        store.add_run(RUN)
    postgres.query(f"alter database {name_of(url)} set default_transaction_read_only = on")
    with open_store(url) as store, pytest.raises(HostError, match="it is read-only"):
        store.add_run(RUN)


@needs_root
def test_a_full_disk_there_is_said_and_everything_is_handed_in_when_there_is_space(
    tmp_path: Path, postgres: Postgres
) -> None:
    with tiny_disk(postgres.folder / "tiny", "11m") as folder, contextlib.ExitStack() as after:
        after.callback(postgres.query, "drop tablespace if exists tiny")
        after.callback(postgres.query, "drop database if exists tiny with (force)")
        shutil.chown(folder, "postgres", "postgres")
        postgres.query(f"create tablespace tiny location '{folder}'")
        postgres.query("create database tiny tablespace tiny")
        box = a_box(tmp_path / "gpu1", postgres.url("tiny"))
        with EvidenceStore(box.context.paths.evidence) as store:
            run = store.add_run(RUN)
            for at in range(0, 4000, 500):
                store.add_samples(run, [
                    replace(SAMPLE, prompt_id=f"p{at + one}", details={"filler": list(range(300))})
                    for one in range(500)
                ], arm="live")  # fmt: skip
        with pytest.raises(HostError, match="its disk is full"):
            hand_in(box.context)
        there = postgres.query("select count(*) from entry where kind = 'sample'", "tiny")
        assert 0 <= int(there[0]) < 4000
        program("mount", "-o", "remount,size=64m", folder)
        hand_in(box.context)
        assert samples_in(postgres, "tiny") == (4000, 4000)
