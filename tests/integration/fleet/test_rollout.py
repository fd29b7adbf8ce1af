"""A change that goes from box to box, over a real sshd, with what can go wrong on the way."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.campaign import TIMEOUT_S, chance, faults
from tests.support.bench_box import BenchBox
from tests.support.made_sweep import put_proposal
from tests.support.ssh_boxes import Fleet, fleet, states
from tests.support.stand_in import install
from tests.support.supervised import processes_with
from tests.support.sweep_box import SPEED
from tests.support.waiting import until
from tunerd.fleet.rollout import roll_back
from tunerd.fleet.steps import Rollout, State, Step
from tunerd.machine.files import lock
from tunerd.records import plain

pytestmark = pytest.mark.timeout(1500)

CHANGE = ("apply", "night", "--set", "speculation.n_max=2", "--yes")
UNWATCHED = (*CHANGE, "--no-probation")
ANOTHER = ("apply", "night", "--set", "speculation.n_max=3", "--yes", "--no-probation")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path) as found:
        yield found


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Fleet]:
    """Where a second box would show nothing more."""
    with fleet(tmp_path, count=1) as found:
        yield found


def test_every_box_gets_it_in_turn_and_gives_it_back_in_reverse(two: Fleet) -> None:
    operator = two.operator()
    done = operator.fleet(*UNWATCHED)
    assert states(done) == ["done", "done"]
    for one in two.boxes:
        assert one.swaps == [("apply", "serving"), ("apply", "serving")]
        assert "--spec-draft-n-max 2" in " ".join(one.made.engine.served()[-1])

    again = operator.fleet(*UNWATCHED)
    assert states(again) == ["skipped", "skipped"]
    assert operator.fleet("show")["rollout"] == done["rollout"], "there was nothing to write of"

    person = two.boxes[1]
    person.made.call("apply", "night", "--set", "speculation.n_max=3", "--yes")
    back = operator.fleet("rollback", "--yes", code=1)
    assert states(back) == ["returned", "left alone"]
    kept = done["boxes"][1]["backup"]
    assert f"`ssh gpu2 tunerd rollback --to={kept}`" in back["messages"][0]["hint"]
    assert "--spec-draft-n-max 4" in " ".join(two.boxes[0].made.engine.served()[-1])
    assert "--spec-draft-n-max 3" in " ".join(person.made.engine.served()[-1])
    assert two.boxes[0].swaps[-1] == ("rollback", "serving")
    assert len(two.boxes[0].swaps) == 3

    operator.fleet(*UNWATCHED)
    with lock(person.made.box.context.paths.lock, purpose="a change", since="just now"):
        busy = operator.fleet("rollback", "--yes", code=1)
    assert states(busy) == ["returned", "watched"]
    assert "it did not go back; `tunerd fleet rollback" in busy["messages"][0]["hint"]
    person.breaks("away")
    away = operator.fleet("rollback", "--yes", code=1)
    assert states(away) == ["returned", "watched"], "nobody told it to"
    person.breaks("")
    assert states(operator.fleet("resume")) == ["returned", "returned"]


def test_nothing_is_touched_where_one_box_cannot_take_it(two: Fleet) -> None:
    two.boxes[1].breaks("away")
    operator = two.operator()
    told = operator.fleet(*UNWATCHED, code=1)["error"]
    assert "1 of 2 boxes" in told["message"]
    assert told["state"] == "nothing was touched on any box"
    two.boxes[1].lies(b"\x1b]0;owned\x07 {")
    told = operator.fleet(*UNWATCHED, code=1)["error"]
    assert "gpu2: it cannot be asked" in told["cause"]
    two.boxes[1].breaks("closed")
    told = two.operator("sudoer", command='["sudo", "tunerd"]').fleet(*UNWATCHED, code=1)["error"]
    assert "its answer is not JSON of tunerd: 'This account is currently not av" in told["cause"]
    assert "`ssh BOX sudo tunerd apply --json --dry-run" in told["hint"]
    two.boxes[1].breaks("")
    first = two.boxes[0].made
    first.call("apply", "night", "--set", "speculation.n_max=2", "--yes")
    first.box.context.services.stop("llama-server.service")
    told = operator.fleet(*UNWATCHED, code=1)["error"]
    assert "gpu1: it already serves exactly that, but it is not well" in told["cause"]
    assert [len(one.swaps) for one in two.boxes] == [2, 1]


def test_it_stops_at_a_box_that_fails_its_gate(two: Fleet) -> None:
    for one in two.boxes:
        engine = install(one.folder / "other", **SPEED)
        if one is two.boxes[0]:
            engine.configure(fail="oom-weights")
        with (one.folder / "config/tunerd.toml").open("a") as settings:
            settings.write(f'[engines.other]\npath = "{engine.program}"\nallow_writable = true\n')
    operator = two.operator()
    words = ("--set", 'engine.prefer=["other"]', "--set", "speculation.type=off")
    stopped = operator.fleet(*UNWATCHED, *words, code=3)
    assert states(stopped) == ["went back", "waiting"]
    assert "out of VRAM" in stopped["boxes"][0]["text"]
    assert [one.swaps[-1][1] for one in two.boxes] == ["rolled back", "serving"]

    past = operator.fleet("resume", "--yes", "--past", code=3)
    assert states(past) == ["went back", "done"]
    assert [len(one.swaps) for one in two.boxes] == [2, 2]
    back = operator.fleet("rollback", "--yes")
    assert states(back) == ["went back", "returned"]
    assert back["messages"] == []


def test_nobody_goes_past_a_box_without_a_server_until_it_serves_again(one: Fleet) -> None:
    first, operator = one.boxes[0], one.operator()
    first.made.engine.configure(fail="oom-weights")  # the one before does not start again either
    assert states(operator.fleet(*UNWATCHED, code=4)) == ["stranded"]
    stopped = operator.fleet("resume", "--yes", "--past", code=4)
    assert states(stopped) == ["stranded"]
    assert "once it serves again, `tunerd fleet resume`" in stopped["messages"][0]["hint"]

    first.made.engine.configure(fail=None)
    first.made.call("recover", code=None)
    first.made.box.context.services.start("llama-server.service")
    until(lambda: first.made.json("status")["healthy"], "it serves again")
    assert states(operator.fleet("resume", "--yes", code=3)) == ["went back"]
    assert states(operator.fleet("resume", "--yes", "--past", code=None)) == ["went back"]


def test_it_stops_at_a_box_that_nobody_watches_or_whose_probation_goes_back(two: Fleet) -> None:
    first, second = two.boxes
    operator = two.operator()
    stopped = operator.fleet(*CHANGE, code=1)
    assert states(stopped) == ["watched", "waiting"]
    assert "no daemon runs there" in stopped["messages"][0]["text"]
    with first.made.daemon():
        walking = operator.begin("resume", "--yes", "--json")
        until(lambda: first.made.probation().get("boot_id") is not None, "it is watched")
        pid = first.made.box.context.services.state("llama-server.service").main_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        out, _ = walking.communicate(timeout=360)
    assert walking.returncode == 3, out
    assert states(operator.fleet("show")) == ["went back", "waiting"]
    assert "died" in out
    assert second.swaps == [("apply", "serving")]


def test_a_box_that_hangs_or_is_cut_off_is_told_of_as_unknown_and_settled_later(one: Fleet) -> None:
    first = one.boxes[0]
    first.breaks("hang")
    operator = one.operator(change_s="3")
    stopped = operator.fleet(*UNWATCHED, code=4)
    assert states(stopped) == ["applying"]
    assert "nothing has been done there" in stopped["messages"][0]["text"]
    assert "ssh gpu1 tunerd status" in stopped["messages"][0]["hint"]
    first.breaks("hang-after")
    operator.fleet("resume", "--yes", code=None)
    until(lambda: len(first.swaps) == 2, "the box does what it was told")
    first.breaks("")
    done = one.operator().fleet("resume", "--yes")
    assert states(done) == ["done"]
    assert first.swaps == [("apply", "serving")] * 2, "never twice"

    first.breaks("cut")
    operator = one.operator()
    operator.fleet(*ANOTHER, code=None)
    until(lambda: len(first.swaps) == 3, "the box went on by itself")
    first.breaks("")
    assert states(operator.fleet("resume", "--yes")) == ["done"]
    assert first.swaps == [("apply", "serving")] * 3


def test_ctrl_c_ends_it_and_who_is_behind_the_box_that_stops_it_is_not_asked(two: Fleet) -> None:
    first = two.boxes[0]
    first.made.engine.configure(load_s=3.0)
    operator = two.operator()
    walking = operator.begin(*UNWATCHED)
    until(lambda: first.asked("apply --json --yes") > 0, "the first box was told")
    walking.send_signal(signal.SIGINT)
    _, told = walking.communicate(timeout=180)
    assert walking.returncode == 130
    assert "gpu1: applying" in told
    for one in two.boxes:
        one.breaks("away")
    stopped = operator.fleet("resume", "--yes", code=4)
    assert states(stopped) == ["applying", "waiting"]
    assert "ssh gpu1 tunerd status" in stopped["messages"][0]["hint"]
    until(lambda: len(first.swaps) == 2, "the box goes on by itself")
    for one in two.boxes:
        one.breaks("")
    assert states(operator.fleet("resume", "--yes")) == ["done", "done"]
    assert [one.swaps for one in two.boxes] == [[("apply", "serving")] * 2] * 2


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("victim", faults(["box"], ["operator", "connection", "box"]))
def test_whatever_is_killed_nothing_is_applied_twice(two: Fleet, victim: str) -> None:
    operator = two.operator()
    for one in two.boxes:
        one.made.engine.configure(load_s=1.0)
    after_s = chance(len(victim)).uniform(0.0, 4.0)
    walking = operator.begin(*UNWATCHED)
    until(lambda: two.boxes[0].asked("apply --json --yes") > 0, "the first box was told")
    time.sleep(after_s)
    pids: set[int] = set()

    def is_there() -> bool:
        if victim == "operator":
            pids.add(walking.pid)
        elif victim == "connection":
            pids.update(processes_with(f"{two.folder}/ssh_config"))
        else:  # its tunerd, while it deploys
            folders = [one.folder for one in two.boxes]
            found = processes_with("--shown=")
            pids.update(pid for pid in found if Path(f"/proc/{pid}/cwd").resolve() in folders)
        return bool(pids) or walking.poll() is not None

    until(is_there, "there is somebody to kill")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    walking.communicate(timeout=360)
    met = [one["state"] for one in operator.fleet("show", code=None).get("boxes", ())]
    time.sleep(3.0)  # what was told it goes on with
    for one in two.boxes:
        one.made.call("recover", code=None)
    for _ in range(3):
        if operator.fleet("resume", "--yes", "--past", code=None).get("boxes") is None:
            operator.fleet(*UNWATCHED, code=None)
    found = states(operator.fleet("show"))
    print(f"{victim} after {after_s:.1f} s: {met} -> {found}")  # noqa: T201 -- a campaign tells what it met
    for one, state in zip(two.boxes, found, strict=True):
        outcomes = [outcome for _, outcome in one.swaps]
        assert one.made.serves
        assert state in {"done", "went back"}, (met, found)
        assert outcomes.count("serving") == (2 if state == "done" else 1)
        n_max = 2 if state == "done" else 4
        assert f"--spec-draft-n-max {n_max}" in " ".join(one.made.engine.served()[-1])


def test_each_box_promotes_what_its_own_sweep_proved(two: Fleet) -> None:
    first, second = two.boxes
    number = put_proposal(second.made.box.context)
    in_the_way = second.made.box.context.paths.tuned_dir / "night.evidence.json/x"
    in_the_way.mkdir(parents=True)
    operator = two.operator()
    stopped = operator.fleet("promote", "--yes", "--no-probation", code=1)
    assert states(stopped) == ["skipped", "left alone"], "its deployment stays"
    assert stopped["boxes"][0]["text"] == "there has been no sweep yet"
    assert "night.evidence.json" in stopped["boxes"][1]["text"]
    assert second.made.newest()["sweep"] == number
    assert second.swaps[-1] == ("promote", "serving")
    assert states(operator.fleet("rollback", "--yes")) == ["skipped", "returned"]
    assert second.swaps[-1] == ("rollback", "serving")
    assert len(first.swaps) == 1


def test_a_box_whose_backup_is_not_known_goes_back_by_itself(tmp_path: Path) -> None:
    ctx = BenchBox(tmp_path).context()
    journal = ctx.paths.state_dir / "fleet/rollouts/1.json"
    journal.parent.mkdir(parents=True)
    left = Step("gpu1", State.LEFT, "generation 5 was deployed there meanwhile")
    ctx.files.write_json(journal, plain(Rollout(1, "apply", (), 0.0, (left,)), schema=1))
    told = roll_back(ctx, 1, agree=lambda _: None).messages[0].hint or ""
    assert told == "`ssh gpu1 tunerd rollback` goes back there anyway"


def test_two_at_once_do_not_meet_on_a_box(one: Fleet) -> None:
    box = one.boxes[0]
    box.made.engine.configure(load_s=12.0)
    operator, other = one.operator(), one.operator("other")
    walking = operator.begin(*UNWATCHED)
    until(lambda: box.asked("apply --json --yes") > 0, "the first box was told")
    assert operator.fleet(*UNWATCHED, code=75)["error"]["code"] == "busy"
    until(lambda: box.made.json("status")["change_under_way"], "it changes")
    told = other.fleet(*UNWATCHED, code=1)["error"]
    assert "a change is under way there" in told["cause"]
    walking.communicate(timeout=360)
    assert walking.returncode == 0
    assert box.swaps == [("apply", "serving")] * 2

    box.made.engine.configure(load_s=0.0)
    both = [each.begin(*ANOTHER) for each in (operator, other)]  # at the same moment
    for process in both:
        process.communicate(timeout=360)
    assert {process.returncode for process in both} <= {0, 1}
    assert box.swaps == [("apply", "serving")] * 3


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "$(id)", "root@-x", ""])
def test_no_name_of_a_box_is_an_option_or_a_command(tmp_path: Path, name: str) -> None:
    operator = Fleet(tmp_path, ()).operator()
    told = operator.fleet(*UNWATCHED, f"--box={name}", code=2)["error"]
    assert told["state"] == "nothing was touched"
    assert not list(tmp_path.rglob("x"))


def test_what_ssh_says_in_several_lines_is_told_in_one(tmp_path: Path) -> None:
    """Progress shows control characters as what they are."""
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        "#!/bin/sh\nprintf 'kex: closed by remote host\\r\\nConnection closed\\r\\n' >&2\nexit 255\n"
    )
    ssh.chmod(0o755)
    told = Fleet(tmp_path, ()).operator().fleet(*UNWATCHED, "--box=gpu1", code=1)["error"]
    assert "kex: closed by remote host; Connection closed" in told["cause"]
