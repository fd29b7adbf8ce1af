"""Where the command's result cannot be written, what scripts read of a wrong call, and lines that fit on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_box import Box
from tests.support.transcripts import answered
from tests.support.waiting import until
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


def test_what_was_done_stays_done_where_it_cannot_be_shown() -> None:
    for form in ((), ("--json",)):
        code, said = call("--acts", *form)
        assert code == 0
        assert "done, but the result cannot be shown" in said
        assert "No space left" in said
        assert "Traceback" not in said


def test_a_reader_that_has_gone_is_no_news() -> None:
    assert call(out=None) == (1, "")
    assert call("--acts", out=None) == (0, "note: a remark\n")


def test_with_both_streams_closed_the_exit_code_is_that_of_the_action() -> None:
    assert call("--acts", closes=">&- 2>&-")[0] == 0
    assert call("--fails", closes=">&- 2>&-")[0] == 3
    assert call("--acts", closes="2>/dev/full")[0] == 0
    assert call("--fails", closes="2>/dev/full")[0] == 3


def test_figures_and_names_of_files_are_the_same_in_every_locale(tmp_path: Path) -> None:
    """In `LC_ALL=de_DE` the bytes of `ü` were two other letters, and the unit that was planned served no file."""
    shown = Box(tmp_path, {"PYTHONIOENCODING": "ascii"}).call("workload", "show", "chat")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\u00a0%" in shown.stdout
    folder = tmp_path / "Modelle für größere"
    folder.mkdir()
    write(design(SHAPES["tiny"]), folder / "tiny.gguf")
    of_ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    planned = Box(folder, of_ascii).call(
        "plan", "cpu-embedded", "--set", f"model.path={folder / 'tiny.gguf'}"
    )

    assert planned.returncode == 0, planned.stderr
    assert f'--model "{folder}/tiny.gguf"' in planned.stdout
    assert f"--model {shlex.quote(f'{folder}/tiny.gguf')} \\\n" in planned.stdout, "for a shell"


@pytest.mark.parametrize(
    ("words", "shell", "code", "last"),
    [
        (("status",), ">/dev/full", 1, "the result cannot be shown: standard output: No space left on device"),
        (("--help",), ">/dev/full", 1, "the result cannot be shown: standard output: No space left on device"),
        (("support-bundle", "--output", "x"), "<&-", 2, "cannot ask for confirmation: standard input is not a terminal"),
    ],
    ids=["a result that cannot be written", "help that cannot be written", "nobody who can be asked"],
)  # fmt: skip
def test_streams_that_are_full_or_closed_are_told_in_a_line(
    tmp_path: Path, words: tuple[str, ...], shell: str, code: int, last: str
) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-m", "tunerd", *words],
        env=Box(tmp_path).environment, cwd=tmp_path, capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip

    assert done.returncode == code
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told == f"error: {last}"


def test_a_wrong_call_is_told_as_in_the_golden_text_and_is_one_json_object_for_scripts(
    tmp_path: Path,
) -> None:
    box = Box(tmp_path)

    def told(line: str) -> list[str]:
        done, for_scripts = box.call(*line.split()), box.call(*line.split(), "--json")
        said = json.loads(for_scripts.stdout)
        assert (
            (done.returncode, done.stdout)
            == (for_scripts.returncode, for_scripts.stderr)
            == (2, "")
        )
        assert (said["schema"], said["ok"], said["error"]["code"]) == (1, False, "usage")
        assert said["error"]["message"] in done.stderr
        return done.stderr.splitlines()

    answered("errors/calls", told)
    for line, words in (
        ("guard set oom", "Choose from: act, advise, off"),
        ("model new x.gguf --seed -1", "invalid value for '--seed'"),
    ):  # the rest is click's own
        assert words in told(line)[0]


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


@pytest.mark.parametrize("loaded", ["click", "tunerd.operations"])
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


@pytest.mark.parametrize("words", ["completion bash", "status"])
def test_ctrl_c_that_ends_the_reader_too_is_told_at_most_once(tmp_path: Path, words: str) -> None:
    """The exit code was Python's own 120, with a remark about standard output, or the same was told twice."""
    reads, writes = os.pipe()
    os.write(writes, b"x" * fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096))
    with subprocess.Popen(
        [sys.executable, "-m", "tunerd", *words.split()], stdout=writes, stderr=subprocess.PIPE,
        text=True, env=Box(tmp_path).environment | {"PYTHONUNBUFFERED": ""},
    ) as begun:  # fmt: skip
        os.close(writes)
        waits = Path(f"/proc/{begun.pid}/wchan")
        until(lambda: "pipe_write" in waits.read_text(), waits.read_text)
        begun.send_signal(signal.SIGINT)
        os.close(reads)
        assert begun.stderr is not None
        told = begun.stderr.read()
    assert begun.returncode == 130
    assert told.strip() in {"", "error: interrupted\n\nhint: `tunerd status` shows what serves"}


def on_a_terminal(box: Box, *words: str, columns: int = 80, terminal: str = "xterm") -> list[str]:
    """Lines of a command whose output and messages go to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "tunerd", *words], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**box.environment, "TERM": terminal}, cwd=box.folder,
    )  # fmt: skip
    os.close(theirs)
    told = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # its last process has gone
            break
        told += more
    os.close(ours)
    process.wait(timeout=180)
    text = told.decode().replace("\r\n", "\n")
    for colour in ("\x1b[36m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[0m"):
        text = text.replace(colour, "")
    return [line.rpartition("\r")[2].rpartition("\x1b[K")[2] for line in text.splitlines()]


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_a_result_begins_on_a_line_of_its_own_and_a_dumb_terminal_gets_text_alone(
    tmp_path: Path, terminal: str
) -> None:
    box, path = Box(tmp_path), tmp_path / "x.gguf"
    lines = on_a_terminal(box, "model", "new", str(path), columns=200, terminal=terminal)
    first, second, *_ = filter(None, lines)
    assert first == f"writing {path}"
    assert second.startswith(f"wrote {path}")


def test_lines_fit_on_the_terminal_and_have_the_words_that_go_into_a_pipe(tmp_path: Path) -> None:
    box, words = Box(tmp_path), ("apply", "nothing")
    lines = on_a_terminal(box, *words)
    assert 60 < max(map(len, lines)) <= 80
    done = box.call(*words)
    assert sorted(" ".join(lines).split()) == sorted((done.stderr + done.stdout).split())
    narrow = on_a_terminal(box, *words, columns=40)
    assert any("`tunerd profiles list`" in line for line in narrow), "it is to be copied"
