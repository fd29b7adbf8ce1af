"""A sweep in a terminal that has given the place back, for others use the server, and waits until nobody does."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator

import pytest

from tests.support.sweep_box import SweepBox, kill, swept, upgrade
from tests.support.waiting import until
from tunerd.machine.files import is_locked, lock

pytestmark = pytest.mark.timeout(540)


@contextlib.contextmanager
def somebody_else(box: SweepBox) -> Iterator[None]:
    """Asks whoever serves, again and again."""
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            box.ask(n_predict=60)

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield
    finally:
        ends.set()
        client.join()


@pytest.mark.alone
def test_a_sweep_that_has_yielded_is_known_and_waits_until_nobody_else_measures() -> None:
    """`status` said that no sweep runs, `start` began another, and the first ended with an error for it."""
    with swept() as box:
        sweep = box.begin("run", "--budget", "120s")
        try:
            with somebody_else(box):
                until(lambda: box.json("sweep", "status")["waits"] == 1, "it waits")
                assert f"kill -INT {sweep.pid}" in box.call("sweep", "stop", code=None).stderr
                refused = box.call("sweep", "start", "--budget", "30s", "--yes", code=None)
                assert "another measurement is under way" in refused.stderr
                paths = box.box.context.paths
                until(lambda: not is_locked(paths.measure_lock), "its lease has ended")
                bench = lock(paths.measure_lock, purpose="bench", since="now")
                bench.__enter__()
            until(lambda: box.serves, "production serves")
            before = starts(box)
            for _ in range(5):
                assert box.json("sweep", "status")["waits"] == 1
            bench.__exit__(None, None, None)
            until(lambda: starts(box) > before, "it goes on")
        finally:
            kill(sweep, 2)
        until(lambda: box.serves, "production serves")


def starts(box: SweepBox) -> int:
    found: int = box.json("sweep", "status")["last"]["starts"]
    return found


def test_a_sweep_that_has_yielded_does_not_stop_what_was_deployed_meanwhile() -> None:
    """It went on from what had served before, and stopped the new server for a winner that nobody could deploy."""
    with swept() as box:
        sweep = box.begin("run", "--budget", "120s")
        try:
            with somebody_else(box):
                until(lambda: box.json("sweep", "status")["waits"] == 1, "it waits")
                box.call("apply", "night", "--set", "serving.alias=other", "--yes")
            told = json.loads(sweep.communicate(timeout=60)[0])
        finally:
            sweep.kill()
        assert "what serves is no longer what it began with" in str(told["messages"])
        assert "other" in box.call("status").stdout
        assert box.serves


def test_a_sweep_that_has_yielded_does_not_go_on_with_another_build() -> None:
    """What the new build showed was kept as shown by the old one, for arms are planned anew."""
    with swept() as box:
        sweep = box.begin("run", "--budget", "120s")
        try:
            with somebody_else(box):
                until(lambda: box.json("sweep", "status")["waits"] == 1, "it waits")
                paths = box.box.context.paths
                until(lambda: not is_locked(paths.measure_lock), "its lease has ended")
                bench = lock(paths.measure_lock, purpose="bench", since="now")
                bench.__enter__()
            until(lambda: box.serves and not is_locked(paths.lock), "production serves")
            upgrade(box)
            box.box.context.services.restart(box.box.context.unit)
            until(lambda: box.serves, "the new build serves")
            bench.__exit__(None, None, None)
            told = json.loads(sweep.communicate(timeout=60)[0])
        finally:
            sweep.kill()
        assert "what serves, an engine, " in str(told["messages"])
        assert box.serves
        arms = box.json("results", "show", "1")["arms"]
        assert len({one["fingerprint"]["engine_sha256"] for one in arms}) == 1
