"""Where tunerd's files are, by mode and environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunerd.app import build_context
from tunerd.errors import ConfigError
from tunerd.paths import paths_for
from tunerd.words import Mode

HOME = {"HOME": "/home/me"}


def test_the_system_has_its_usual_places() -> None:
    paths = paths_for(Mode.SYSTEM, {"HOME": "/root", "XDG_CONFIG_HOME": "/elsewhere"})
    assert paths.settings_file == Path("/etc/tunerd/tunerd.toml")
    assert paths.site_profiles == Path("/etc/tunerd/profiles")
    assert paths.state_dir == Path("/var/lib/tunerd")
    assert paths.lock == Path("/var/lib/tunerd/lock")
    assert paths.runtime_dir == Path("/run/tunerd")
    assert paths.unit_dir == Path("/etc/systemd/system")
    assert paths.runtime_unit_dir == Path("/run/systemd/system")


def test_a_user_has_those_of_the_xdg_specification() -> None:
    plain = paths_for(Mode.USER, HOME)
    assert plain.config_dir == Path("/home/me/.config/tunerd")
    assert plain.state_dir == Path("/home/me/.local/state/tunerd")
    assert plain.unit_dir == Path("/home/me/.config/systemd/user")
    moved = paths_for(
        Mode.USER,
        {**HOME, "XDG_CONFIG_HOME": "/c", "XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/r"},
    )
    assert moved.settings_file == Path("/c/tunerd/tunerd.toml")
    assert moved.state_dir == Path("/s/tunerd")
    assert moved.runtime_dir == Path("/r/tunerd")
    assert moved.unit_dir == Path("/c/systemd/user")
    assert moved.runtime_unit_dir == Path("/r/systemd/user")


def test_without_a_manager_units_are_in_the_state() -> None:
    paths = paths_for(Mode.LOCAL, {**HOME, "XDG_RUNTIME_DIR": "/r"})
    assert paths.unit_dir == Path("/home/me/.local/state/tunerd/units")
    assert paths.runtime_unit_dir == Path("/r/tunerd/units")


def test_a_tryout_is_wholly_in_its_folder() -> None:
    """A state folder of its own takes everything that runs with it."""
    paths = paths_for(Mode.LOCAL, {"TUNERD_STATE_DIR": "/try/state", "TUNERD_CONFIG_DIR": "/try/config",
                                   "XDG_RUNTIME_DIR": "/r", **HOME})  # fmt: skip
    for folder in (paths.state_dir, paths.runtime_dir, paths.unit_dir, paths.runtime_unit_dir):
        assert folder.is_relative_to("/try/state")
    assert paths.config_dir == Path("/try/config")


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("variable", "attribute"),
    [
        ("TUNERD_CONFIG_DIR", "config_dir"),
        ("TUNERD_STATE_DIR", "state_dir"),
        ("TUNERD_RUNTIME_DIR", "runtime_dir"),
        ("TUNERD_UNIT_DIR", "unit_dir"),
    ],
)
def test_every_folder_can_be_moved(mode: Mode, variable: str, attribute: str) -> None:
    paths = paths_for(mode, {**HOME, variable: "/moved"})
    assert getattr(paths, attribute) == Path("/moved")
    assert paths_for(mode, {**HOME, variable: ""}) == paths_for(mode, HOME)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("folder", ["CONFIG", "STATE", "RUNTIME", "UNIT"])
def test_a_relative_folder_is_refused_for_it_would_be_another_one_elsewhere(
    mode: Mode, folder: str
) -> None:
    with pytest.raises(ConfigError, match=f"`TUNERD_{folder}_DIR` is a relative path") as refused:
        paths_for(mode, {**HOME, f"TUNERD_{folder}_DIR": "rel/s"})
    assert f"{Path.cwd()}/rel/s" in str(refused.value.hint)


def test_the_runtime_folder_of_another_account_is_not_taken(tmp_path: Path) -> None:
    """What `su` left led there, and what cron starts was elsewhere: each saw no measurement of the other."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    if os.getuid() == 0:
        os.chown(foreign, 65534, 65534)
    else:
        foreign = Path("/")
    home = {"HOME": str(tmp_path)}

    left_by_su = build_context(mode="local", environment={**home, "XDG_RUNTIME_DIR": str(foreign)})

    assert left_by_su.paths == build_context(mode="local", environment=home).paths
