"""What a newcomer is told who knows no names yet: what is here, and the one command that comes next."""

from __future__ import annotations

import contextlib
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.local_box import Box
from tunerd.errors import Busy
from tunerd.production.profiles import detect
from tunerd.settings_file import set_setting
from tunerd.units.text import MARK

SHIPPED = Path(__file__).parents[3] / "units" / "tunerd.toml"


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """A machine whose folder of models is named behind the shipped settings, as the README says."""
    made = Box(tmp_path)
    (tmp_path / "models").mkdir()
    made.configure(f'{SHIPPED.read_text()}\n[models]\ndirs = ["{tmp_path}/models"]\n')
    return made


def test_without_a_command_it_says_what_is_here_and_what_comes_next(box: Box) -> None:
    before = box.call()
    assert before.returncode == 0
    assert "card     none" in before.stdout
    assert f"next     tunerd model new {box.folder}/models/designed-tiny.gguf" in before.stdout

    assert box.call("model", "new", str(box.folder / "models/designed-tiny.gguf")).returncode == 0
    then = box.call("--local").stdout
    assert "profile  cpu-embedded: its model is here" in then
    assert "next     tunerd plan cpu-embedded" in then
    assert "baseline" not in then


def test_where_no_folder_of_models_is_named_that_comes_first_or_a_file_would_not_be_found(
    tmp_path: Path,
) -> None:
    made = Box(tmp_path)
    assert "next     tunerd settings set models.dirs FOLDER" in made.call().stdout
    made.configure(f'models.dirs = ["{tmp_path}", "{tmp_path}/gone"]\n')
    assert f"next     tunerd model new {tmp_path}/designed-tiny.gguf" in made.call().stdout
    told = [one["hint"] for one in made.json("plan", "cpu-embedded", code=None)["messages"]]
    assert any(f"names `{tmp_path}/gone`, which does not exist" in (hint or "") for hint in told)


def test_without_a_name_a_profile_is_proposed_and_nothing_is_touched(box: Box) -> None:
    error = box.json("plan", code=2)["error"]
    assert error["message"] == "no profile was named"
    assert "`cpu-embedded` (cannot find the file `designed-tiny.gguf`)" in error["cause"]
    assert error["hint"].startswith("tunerd model new")

    mine = f'extends = "cpu-embedded"\n[model]\npath = "{box.folder}/mine.gguf"\n'
    box.configure(mine, "profiles/mine.toml")
    assert box.call("model", "new", str(box.folder / "mine.gguf")).returncode == 0
    told = box.call("apply")
    assert told.returncode == 2
    assert "`mine` (its model is here)" in told.stderr
    assert "`tunerd apply mine`" in told.stderr
    assert not box.unit.exists()
    box.configure("[service")
    done = box.call("plan")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_where_nothing_serves_a_command_says_neither_that_it_was_asked_nor_what_it_runs(
    box: Box,
) -> None:
    asked = box.json("bench", code=1)["error"]
    assert asked["state"] == "nothing was stopped: llama-server.service is as before"
    raised = box.json("guard", "raise-margin", "--yes", code=2)["error"]
    assert raised["message"] == "nothing that serves here was deployed from a profile"


def test_a_misspelt_profile_is_told_with_the_nearest_and_a_wrong_set_is_no_fault_of_the_profile(
    box: Box,
) -> None:
    error = box.json("plan", "cpu-embeded", code=1)["error"]
    assert error["message"] == "there is no profile `cpu-embeded`"
    assert error["cause"].startswith("known: cpu-embedded, ")
    assert error["hint"].startswith("did you mean `cpu-embedded`?")

    error = box.json("plan", "cpu-embedded", "--set", "serving.port=x", code=1)["error"]
    assert error["message"] == "--set is wrong in 1 place"


