"""Pages are what the code says and does today."""

from __future__ import annotations

import ast
import contextlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from tests.support import needs
from tests.support.folders import ROOT
from tunerd.cli.main import cli
from tunerd.operations import MAY, ONLY_ROOT
from tunerd.operations import ROOT as ROOT_ASKS

DOCS = ROOT / "docs"
GENERATOR = runpy.run_path(str(DOCS / "generate_reference.py"), run_name="generator")


@pytest.mark.parametrize("name", GENERATOR["PAGES"])
def test_a_page_of_the_reference_is_fresh(name: str) -> None:
    text = GENERATOR["page"](name)
    stored = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert stored == text, "run `python docs/generate_reference.py`"


def test_the_picture_of_the_packages_is_fresh() -> None:
    drawn = runpy.run_path(str(DOCS / "draw_architecture.py"), run_name="drawer")["picture"]()
    stored = (DOCS / "architecture.svg").read_text(encoding="utf-8")
    assert stored == drawn, "run `python docs/draw_architecture.py`"


def test_every_page_of_the_reference_is_generated() -> None:
    stored = {path.name for path in (DOCS / "reference").iterdir()}
    assert stored == {*GENERATOR["PAGES"], GENERATOR["SCHEMA"]}
    schema = (DOCS / "reference" / GENERATOR["SCHEMA"]).read_text(encoding="utf-8")
    assert schema == GENERATOR["schema"](), "run `python docs/generate_reference.py`"


def test_the_manual_page_has_every_command_and_formats_without_a_warning() -> None:
    page = DOCS / "reference" / "tunerd.1"
    reference = (page.parent / "commands.md").read_text()
    groff = shutil.which("groff")
    if groff is None:
        needs.missing("e2e", "no groff here", "apt-get install groff-base")

    words = [groff, "-man", "-Tutf8", "-ww", "-P-cbou", str(page)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    assert done.stderr == ""
    headings = re.findall(r"^   (\S.*)$", done.stdout, re.MULTILINE)
    assert headings == re.findall(r"^## tunerd (.+)$", reference, re.MULTILINE)
    assert "--budget" in done.stdout, "options as they are typed, which can be copied"


def texts_of(path: Path) -> Iterator[tuple[bool, str]]:
    """With whether the program says them, which it does of all but docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    unsaid = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield id(node) not in unsaid, node.value


@cache
def texts_of_the_program() -> list[tuple[bool, str]]:
    return [one for path in (ROOT / "tunerd").rglob("*.py") for one in texts_of(path)]


def command_named(words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    """The command that words begin with, a context for it, and what follows."""
    command: click.Command = cli
    context = click.Context(cli, info_name="tunerd", obj=ROOT_ASKS)
    rest = list(words)
    while isinstance(command, click.Group) and rest:
        found = command.get_command(context, rest[0])
        if found is None:
            break
        command = found
        del rest[0]
    return command, context, rest


def test_each_command_that_a_page_or_the_program_names_is_one() -> None:
    pages = [path.read_text("utf-8") for path in (ROOT / "README.md", *DOCS.glob("*.md"))]

    def is_known(words: list[str]) -> bool:
        command, _, rest = command_named(words)
        if isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            return False
        params = command.get_params(click.Context(cli))
        options = {one for param in params for one in (*param.opts, *param.secondary_opts)}
        return {word.partition("=")[0] for word in rest if word.startswith("-")} <= options

    quoted = [
        re.split(r"[|#>;,']| or ", found)[0]
        for text in (*pages, *(text for _, text in texts_of_the_program()))
        for found in re.findall(r"`(?:sudo )?tunerd ([a-z-][^`\n]*)", text)
    ]
    # What the doctor says to do is not quoted: a command with its options, as far as the next sentence.
    advised = [
        found
        for _, text in texts_of(ROOT / "tunerd/doctor/rules.py")
        for found in re.findall(
            r"tunerd ([a-z][a-z-]*(?: [A-Z]+| --?[a-z-]+(?:[ =][^ ,;`]+)?)*)", text
        )
    ]
    assert (len(set(quoted)) > 100, len(advised) > 20) == (True, True)
    assert [one for one in sorted({*quoted, *advised}) if not is_known(one.split())] == []


def test_each_command_in_an_example_is_taken_as_it_stands_there(tmp_path: Path) -> None:
    pages = [page.read_text("utf-8") for page in (ROOT / "README.md", *DOCS.rglob("*.md"))]
    blocks = re.findall(r"^```\w*\n(.*?)^```$", "\n".join(pages), re.MULTILINE | re.DOTALL)
    lines = {
        re.split(r" #|[|>;]", line)[0]
        for block in blocks
        for line in re.findall(r"^ *(?:\$ )?(?:sudo )?tunerd ([a-z-].*)$", block, re.MULTILINE)
    }
    assert len(lines) > 100
    (tmp_path / "hosts.ini").touch()
    refused = {}
    with contextlib.chdir(tmp_path):
        for line in sorted(lines):
            command, parent, rest = command_named(shlex.split(line))
            try:
                command.make_context(command.name, rest, parent=parent)
            except click.ClickException as error:
                refused[line] = error.format_message()
    assert refused == {}


def test_each_heading_about_trouble_is_something_that_the_program_says() -> None:
    """Its docstrings said `is taken back` where the program says `was`."""
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(quoted) > 15
    said = [text for is_said, text in texts_of_the_program() if is_said]
    assert [words for words in quoted if not any(words in text for text in said)] == []


def test_the_page_about_the_api_says_of_every_command_who_may_ask_for_it() -> None:
    page = (DOCS / "api.md").read_text("utf-8")
    parts = re.split(r"^\| a member's \||^What is left to root", page, flags=re.MULTILINE)

    def missing(kinds: Iterable[str], section: str) -> list[str]:
        words = {word for code in re.findall("`([^`]+)`", section) for word in code.split()}
        return [kind for kind in kinds if not {*kind.partition(" --")[0].split()} <= words]

    assert missing(ONLY_ROOT, parts[2]) == []
    assert missing(MAY, parts[1]) == []


def test_every_command_is_a_members_or_roots_or_of_whoever_types_it() -> None:
    known = {key.partition(" --")[0] for key in (*MAY, *ONLY_ROOT)}
    typed = {
        context.command_path.removeprefix("tunerd ")
        for context in GENERATOR["every_command"]()
        if not isinstance(context.command, click.Group) or context.command.invoke_without_command
    }
    assert typed - known == {
        "jobs watch", "model new", "daemon", "supervise", "completion",
        "fleet apply", "fleet promote", "fleet resume", "fleet rollback", "fleet show",
    }  # fmt: skip
    assert known <= typed


def test_the_box_in_the_page_about_sweeps_runs_as_it_stands_there(tmp_path: Path) -> None:
    page = (DOCS / "sweep.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verdict, arm, *reasons = done.stdout.splitlines()
    assert verdict == "promote"
    assert "mtp 4/0" in arm
    assert any("faster over" in reason for reason in reasons)


def test_the_reference_is_written_as_the_program_is_called_whatever_ran_before_it() -> None:
    """click keeps a command's help option by the names of the first context that asked for it."""
    names = {tuple(context.help_option_names) for context in GENERATOR["every_command"]()}
    assert names == {tuple(cli.context_settings["help_option_names"])}
