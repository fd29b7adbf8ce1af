"""What the command does where its result cannot be written, and what scripts read of a wrong call."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_box import Box
from tunerd.tryout.designed import SHAPES, design, write

FULL = "/dev/full"
_SAYS = """
import click
from tunerd.cli import main
from tunerd.cli.output import finish
from tunerd.result import ActionResult, note
from tunerd.errors import RolledBack

@click.command()
@click.option("--json", "as_json", is_flag=True)
@click.option("--acts", is_flag=True)
@click.option("--fails", is_flag=True)
def command(as_json, acts, fails):
    if fails:
        raise RolledBack("it was not swapped", state="as before")
    payload = {"lines": ["a line"] * 5000}
    finish(ActionResult("x", payload, (note("n", "a remark"),), has_acted=acts),
           lambda p: p["lines"], as_json=as_json)

main.cli = command
main.main()
"""


def call(*words: str, out: str | None = FULL, closes: str = "") -> tuple[int, str]:
    """Exit code and standard error of a command that prints a lot; `out` None for a closed pipe."""
    words_of_shell = [sys.executable, "-c", _SAYS, *words]
    if out is None:
        reader = subprocess.Popen(["/bin/true"], stdin=subprocess.PIPE)
        reader.wait()
        target: Any = reader.stdin
    else:
        target = Path(out).open("w")  # noqa: SIM115
    line = ["sh", "-c", f'exec "$@" {closes}', "sh", *words_of_shell]
    with target:
        done = subprocess.run(
            line, stdout=target, stderr=subprocess.PIPE, text=True, timeout=400, check=False
        )
        # What could not be flushed to the closed pipe is no business of this test.
    return done.returncode, done.stderr


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_what_was_done_stays_done_where_it_cannot_be_shown(form: tuple[str, ...]) -> None:
    code, said = call("--acts", *form)

    assert code == 0
    assert "done, but the result cannot be shown" in said
    assert "No space left" in said
    assert "Traceback" not in said


def test_a_reader_that_has_gone_is_no_news() -> None:
    assert call(out=None) == (1, "")
    code, said = call("--acts", out=None)
    assert (code, said) == (0, "note: a remark\n")


def test_with_both_streams_closed_the_exit_code_is_that_of_the_action() -> None:
    assert call("--acts", closes=">&- 2>&-")[0] == 0
    assert call("--fails", closes=">&- 2>&-")[0] == 3
    assert call("--acts", closes="2>/dev/full")[0] == 0
    assert call("--fails", closes="2>/dev/full")[0] == 3


@pytest.mark.parametrize("locale", ["ascii", "latin-1"])
def test_a_locale_without_the_characters_of_charts_gets_utf_8(tmp_path: Path, locale: str) -> None:
    shown = Box(tmp_path, {"PYTHONIOENCODING": locale}).call("workload", "show", "chat")

    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\u2588" in shown.stdout


def test_names_of_files_are_the_same_in_every_locale(tmp_path: Path) -> None:
    """In `LC_ALL=de_DE` the bytes of `ü` were two other letters, and the unit that was planned served no file."""
    folder = tmp_path / "Modelle für größere"
    folder.mkdir()
    write(design(SHAPES["tiny"]), folder / "tiny.gguf")
    of_ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    planned = Box(folder, of_ascii).call(
        "plan", "cpu-embedded", "--set", f"model.path={folder / 'tiny.gguf'}"
    )

    assert planned.returncode == 0, planned.stderr
    assert f'--model "{folder}/tiny.gguf"' in planned.stdout


@pytest.mark.parametrize("words", [("status",), ("--help",)])
def test_a_full_disk_behind_standard_output_is_told_in_a_line(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    with Path(FULL).open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tunerd", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=400, check=False,
            env=Box(tmp_path).environment, cwd=tmp_path,
        )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.startswith("error: the result cannot be shown: standard output: No space")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told", "way"),
    [
        (("plan", "--nosuch"), "no such option '--nosuch'", "plan --help"),
        (("aply",), "no such command `aply`. Did you mean `apply`?", "--help"),
        (("history", "show", "x"), "invalid value for 'NUMBER': 'x' is not a whole number",
         "history show --help"),
        (("probation", "take-back", "x", "--reason", "y"),
         "invalid value for 'GENERATION': 'x' is not a whole number", "probation take-back --help"),
        (("settings", "get"), "no such command 'get'", "settings --help"),
        (("guard", "set", "oom"), "Choose from: act, advise, off", "guard set --help"),
        (("model", "new", "x.gguf", "--seed", "-1"), "invalid value for '--seed'", "model new --help"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_told_as_every_error_is_and_is_one_json_object_for_scripts(
    tmp_path: Path, words: tuple[str, ...], told: str, way: str
) -> None:
    done = Box(tmp_path).call(*words)
    first, *_, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout, last) == (2, "", f"hint: `tunerd {way}`")
    assert first.startswith("error: ")
    assert told in first

    done = Box(tmp_path).call(*words, "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 2
    assert (said["schema"], said["ok"], said["error"]["code"]) == (1, False, "usage")
    assert told in said["error"]["message"]
    assert done.stderr == ""


def test_json_in_front_of_the_command_is_refused_as_json(tmp_path: Path) -> None:
    said = Box(tmp_path).json("--json", "status", code=2)
    assert said["error"]["message"] == "no such option of `tunerd`: '--json'"
    assert "`tunerd status --json`" in said["error"]["hint"]


def test_where_nobody_can_be_asked_nothing_is_touched_and_the_way_on_is_told(
    tmp_path: Path,
) -> None:
    done = Box(tmp_path).call("support-bundle", "--output", "bundle.json")

    assert done.returncode == 2
    assert done.stderr.splitlines()[-5:] == [
        "error: cannot ask for confirmation: standard input is not a terminal",
        "",
        "  state   nothing was touched",
        "",
        "hint: use --yes to go ahead without a question",
    ]
    assert not (tmp_path / "bundle.json").exists()


def test_a_question_with_standard_input_closed_is_one_that_nobody_answers(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tunerd", "support-bundle", "--output", str(tmp_path / "bundle")]
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *words], env=Box(tmp_path).environment,
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert "error: cannot ask for confirmation: standard input is not a terminal" in done.stderr


@pytest.mark.parametrize("loaded", ["click", "tunerd.cli.main", "tunerd.operations", "pydantic"])
def test_ctrl_c_while_the_program_is_being_loaded_shows_no_traceback(
    tmp_path: Path, loaded: str
) -> None:
    """Python tells of each module that it has loaded, so that the moment is known; it waits to be read, and cannot end before."""
    words = [sys.executable, "-v", "-m", "tunerd", "status"]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, pipesize=4096,
        env=Box(tmp_path).environment, start_new_session=True,
    ) as begun:  # fmt: skip
        assert begun.stderr is not None
        for line in begun.stderr:
            if line.startswith(f"import '{loaded}'"):
                begun.send_signal(signal.SIGINT)
                break
        told = begun.stderr.read()
    assert begun.returncode in {130, -signal.SIGINT}, "a shell makes 130 of both"
    assert "Traceback" not in told
