"""Calls that cannot mean anything are refused, and say what would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.local_box import Box


@pytest.mark.parametrize("words", [("--local", "--user"), ("--system", "--local")])
def test_two_modes_are_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    done = Box(tmp_path).call(*words, "status")
    assert done.returncode == 2
    assert all(word in done.stderr for word in words)


def test_a_level_of_the_log_that_is_none_is_refused(tmp_path: Path) -> None:
    done = Box(tmp_path, {"TUNERD_LOG_LEVEL": "warnin"}).call("settings")
    assert done.returncode == 1
    assert "TUNERD_LOG_LEVEL: found 'warnin' (did you mean warning?)" in done.stderr
    assert Box(tmp_path, {"TUNERD_LOG_LEVEL": "DEBUG"}).call("settings").returncode == 0


def test_a_damaged_model_says_the_state_and_what_to_do(tmp_path: Path) -> None:
    model = tmp_path / "cut.gguf"
    model.write_bytes(b"GGUF\3\0\0\0\1")
    done = Box(tmp_path).call("profiles", "new", "mine", "--model", str(model))
    assert done.returncode == 1
    assert "state   nothing was touched" in done.stderr
    assert "hint: compare its size and checksum with its origin" in done.stderr
