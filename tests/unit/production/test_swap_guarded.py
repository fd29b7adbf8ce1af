"""What a swap, the way back and the choice of a rollback rest on, each left out once is seen here in seconds."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.fuse import Fuse, FusedServices, Kind, Step, full_disk
from tests.fault.scenarios import deploy, go_back
from tests.fault.world import BROKEN, ENGINE, UNIT, World, a_generation
from tunerd.errors import DeployError, RolledBack, UsageError
from tunerd.production.rollback import find_target
from tunerd.production.swap import SwapDone, swap
from tunerd.result import Progress
from tunerd.units.generations import Ending, Outcome
from tunerd.units.manager import UnitState
from tunerd.words import sha256

OTHER_ENGINE = "/bin/cat"


# On the way there.


class _Elsewhere(FusedServices):
    """A manager that reads the unit from another file, or not at all, once it was reloaded."""

    change: dict[str, object]
    is_reloaded = False

    def reload(self) -> None:
        super().reload()
        self.is_reloaded = True

    def state(self, unit: str) -> UnitState:
        state = super().state(unit)
        return replace(state, **self.change) if self.is_reloaded else state  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"fragment_path": Path("/run/systemd/transient/x")}, "another file is in force"),
        ({"load_state": "bad-setting"}, "does not load the new unit"),
    ],
)
def test_what_the_manager_parsed_is_compared_before_anything_is_restarted(
    world: World, change: dict[str, object], told: str
) -> None:
    deploy(world.context(), world, "old")
    pid = world.manager.state(UNIT).main_pid
    fuse = Fuse()
    services = _Elsewhere(world.manager, fuse)
    services.change = change

    with pytest.raises(RolledBack) as caught:
        deploy(replace(world.context(), services=services), world, "new")

    assert told in (caught.value.cause or "")
    assert "restart" not in [step.text for step in fuse.steps]
    assert world.manager.state(UNIT).main_pid == pid
    assert world.standing == world.text("old")


def test_a_plan_that_was_made_for_another_text_is_not_deployed(world: World) -> None:
    deploy(world.context(), world, "old")
    request = world.request(world.text("new"), alias="new")
    edited = world.text("old") + b"# mine\n"
    world.unit_path.write_bytes(edited)

    with pytest.raises(DeployError, match="was changed while this was planned"):
        swap(world.context(), request)

    assert world.standing == edited
    assert world.serving_alias() == "old"


def _swap(world: World, *, drain: bool) -> SwapDone:
    request = world.request(world.text("new"), alias="new")
    return swap(world.context(), replace(request, drain=drain))


@pytest.mark.parametrize("drain", [True, False])
def test_requests_under_way_are_waited_for_where_that_is_asked(world: World, drain: bool) -> None:
    deploy(world.context(), world, "old")
    world.servers[-1].behaviour.slots_are_busy = True
    began_s = world.clock.monotonic_s()

    done = _swap(world, drain=drain)

    waited_s = world.clock.monotonic_s() - began_s
    assert (waited_s >= world.context().settings.service.drain_s) is drain
    assert any("were still running" in text for text in done.notes) is drain


def test_a_commit_that_fails_leads_back_and_ctrl_c_does_not_end_that(world: World) -> None:
    deploy(world.context(), world, "old")

    def fail(step: Step) -> None:
        if step.text in {"create temporary for outcome.json", f"remove {UNIT}.json"}:
            full_disk(step)
        if step.kind is Kind.UNITS and world.standing == world.text("old"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises((RolledBack, KeyboardInterrupt)) as caught:
        deploy(world.context(Fuse(0, fail, until=1000)), world, "new")

    assert caught.type is RolledBack
    assert world.serving_alias() == "old"


def test_how_a_swap_ended_is_written_before_its_record_goes(world: World) -> None:
    deploy(world.context(), world, "old")
    fuse = Fuse()
    deploy(world.context(fuse), world, "new")
    steps = [step.text for step in fuse.steps]
    assert steps.index("sync folder of outcome.json") < steps.index(f"remove {UNIT}.json")


# On the way back.


def test_a_new_server_with_the_old_ones_name_is_not_taken_for_the_old_one(world: World) -> None:
    world.manager.programs[OTHER_ENGINE] = world.manager.programs[ENGINE]
    deploy(world.context(), world, "same")

    def press(progress: Progress) -> None:
        if progress.text == "commit":
            signal.raise_signal(signal.SIGINT)

    ctx = replace(world.context(), progress=press)
    with pytest.raises(KeyboardInterrupt):
        deploy(ctx, world, "same", program=OTHER_ENGINE)

    argv = world.manager.argv_of(UNIT)
    assert argv is not None
    assert argv[0] == ENGINE
    assert world.serving_alias() == "same"


# Where a rollback leads.


def _target(world: World) -> bytes | None:
    return find_target(world.context(), None).text


def test_the_backup_of_a_failed_swap_is_not_offered_before_that_of_the_last_good_one(
    world: World,
) -> None:
    deploy(world.context(), world, "old")
    deploy(world.context(), world, "new")
    with pytest.raises(RolledBack):
        deploy(world.context(), world, "newest", program=BROKEN)
    world.unit_path.write_bytes(world.text("edited"))

    assert _target(world) == world.text("old")


def test_where_history_is_silent_the_newest_backup_is_offered(world: World) -> None:
    world.put(world.text("live"))
    for name in ("b", "a"):
        (world.paths.unit_dir / f"{UNIT}.pre-{name}").write_bytes(world.text(name))
        time.sleep(0.02)  # by when it was made: the clock of the disk ticks every few milliseconds
    os.utime(world.paths.unit_dir / f"{UNIT}.pre-b", (0, 0))

    assert _target(world) == world.text("b")


def test_what_another_unit_replaced_is_never_offered(world: World) -> None:
    deploy(world.context(), world, "old")
    deploy(world.context(), world, "new")
    ctx, other = world.context(), "other.service"
    name = f"{other}.pre-20260101T000000Z-apply"
    (world.paths.unit_dir / name).write_bytes(world.text("others"))
    theirs = a_generation(reason="apply", unit_sha256=sha256(world.text("x")))
    theirs = replace(theirs, number=3, unit=other, replaced_backup=name)
    ctx.generations.create(theirs, world.text("x"), world.text("others"))
    ctx.generations.end(3, Ending(Outcome.SERVING, 1.0, None, None, None))

    assert _target(world) == world.text("old")
    for to in ("3", name):
        with pytest.raises(UsageError):
            find_target(world.context(), to)
    go_back(world.context())
    assert world.serving_alias() == "old"


@pytest.mark.parametrize(
    ("program", "has_model", "hint"),
    [
        ("/bin/true", False, "put the model back to `"),
        ("/no/such/server", True, "`tunerd engines keep` keeps programs"),
    ],
)
def test_where_an_older_unit_cannot_serve_any_more_the_hint_is_about_what_is_gone(
    world: World, program: str, has_model: bool, hint: str
) -> None:
    name, model = f"{UNIT}.pre-mine", world.folder / "x.gguf"
    if has_model:
        model.write_bytes(b"")
    text = f"[Service]\nExecStart={program} -m {model} --port 1\n"
    (world.paths.unit_dir / name).write_text(text)

    with pytest.raises(DeployError, match="cannot serve any more") as caught:
        find_target(world.context(), name)

    assert hint in (caught.value.hint or "")
