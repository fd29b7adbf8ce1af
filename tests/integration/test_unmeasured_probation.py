"""What watches a server that was deployed by hand and never measured."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.stand_in import install
from tests.support.sweep_box import SPEED, SweepBox, for_everybody, swept, until
from tunerd.actions.context import Context
from tunerd.actions.probation import is_stopped_by_hand, run_probation
from tunerd.core.result import ActionResult
from tunerd.errors import UsageError
from tunerd.system.files import lock
from tunerd.system.ports import free_port

# Each test goes on from what the one before it left, so all run in one process.
pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("probation")]

UNIT = "llama-server.service"


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    with swept(free_port()) as found:
        yield found


def quick(box: SweepBox) -> Context:
    """Looks more often than a settings file may ask for."""
    ctx = box.box.context
    often = ctx.settings.probation.model_copy(update={"every_s": 0.2})
    return replace(ctx, settings=ctx.settings.model_copy(update={"probation": often}))


def watched(box: SweepBox) -> dict[str, Any]:
    rows: list[dict[str, Any]] = box.json("probation", "show")["probations"]
    return rows[0] if rows else {"generation": 0, "state": ""}


def test_a_first_server_has_nothing_to_go_back_to_and_is_not_watched(box: SweepBox) -> None:
    assert box.json("probation", "show")["probations"] == []


def test_a_server_that_dies_after_apply_is_taken_back_though_nothing_was_measured(
    box: SweepBox,
) -> None:
    done = box.json("apply", "night", "--set", "speculation.n_max=2", "--yes")
    told = {one["code"]: one["text"] for one in done["messages"]}
    assert "its speed is not judged" in told["probation"]
    until(lambda: watched(box)["generation"] == done["generation"], "the first look")
    assert watched(box)["state"] == "running"
    assert watched(box)["basis"]["slowest_tok_s"] is None
    pid = box.box.context.services.state(UNIT).main_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: watched(box)["state"] == "taken back", "it is taken back")
    assert "died" in watched(box)["reason"]
    until(lambda: box.serves, "what served before serves")
    assert "--spec-draft-n-max 4" in " ".join(box.engine.served()[-1])


def test_a_server_that_serves_until_the_end_passes_and_says_what_was_not_judged(
    box: SweepBox,
) -> None:
    done = box.json("apply", "night", "--set", "speculation.n_max=2", "--yes", "--no-probation")
    result = run_probation(quick(box), done["generation"], sweep=None, duration_s=1.0)
    assert result.payload["state"] == "passed"
    assert "none was measured" in result.payload["reason"]


def test_a_server_that_somebody_stopped_stays_stopped(box: SweepBox) -> None:
    ctx = quick(box)
    serving = ctx.generations.serving(ctx.unit)
    assert serving is not None
    ctx.services.stop(UNIT)
    result = run_probation(ctx, serving.generation.number, sweep=None, duration_s=2.0)
    assert (result.payload["state"], result.payload["reason"]) == ("ended", "somebody stopped it")
    assert not ctx.services.state(UNIT).is_active
    ctx.services.start(UNIT)


class Meddling:
    """A clock on which something happens after the second look."""

    def __init__(self, ctx: Context, happens: Callable[[], object]) -> None:
        self._clock = ctx.clock
        self._happens = happens
        self._n_sleeps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)
        self._n_sleeps += 1
        if self._n_sleeps == 2:
            self._happens()


def run(box: SweepBox, happens: Callable[[], object], duration_s: float = 10.0) -> ActionResult:
    ctx = quick(box)
    serving = ctx.generations.serving(ctx.unit)
    assert serving is not None
    meddling: Any = Meddling(ctx, happens)
    return run_probation(
        replace(ctx, clock=meddling), serving.generation.number, sweep=None, duration_s=duration_s
    )


def die(box: SweepBox) -> None:
    pid = box.box.context.services.state(UNIT).main_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_an_apply_that_fails_does_not_end_the_watch(box: SweepBox) -> None:
    bad = install(box.box.folder / "bad", **SPEED, fail="oom-weights")
    for_everybody(bad)
    settings = box.box.folder / "config" / "tunerd.toml"
    before = settings.read_text()
    settings.write_text(f'{before}[engines.bad]\npath = "{bad.program}"\nallow_writable = true\n')

    def fail() -> None:
        other = ('engine.prefer=["bad"]', "speculation.type=off")
        words = [word for one in other for word in ("--set", one)]
        try:
            box.call("apply", "night", *words, "--yes", code=3)
        finally:
            settings.write_text(before)

    beside = threading.Thread(target=fail)  # so that looks fall into the middle of the swap
    result = run(box, beside.start, duration_s=15.0)
    beside.join()
    assert result.payload["state"] == "passed"


def test_where_somebody_changes_the_server_it_is_taken_back_afterwards(box: SweepBox) -> None:
    with contextlib.ExitStack() as held:
        paths = box.box.context.paths

        def die_while_it_is_locked() -> None:
            held.enter_context(lock(paths.lock, purpose="a test", since="now"))
            die(box)
            threading.Timer(3.0, held.close).start()

        result = run(box, die_while_it_is_locked, duration_s=60.0)
    assert (result.payload["state"], result.exit_code) == ("taken back", 3)
    assert "--spec-draft-n-max 4" in " ".join(box.engine.served()[-1])


def test_an_edit_by_hand_ends_the_watch_and_stays(box: SweepBox) -> None:
    box.json("apply", "night", "--set", "speculation.n_max=2", "--yes", "--no-probation")
    text = box.box.unit.read_text()
    edited = text.replace("[Service]", "[Service]\nEnvironment=MINE=1")
    assert edited != text

    def edit_and_die() -> None:
        box.box.unit.write_text(edited)
        box.box.context.services.reload()
        die(box)

    result = run(box, edit_and_die)
    assert (result.payload["state"], result.payload["reason"]) == (
        "ended", "somebody edited the unit",
    )  # fmt: skip
    assert box.box.unit.read_text() == edited
    ctx = quick(box)
    serving = ctx.generations.serving(ctx.unit)
    assert serving is not None
    with pytest.raises(UsageError, match="edited"):
        run_probation(ctx, serving.generation.number, sweep=None, duration_s=1.0)
    box.box.unit.write_text(text)
    ctx.services.reload()
    ctx.services.restart(UNIT)
    until(lambda: box.serves, "it serves again")


def test_it_goes_back_by_the_history_where_the_backup_is_gone(box: SweepBox) -> None:
    ctx = box.box.context
    serving = ctx.generations.serving(ctx.unit)
    assert serving is not None
    assert serving.generation.replaced_backup is not None

    def lose_the_backup_and_die() -> None:
        (ctx.paths.unit_dir / str(serving.generation.replaced_backup)).unlink()
        die(box)

    result = run(box, lose_the_backup_and_die, duration_s=60.0)
    assert result.payload["state"] == "taken back"
    assert "--spec-draft-n-max 4" in " ".join(box.engine.served()[-1])


def test_where_nothing_can_be_written_it_watches_on(box: SweepBox) -> None:
    folder = box.box.folder / "state" / "probation"
    kept = folder.with_name("kept")

    def take_the_folder_away() -> None:
        folder.rename(kept)
        folder.write_text("no folder")

    try:
        assert run(box, take_the_folder_away, duration_s=2.0).payload["state"] == "passed"
    finally:
        folder.unlink()
        kept.rename(folder)


def test_what_is_the_same_as_before_is_not_watched(box: SweepBox) -> None:
    done = box.json("apply", "night", "--yes")
    told = {one["code"]: one["text"] for one in done["messages"]}
    assert told["no-probation"] == "no probation: what served before is the same"


def test_the_settings_may_leave_it_out(box: SweepBox) -> None:
    settings = box.box.folder / "config" / "tunerd.toml"
    before = settings.read_text()
    settings.write_text(before.replace("[probation]", "[probation]\nenabled = false"))
    try:
        done = box.json("apply", "night", "--set", "speculation.n_max=2", "--yes")
    finally:
        settings.write_text(before)
    told = {one["code"]: one["text"] for one in done["messages"]}
    assert told["no-probation"] == "no probation: probation.enabled is false"
    assert watched(box)["generation"] != done["generation"]


def test_what_is_measured_meanwhile_is_judged_by(box: SweepBox) -> None:
    def measure() -> None:
        box.call("bench", "--suite", "workload", "--workload", "small", "--yes")

    result = run(box, measure, duration_s=20.0)
    assert result.payload["basis"]["slowest_tok_s"] is not None


@pytest.mark.parametrize(
    ("active", "result", "is_stopped"),
    [
        ("inactive", "success", True),
        ("deactivating", "success", True),
        ("failed", "timeout", True),
        ("failed", "signal", False),
        ("inactive", "exit-code", False),
        ("activating", "success", False),
    ],
)
def test_a_stop_by_hand_is_told_from_a_death(
    box: SweepBox, active: str, result: str, is_stopped: bool
) -> None:
    state = replace(box.box.context.services.state(UNIT), active_state=active, result=result)
    assert is_stopped_by_hand(state) is is_stopped
