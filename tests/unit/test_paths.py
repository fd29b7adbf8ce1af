"""Where tunerd's files are, by mode and environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunerd.app import build_context
from tunerd.errors import ConfigError
from tunerd.paths import parse_listen, paths_for
from tunerd.words import Mode

HOME = {"HOME": "/home/me"}


XDG = {"XDG_CONFIG_HOME": "/c", "XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/r"}


@pytest.mark.parametrize(
    ("mode", "environment", "places"),
    [
        (Mode.SYSTEM, XDG, {
            "settings_file": "/etc/tunerd/tunerd.toml", "site_profiles": "/etc/tunerd/profiles", "state_dir": "/var/lib/tunerd",
            "lock": "/var/lib/tunerd/lock", "runtime_dir": "/run/tunerd", "unit_dir": "/etc/systemd/system",
            "runtime_unit_dir": "/run/systemd/system"}),
        (Mode.USER, {}, {
            "config_dir": "/home/me/.config/tunerd", "state_dir": "/home/me/.local/state/tunerd",
            "unit_dir": "/home/me/.config/systemd/user"}),
        (Mode.USER, XDG, {
            "settings_file": "/c/tunerd/tunerd.toml", "state_dir": "/s/tunerd", "runtime_dir": "/r/tunerd",
            "unit_dir": "/c/systemd/user", "runtime_unit_dir": "/r/systemd/user"}),
        (Mode.LOCAL, {"XDG_RUNTIME_DIR": "/r"}, {
            "unit_dir": "/home/me/.local/state/tunerd/units", "runtime_unit_dir": "/r/tunerd/units"}),
        # A state folder of its own takes everything that runs with it.
        (Mode.LOCAL, {"TUNERD_STATE_DIR": "/try/state", "TUNERD_CONFIG_DIR": "/try/config", "XDG_RUNTIME_DIR": "/r"}, {
            "state_dir": "/try/state", "runtime_dir": "/try/state/run", "unit_dir": "/try/state/units",
            "runtime_unit_dir": "/try/state/run/units", "config_dir": "/try/config"}),
    ],
    ids=["the system", "a user", "a user of the XDG specification", "without a manager", "a try-out"],
)  # fmt: skip
def test_each_kind_of_installation_has_its_places(
    mode: Mode, environment: dict[str, str], places: dict[str, str]
) -> None:
    paths = paths_for(mode, {**HOME, **environment})
    assert {name: str(getattr(paths, name)) for name in places} == places


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("folder", ["config", "state", "runtime", "unit"])
def test_every_folder_can_be_moved_but_not_by_a_path_that_is_another_one_elsewhere(
    mode: Mode, folder: str
) -> None:
    variable = f"TUNERD_{folder.upper()}_DIR"
    paths = paths_for(mode, {**HOME, variable: "/moved"})
    assert getattr(paths, f"{folder}_dir") == Path("/moved")
    assert paths_for(mode, {**HOME, variable: ""}) == paths_for(mode, HOME)
    with pytest.raises(ConfigError, match=f"`{variable}` is a relative path") as refused:
        paths_for(mode, {**HOME, variable: "rel/s"})
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


def test_an_address_to_listen_on_is_read_as_written_or_refused() -> None:
    for text, host, port, is_loopback in (
        ("localhost:1", "127.0.0.1", 1, True),
        ("[::1]:8765", "::1", 8765, True),
        ("[2001:db8::1]:80", "2001:db8::1", 80, False),
        ("192.168.1.5:65535", "192.168.1.5", 65535, False),
    ):
        found = parse_listen(text)
        assert (found.host, found.port, found.is_loopback) == (host, port, is_loopback)
    for text in ("", "8765", "127.0.0.1", "127.0.0.1:0", "box:80", "127.0.0.1:99999", "::1:80:"):
        with pytest.raises(ValueError, match="ADDRESS:PORT"):
            parse_listen(text)
