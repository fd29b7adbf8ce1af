"""Commands that are needed in trouble: they go on with what is right, and say what is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.local_box import Box, deployed, settings
from tunerd.machine.net import free_port


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
    written = box.folder / "config" / "tunerd.toml"
    written.parent.mkdir(exist_ok=True)
    written.write_text("garbage = [\n")
    yield box
    written.unlink()


def codes(found: dict[str, object]) -> list[str]:
    messages = found["messages"]
    assert isinstance(messages, list)
    return [str(one["code"]) for one in messages]


def test_what_goes_back_or_ends_something_goes_on_where_settings_are_wrong(broken: Box) -> None:
    for words in (("rollback", "--list"), ("recover",), ("probation", "show"), ("sweep", "status"),
                  ("jobs",), ("rollback", "--yes")):  # fmt: skip
        assert "settings" in codes(broken.json(*words)), words

    for words in (("sweep", "stop"), ("jobs", "stop", "7"), ("rollback", "--to", "nosuch")):
        error = broken.json(*words, code=None)["error"]
        assert error["code"] != "config", words
        assert "until they are mended the defaults hold" in error["hint"], words

    refused = broken.json("plan", "cpu-embedded", code=1)["error"]
    assert refused["code"] == "config"


def test_a_rollback_goes_on_past_a_variable_that_is_unknown(box: Box) -> None:
    strange = Box(box.folder, {**box.variables, "TUNERD_NOSUCH": "1"})
    done = strange.call("rollback", "--yes")
    assert (done.returncode, "back to" in done.stdout) == (0, True), done.stderr
    assert "TUNERD_NOSUCH" in done.stderr


def test_settings_that_a_command_mended_are_not_called_wrong(box: Box) -> None:
    written = box.folder / "config" / "tunerd.toml"
    written.parent.mkdir(exist_ok=True)
    written.write_text("[sweep]\nnosuch = 1\n")
    assert "settings" not in codes(box.json("settings", "unset", "sweep.nosuch"))
