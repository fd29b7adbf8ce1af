"""What a shell is offered behind each command, read from files and names alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from tests.support.local_box import Box
from tunerd.cli.main import cli

BACKUP = "llama-server.service.pre-mine"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    """A machine with a unit, a backup, a site profile, a workload and an engine in the settings."""
    box = Box(tmp_path_factory.mktemp("box"))
    box.configure('extends = "cpu-embedded"\n', "profiles/mine.toml")
    box.configure("", "profiles/workloads/office.toml")
    box.configure('[engines.tuesday]\npath = "/no/such/llama-server"\n')
    box.unit.parent.mkdir(parents=True)
    box.unit.write_text("[Service]\nExecStart=/bin/true\n")
    box.unit.with_name(BACKUP).write_text("")
    return box


@pytest.fixture
def in_it(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, as if it were called there."""
    for name, value in box.environment.items():
        monkeypatch.setenv(name, value)


def offered(*words: str) -> list[str]:
    """What is offered for the last word, each with its kind."""
    asked = BashComplete(cli, {}, "tunerd", "_TUNERD_COMPLETE")
    return [f"{one.type},{one.value}" for one in asked.get_completions([*words[:-1]], words[-1])]


@pytest.mark.usefixtures("in_it")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("sta",), ["plain,status"]),
        (("apply", "mi"), ["plain,mine"]),
        (("bench", "mi"), ["plain,mine"]),
        (("compare", "mine", "li"), ["plain,live"]),
        (("profiles", "show", "mi"), ["plain,mine"]),
        (("profiles", "check", "mi"), ["plain,mine", "file,mi"]),
        (("plan", "mine", "--set", "engine."), ["plain,engine.prefer="]),
        (("engines", "keep", "tu"), ["plain,tuesday"]),
        (("rollback", "--to", "llama"), [f"plain,{BACKUP}"]),
        (("profiles", "new", "x", "--from-unit", "llama"), ["plain,llama-server.service"]),
        (("workload", "show", "of"), ["plain,office"]),
        (("bench", "--workload", "of"), ["plain,office"]),
        (("sweep", "run", "--workload", "of"), ["plain,office"]),
    ],
)
def test_values_are_offered(words: tuple[str, ...], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_where_nothing_can_be_read_only_what_is_the_same_everywhere_is_offered_and_nothing_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    box = Box(tmp_path)
    box.configure("this is no TOML")
    for name, value in box.environment.items():
        monkeypatch.setenv(name, value)
    assert offered("apply", "c") == []
    assert offered("plan", "mine", "--set", "engine.") == ["plain,engine.prefer="]
    assert offered("model", "new", "x.gguf", "--shape", "tiny-n") == ["plain,tiny-nomtp"]
    assert "".join(capfd.readouterr()) == ""