def test_a_plan_shows_what_would_be_run_before_the_model_is_there(box: Box) -> None:
    model = str(box.folder / "models/designed-tiny.gguf")
    planned = box.json("plan", "cpu-embedded", "--explain", code=1)
    assert (planned["refused"], planned["memory"]) == (True, None)
    assert planned["warnings"][0]["code"] == "model-missing"
    assert f"tunerd model new {model}" in planned["warnings"][0]["hint"]
    told = box.call("plan", "cpu-embedded").stdout
    assert f"{model} (no GGUF file there yet)" in told
    assert "known once the GGUF file is there" in told

    assert box.call("model", "new", model).returncode == 0
    then = box.json("plan", "cpu-embedded", "--explain")
    assert (then["refused"], then["argv"]) == (False, planned["argv"])
    assert then["explain"] == planned["explain"]
    # A server was stopped, and came back when the new one had not found its projector.
    refused = box.call("plan", "cpu-embedded", "--set", "model.mmproj=/nowhere/mmproj.gguf")
    assert refused.returncode == 1
    assert "the server would read `/nowhere/mmproj.gguf`, which is not there" in refused.stderr


def test_a_plan_does_not_call_a_file_missing_that_is_no_model_and_says_that_the_engine_is_missing_too(
    box: Box,
) -> None:
    (box.folder / "notes.txt").write_text("no weights")
    done = box.call("plan", "cpu-embedded", "--set", f"model.path={box.folder}/notes.txt")
    assert done.returncode == 1
    assert "it does not begin with `GGUF`" in done.stderr
    box.configure('extends = "cpu-embedded"\n[engine]\nprefer = ["ik"]\n', "profiles/mine.toml")
    found = box.json("plan", "mine", code=None)["error"]
    assert "`designed-tiny.gguf`" in found["message"]
    assert "no engine here can serve" in found["message"]
    assert "ik: not installed here" in found["cause"]
    assert "tunerd model new" in found["hint"]
    assert "tunerd engines" in found["hint"]


def test_a_setting_is_written_beside_the_comments_and_taken_out_again(box: Box) -> None:
    path = box.folder / "config" / "tunerd.toml"
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    told = box.call("settings", "set", "models.dirs", "/srv/a", str(box.folder)).stderr
    assert "there is no `/srv/a` yet" in told
    assert f"`{box.folder}` yet" not in told
    assert box.call("settings", "set", "sweep.window", "01:00-06:30").returncode == 0
    done = box.call("settings", "set", "swap.keep_engine", "true")
    assert done.stdout == "swap.keep_engine = true\n"

    values = {row["name"]: row["value"] for row in box.json("settings")["settings"]}
    assert values["models.dirs"] == ["/srv/a", str(box.folder)]
    assert (values["sweep.window"], values["swap.keep_engine"]) == ("01:00-06:30", True)
    assert [line for line in path.read_text().splitlines() if line.startswith("#")] == comments

    done = box.call("settings", "set", "engines.mine.path", "/nowhere/llama-server")
    assert done.returncode == 0
    shown = [line.split() for line in box.call("settings").stdout.splitlines()]
    rows = [row for row in shown if row and row[0].startswith("engines")]
    assert rows == [["engines.mine.path", "/nowhere/llama-server", str(path)]]
    assert "mine (not usable)" in box.call().stdout

    for key in ("swap.keep_engine", "models.dirs", "engines.mine.path"):
        assert box.call("settings", "unset", key).returncode == 0
    left = tomllib.loads(path.read_text())
    assert "keep_engine" not in left.get("swap", {})
    assert "dirs" not in left.get("models", {})
    assert "mine" not in left.get("engines", {}), "which would be half an engine"
    before = path.read_bytes()
    for words, told in (
        ("unset engines.mine.path", "`engines.mine.path` is not set in"),
        ("unset models.dirs", "`models.dirs` is not set in"),
        ("unset sweep.prmote", "did you mean `sweep.promote`?"),
        ("set sweep.keep serving.thread", "sweep.keep"),
    ):
        refused = box.call("settings", *words.split())
        assert (refused.returncode, told in refused.stderr) == (2, True)
    assert path.read_bytes() == before


