"""Commands that are needed in trouble: they go on with what is right, and say what is not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.support import preloaded
from tests.support.folders import ROOT
from tests.support.local_box import Box, codes, deployed, settings
from tests.support.ports import free_port
from tests.support.supervised import supervisor_pid, wait_until_gone
from tests.support.waiting import until
from tunerd.errors import Busy
from tunerd.measure.compare import plan_side, side_of
from tunerd.tryout.local import Local, enabled_mark


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A box that was deployed on twice."""
    port = free_port()
    with deployed(tmp_path_factory.mktemp("box"), port) as made:
        made.json("apply", "cpu-embedded", "--yes", *settings(made, serving__port=port, serving__ctx_size=512))  # fmt: skip
        yield made


@pytest.fixture
def broken(box: Box) -> Iterator[Box]:
    """Its settings file is no TOML."""
    written = box.configure("garbage = [\n")
    yield box
    written.unlink()


def test_a_box_whose_supervisor_and_server_were_killed_is_told_what_served_and_the_command_that_brings_it_back(
    box: Box,
) -> None:
    def told() -> list[str]:
        found = box.json("doctor", code=None)["findings"]
        said = [f"{one['code']}: {one['seen']}; {one['do']}" for one in found]
        for words in ("status", "verify"):
            for one in box.json(words, code=None)["messages"]:
                said += [f"{one['code']}: {one['text']}; {one['hint']}"]
        return [one for one in said if one.startswith("no-supervisor")]

    supervisor = supervisor_pid(box.context.paths)
    server = box.context.services.state("llama-server.service").main_pid
    assert supervisor is not None
    assert server is not None
    assert told() == []

    os.kill(supervisor, signal.SIGKILL)
    wait_until_gone(supervisor)
    assert all("still serves" in one for one in told())
    os.kill(server, signal.SIGKILL)
    wait_until_gone(server)
    down = told()
    assert len(down) == 3
    assert all("generation 2, which served, is down" in one for one in down)
    assert all("`tunerd supervise`" in one for one in down)
    drift = box.json("verify", code=6)["drift"]
    assert [one["hint"].split(",")[0] for one in drift] == ["`tunerd supervise`"]
    mark = enabled_mark(box.context.paths, "llama-server.service")
    mark.rename(mark.with_suffix(".away"))  # what is not enabled no supervisor starts by itself
    assert all("`tunerd apply" in one and "supervise`" not in one for one in told())
    mark.with_suffix(".away").rename(mark)

    with box.begin("supervise") as supervising:
        until(lambda: box.json("status")["healthy"] is True, "it serves again")
        assert told() == []
        supervising.kill()
    Local(box.context.paths).ensure_supervisor()


def test_a_unit_that_an_apply_replaced_while_it_was_looked_at_is_not_called_edited(
    box: Box,
) -> None:
    was_live = replace(side_of(box.context, "1", base=None), name="live")
    with pytest.raises(Busy, match="is being changed right now"):
        plan_side(box.context, was_live)


@pytest.fixture
def read_only(box: Box) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Calls tunerd where the box's state is on a file system that cannot be written."""
    state = str(box.folder / "state")
    within = ("unshare", "-rm", "sh", "-c")
    mounts = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    if shutil.which("unshare") is None or subprocess.run([*within, mounts, "sh", state, "true"], check=False).returncode:  # fmt: skip
        pytest.skip("this account may mount nothing, not even in a namespace of its own")
    name = f"tunerd-test-read-only-{os.getpid()}"
    forks = (sys.executable, "-m", "tests.support.preloaded")
    server = preloaded.begin(name, *within, mounts, "sh", state, *forks, PYTHONPATH=str(ROOT))

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*preloaded.client(name), *words], capture_output=True, text=True, timeout=400,
                              check=False, env=box.environment, cwd=box.folder)  # fmt: skip

    yield call
    server.communicate()


