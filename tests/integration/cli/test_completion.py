"""What a shell is offered behind each command, read from files and names alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from tests.support.local_box import Box
from tests.support.transcripts import answered
from tunerd.cli.main import cli


def within(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, as if it were called there."""
    for name, value in box.environment.items():
        monkeypatch.setenv(name, value)


def offered(line: str) -> list[str]:
    """What is offered for the last word, each with its kind."""
    asked = BashComplete(cli, {}, "tunerd", "_TUNERD_COMPLETE")
    *before, last = line.split(" ")
    return [f"{one.type},{one.value}" for one in asked.get_completions(before, last)]


def test_what_is_offered_on_a_machine_is_the_golden_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a unit, a backup, a site profile, a workload and an engine in the settings."""
    box = Box(tmp_path)
    box.configure('extends = "cpu-embedded"\n', "profiles/mine.toml")
    box.configure("", "profiles/workloads/office.toml")
    box.configure('[engines.tuesday]\npath = "/no/such/llama-server"\n')
    box.put_unit("[Service]\nExecStart=/bin/true\n")
    box.unit.with_name("llama-server.service.pre-mine").write_text("")
    within(box, monkeypatch)
    answered("completion", offered)


def test_where_nothing_can_be_read_only_what_is_the_same_everywhere_is_offered_and_nothing_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    box = Box(tmp_path)
    box.configure("this is no TOML")
    within(box, monkeypatch)
    assert offered("apply c") == []
    assert offered("plan mine --set engine.") == ["plain,engine.prefer="]
    assert offered("model new x.gguf --shape tiny-n") == ["plain,tiny-nomtp"]
    assert "".join(capfd.readouterr()) == ""