def test_the_next_step_leads_on_once_a_unit_by_hand_has_become_a_profile(box: Box) -> None:
    model = str(box.folder / "models/designed-tiny.gguf")
    assert box.call("model", "new", model).returncode == 0
    box.unit.parent.mkdir(parents=True, exist_ok=True)
    server = Path(sys.executable).with_name("tunerd-llama-server")
    box.unit.write_text(f"[Service]\nExecStart={server} -m {model} -c 512\n")
    proposed = "profiles new mine --from-unit llama-server.service"
    assert f"next     tunerd {proposed}" in box.call().stdout
    by_member = detect(replace(box.context, is_unattended=True))
    assert by_member.payload["next"] == f"sudo tunerd {proposed}", "the daemon leaves it to root"

    assert box.call(*proposed.split()).returncode == 0
    assert "next     tunerd plan mine" in box.call().stdout
    again = box.call(*proposed.split())
    assert (again.returncode, "--force" in again.stderr) == (2, True), "it replaces nothing unasked"
    shown = box.json("profiles", "show", "mine")["values"]
    origins = {row["key"]: (row["value"], row["layer"]) for row in shown}
    assert origins["serving.ctx_size"] == (512, "site")


def test_a_unit_of_ours_that_somebody_renamed_is_looked_after_by_its_new_name(box: Box) -> None:
    box.unit.parent.mkdir(parents=True)
    text = f"# {MARK}: profile x\n[Service]\nExecStart=/opt/llama-server -m /m.gguf\n"
    box.unit.with_name("mine.service").write_text(text)

    assert "next     tunerd settings set service.unit mine.service" in box.call().stdout


def test_a_path_that_may_not_be_looked_at_ends_no_command_in_a_traceback(box: Box) -> None:
    """With a folder of models in a closed home `tunerd`, `detect` and `plan` ended so; this one is refused to root, too."""
    closed = f"/{'x' * 300}"
    assert box.call("settings", "set", "models.dirs", closed).returncode == 0
    assert "next" in box.call().stdout
    for words, told in (
        (("plan", "cpu-embedded", "--set", f'engine.prefer=["{closed}"]'), "no such program"),
        (("plan", "cpu-embedded", "--set", "model.path=~nobody-here/x.gguf"), "file is missing"),
        (("model", "new", closed), "cannot write"),
        (("model", "new", ""), "not a plain file"),
        (("support-bundle", "--output", closed, "--yes"), "cannot write"),
    ):
        done = box.call(*words)
        assert (done.returncode, told in done.stderr) == (1, True), done.stderr


def test_no_service_manager_is_named_where_there_is_none_and_a_list_is_set_by_its_words_or_whole(
    box: Box,
) -> None:
    told = box.call("settings", "set", "service.unit", "mine.service").stderr
    assert "after a restart (end `tunerd daemon` and run it again)" in told
    for words in (["gpu1", "root@gpu2"], ['["gpu1", "root@gpu2"]'], ["['gpu1', 'root@gpu2']"]):
        said = box.json("settings", "set", "fleet.boxes", *words)
        assert said["changed"] == {"fleet.boxes": ["gpu1", "root@gpu2"]}


def test_of_settings_that_several_people_set_at_once_none_is_lost_that_was_said_to_be_set(
    box: Box,
) -> None:
    def change(key: str) -> str | None:
        with contextlib.suppress(Busy):
            set_setting(box.context, key, ["/usr/bin/env"], check=None)
            return key
        return None

    with ThreadPoolExecutor(8) as people:
        done = set(people.map(change, [f"engines.e{n}.path" for n in range(24)])) - {None}

    text = (box.folder / "config/tunerd.toml").read_text()
    assert done
    assert {f"engines.{name}.path" for name in tomllib.loads(text).get("engines", {})} >= done