def test_on_a_read_only_state_what_reads_works_and_what_measures_ends_before_an_outage_is_announced(
    box: Box, read_only: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for words in (
        *("status", "verify", "history", "results list", "guard show", "sweep list"),
        *("settings set sweep.min_gain 0.02", "settings unset sweep.min_gain"),
    ):
        done = read_only(*words.split())
        assert done.returncode == 0, (words, done.stderr)
    doctor = read_only("doctor")
    assert (doctor.returncode, "read-only" in doctor.stdout) == (7, True), doctor.stdout
    assert "nothing can be deployed or recorded" in read_only("status").stderr
    # As a trial of a build writes one.
    assert "`findmnt -T " in read_only("model", "new", f"{box.folder}/state/x.gguf").stderr

    before = box.context.services.state("llama-server.service").invocation_id
    for words in (
        "compare --set serving.ctx_size=768 --budget 60",
        "sweep run --budget 60",
        "bench",
    ):
        done = read_only(*words.split(), *(() if words == "bench" else ("--yes",)))
        assert done.returncode == 1, (words, done.stdout)
        assert "will not serve" not in done.stderr, words
        assert "Read-only file system\n  state   nothing was changed by this call" in done.stderr
        assert f"`findmnt -T {box.folder}/state`" in done.stderr, words
    assert box.context.services.state("llama-server.service").invocation_id == before


def test_what_shows_how_things_stand_goes_back_or_ends_something_goes_on_where_settings_are_wrong(
    broken: Box,
) -> None:
    for words in (
        *("status", "verify", "history", "history show 1", "history diff 1 2", "rollback --list"),
        *("recover", "probation show", "sweep status", "jobs", "rollback --yes"),
    ):
        assert "settings" in codes(broken.json(*words.split(), code=None)), words

    for words in ("sweep stop", "jobs stop 7", "rollback --to nosuch"):
        error = broken.json(*words.split(), code=None)["error"]
        assert error["code"] != "config", words
        assert "until that is corrected, the defaults apply" in error["hint"], words

    refused = broken.json("plan", "cpu-embedded", code=1)["error"]
    assert refused["code"] == "config"
    found = {one["code"]: one for one in broken.json("doctor", code=7)["findings"]}
    wrong = found["settings-wrong"]
    assert wrong["severity"] == "error"
    assert "not valid TOML" in wrong["seen"]
    assert "tunerd.toml" in wrong["do"]


def test_an_error_about_the_settings_says_it_once_and_names_the_file(broken: Box) -> None:
    written = broken.folder / "config" / "tunerd.toml"
    for words in ("settings unset models.dirs", "settings set models.dirs /x", "plan cpu-embedded"):
        error = broken.json(*words.split(), code=1)["error"]
        assert (error["message"], error["hint"]) == (
            f"not valid TOML: `{written}`",
            f"correct `{written}`",
        ), words

    written.write_text("[sweep]\nnosuch = 1\nwindow = 5\n")
    told = broken.call("status").stderr
    assert "\\n" not in told
    assert "an unknown key" in told.partition("; ")[2]

    written.write_text("[sweep]\nnosuch = 1\n")
    assert "settings" not in codes(broken.json("settings", "unset", "sweep.nosuch")), "it is mended"


def test_a_rollback_goes_on_past_a_variable_that_is_unknown(box: Box) -> None:
    strange = Box(box.folder, {**box.variables, "TUNERD_NOSUCH": "1"})
    done = strange.call("rollback", "--yes")
    assert (done.returncode, "back to" in done.stdout) == (0, True), done.stderr
    assert "TUNERD_NOSUCH" in done.stderr


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("sweep", "run", "nosuch"), "sweep run"),
        (("results", "import", "/dev/null"), "results import"),
        (("--local", "fleet", "show", "7"), "fleet show"),
        (("bench", "--url", "http://127.0.0.1:9"), "bench"),
        (("nosuch",), "tunerd"),
    ],
)
def test_an_error_names_the_whole_command_says_how_the_machine_is_and_what_to_do(
    box: Box, words: tuple[str, ...], command: str
) -> None:
    said = box.json(*words, code=None)
    assert said["command"] == command
    if command in {"results import", "bench"}:
        assert said["error"]["state"]
        assert said["error"]["hint"]
