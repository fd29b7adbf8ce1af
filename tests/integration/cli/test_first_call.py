"""What a newcomer is told who knows no names yet: what is here, and the one command that comes next."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.local_box import Box
from tests.support.transcripts import answered
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


def test_what_is_told_until_the_first_profile_serves_is_the_golden_text(tmp_path: Path) -> None:
    """A line is a command, after those before it.

    With a folder of models in a closed home `tunerd`, `detect` and `plan` ended in a traceback; `LONG` is refused to root, too.
    """
    box, places = Box(tmp_path), {"FOLDER": str(tmp_path), "LONG": "x" * 300}
    (tmp_path / "models").mkdir()
    (tmp_path / "notes.txt").write_text("no weights")
    for name, key in (
        ("mine", f'model.path = "{tmp_path}/mine.gguf"'),
        ("old", 'engine.prefer = ["gone"]'),
    ):
        box.configure(f'extends = "cpu-embedded"\n{key}\n', f"profiles/{name}.toml")

    def told(line: str) -> list[str]:
        for name, value in places.items():
            line = line.replace(name, value)
        done = box.call(*shlex.split(line))
        shown = [
            one for one in done.stdout.splitlines() if one.startswith(("card", "profile", "next"))
        ]
        said = "\n".join([f"exit {done.returncode}", *shown, done.stderr])
        for name, value in places.items():
            said = said.replace(value, name)
        return [one for one in said.splitlines() if one]

    answered("first", told)
    assert not box.unit.exists()
    box.configure("[service")
    done = box.call("plan")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


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


def test_a_setting_is_written_beside_the_comments_and_taken_out_again(box: Box) -> None:
    path = box.folder / "config" / "tunerd.toml"
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert box.call("settings", "set", "models.dirs", "/srv/a", str(box.folder)).returncode == 0
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
    assert box.call("settings", "set", "sweep.keep", "serving.thread").returncode == 2
    assert path.read_bytes() == before


def test_a_setting_that_a_variable_has_already_is_written_and_said_to_be_without_effect(
    box: Box,
) -> None:
    """The daemon was said to apply it."""
    told = set_setting(
        replace(box.context, environment={"TUNERD_SERVICE__DRAIN_S": "5", "DRAIN_S": "6"}),
        "service.drain_s", ["7"], check=None,
    )  # fmt: skip
    (warned,) = (one for one in told.messages if one.level == "warning")
    assert warned.text.startswith("TUNERD_SERVICE__DRAIN_S in the environment wins")


def test_the_next_step_leads_on_once_a_unit_by_hand_has_become_a_profile(box: Box) -> None:
    model = str(box.folder / "models/designed-tiny.gguf")
    assert box.call("model", "new", model).returncode == 0
    server = Path(sys.executable).with_name("tunerd-llama-server")
    box.put_unit(f"[Service]\nExecStart={server} -m {model} -c 512\n")
    proposed = "profiles new mine --from-unit llama-server.service"
    box.unit.with_name("embed.service").write_text(box.unit.read_text())
    told = box.call().stdout
    assert f"next     tunerd {proposed}" in told, "of two the one that tunerd deploys to"
    assert "embed.service" in told
    by_member = detect(replace(box.context, is_unattended=True))
    assert by_member.payload["next"] == f"sudo tunerd {proposed}", "the daemon leaves it to root"

    assert box.call(*proposed.split()).returncode == 0
    assert "next     tunerd plan mine" in box.call().stdout
    again = box.call(*proposed.split())
    assert (again.returncode, "--force" in again.stderr) == (2, True), "it replaces nothing unasked"
    shown = box.json("profiles", "show", "mine")["values"]
    origins = {row["key"]: (row["value"], row["layer"]) for row in shown}
    assert origins["serving.ctx_size"] == (512, "site")


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/usr/bin/podman run --rm x/llama-server -m /models/m.gguf", "a container"),
        ("/nowhere/llama-server --models-max 1", "a router"),
    ],
)
def test_the_next_step_is_no_adoption_that_would_be_refused(
    box: Box, command: str, kind: str
) -> None:
    box.put_unit(f"[Service]\nExecStart={command}\n")
    refused = box.call("profiles", "new", "mine", "--from-unit", "llama-server.service")
    assert refused.returncode == 1, refused

    assert kind in box.call("detect").stdout
    assert "--from-unit" not in box.call().stdout


def test_a_unit_of_ours_that_somebody_renamed_is_looked_after_by_its_new_name(box: Box) -> None:
    box.unit.parent.mkdir(parents=True)
    text = f"# {MARK}: profile x\n[Service]\nExecStart=/opt/llama-server -m /m.gguf\n"
    box.unit.with_name("mine.service").write_text(text)

    assert "next     tunerd settings set service.unit mine.service" in box.call().stdout


def test_a_list_is_set_by_its_words_or_whole(box: Box) -> None:
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
