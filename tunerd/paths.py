"""Where everything is: folders by mode, and the addresses that people write."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunerd.errors import ConfigError
from tunerd.words import Mode


class _Within:
    """A file or folder below one of those that a mode has."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder = folder
        self._name = name

    def __get__(self, paths: Paths, kind: type[Paths]) -> Path:
        folder: Path = getattr(paths, self._folder)
        return folder / self._name


@dataclass(frozen=True, slots=True)
class Paths:
    """The folders of one mode on one machine.

    `unit_dir` is where a unit file is the live definition, `runtime_unit_dir` where a reboot
    forgets it.
    """

    config_dir: Path
    state_dir: Path
    runtime_dir: Path
    unit_dir: Path
    runtime_unit_dir: Path

    settings_file = _Within("config_dir", "tunerd.toml")
    """`tunerd.toml`."""
    settings_lock = _Within("config_dir", "settings.lock")
    """The lock of whoever writes the settings: what another writes at that moment would be lost."""
    last_settings = _Within("state_dir", "settings.json")
    """The settings by which the daemon went last."""
    site_profiles = _Within("config_dir", "profiles")
    """Profiles of this site."""
    lock = _Within("state_dir", "lock")
    """The lock of whoever changes what serves."""
    measure_lock = _Within("state_dir", "measure.lock")
    """The lock of whoever measures: one at a time."""
    sweep_lock = _Within("state_dir", "sweep.lock")
    """The lock of a sweep, which holds it too while it has yielded and measures nothing."""
    schedule_lock = _Within("state_dir", "schedule.lock")
    """The lock of whoever writes what is remembered of nights."""
    measurement = _Within("runtime_dir", "measurement.json")
    """What others may know of the measurement under way; a reboot forgets it."""
    socket = _Within("runtime_dir", "tunerd.sock")
    """Where members of the group ask the system's daemon."""
    power = _Within("runtime_dir", "power.json")
    """The power limit that a measurement has changed; a reboot forgets it, as it does the limit."""
    reserve = _Within("state_dir", "reserve")
    """Space set aside for going back on a full disk."""
    journal_dir = _Within("state_dir", "journal")
    """Intent records of swaps under way."""
    generations_dir = _Within("state_dir", "generations")
    """Numbered records of swaps."""
    tuned_dir = _Within("state_dir", "tuned")
    """What promotions found, by profile."""
    imported_dir = _Within("state_dir", "imported")
    """What others measured, by bundle: candidates, and no evidence."""
    evidence = _Within("state_dir", "evidence.db")
    """What was measured."""
    box = _Within("state_dir", "box.json")
    """Who this box is among those that share a store."""
    handed_in = _Within("state_dir", "handed-in.json")
    """How the last handing in of evidence to the shared store ended."""
    telemetry = _Within("state_dir", "telemetry.db")
    """The history of what was watched."""
    engines_dir = _Within("state_dir", "engines")
    """Kept copies of engines."""
    cache_dir = _Within("state_dir", "cache")
    """What can be found out again: probes, proofs, model headers."""
    log_dir = _Within("state_dir", "log")
    """Logs of units that tunerd itself supervises."""


def paths_for(mode: Mode, environment: Mapping[str, str]) -> Paths:
    """The folders of a mode.

    `TUNERD_CONFIG_DIR`, `TUNERD_STATE_DIR`, `TUNERD_RUNTIME_DIR` and `TUNERD_UNIT_DIR` move each
    of them; user mode and local mode follow the XDG base directories.

    Raises:
        ConfigError: such a variable holds a relative path.
    """
    if mode is Mode.SYSTEM:
        config, state, runtime = Path("/etc/tunerd"), Path("/var/lib/tunerd"), Path("/run/tunerd")
        units, runtime_units = Path("/etc/systemd/system"), Path("/run/systemd/system")
    else:
        home = Path(environment.get("HOME", "/"))
        config_home = _base_folder(environment, "XDG_CONFIG_HOME") or home / ".config"
        state_home = _base_folder(environment, "XDG_STATE_HOME") or home / ".local" / "state"
        config, state = config_home / "tunerd", state_home / "tunerd"
        runtime_home = _base_folder(environment, "XDG_RUNTIME_DIR")
        runtime = runtime_home / "tunerd" if runtime_home is not None else state / "run"
        units = config_home / "systemd" / "user"
        runtime_units = (runtime_home or state) / "systemd" / "user"
    config = _moved(environment, "TUNERD_CONFIG_DIR", config)
    state = _moved(environment, "TUNERD_STATE_DIR", state)
    runtime = _moved(environment, "TUNERD_RUNTIME_DIR", runtime)
    if mode is Mode.LOCAL:
        if "TUNERD_STATE_DIR" in environment and "TUNERD_RUNTIME_DIR" not in environment:
            runtime = state / "run"
        units, runtime_units = state / "units", runtime / "units"
    units = _moved(environment, "TUNERD_UNIT_DIR", units)
    return Paths(config, state, runtime, units, runtime_units)


def _moved(environment: Mapping[str, str], name: str, otherwise: Path) -> Path:
    """Where a variable moves a folder to; the supervisor and a shell have other working folders."""
    value = environment.get(name)
    if value and not value.startswith("/"):
        raise ConfigError(
            f"`{name}` is a relative path: `{value}`",
            cause="the supervisor and the daemon run in another folder, and would use another state",
            state="nothing was touched",
            hint=f"give the absolute path: {name}={Path(value).absolute()}",
        )
    return Path(value) if value else otherwise


def _base_folder(environment: Mapping[str, str], name: str) -> Path | None:
    """A base directory; the XDG specification says to ignore relative ones."""
    value = environment.get(name, "")
    return Path(value) if value.startswith("/") else None


FROM_ELSEWHERE = "from another machine use ssh -L, or a proxy with a login of its own (docs/api.md)"
_HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A numeric address and a port; `is_loopback` where only this machine can reach it."""

    host: str
    port: int
    is_loopback: bool


def parse_listen(text: str) -> ListenAddress:
    """`127.0.0.1:8765`, `[::1]:8765` or `localhost:8765` as an address.

    Raises:
        ValueError: it is none; the message says what is allowed.
    """
    name, colon, port = text.rpartition(":")
    is_number = port.isdecimal() and port.isascii()
    if not colon or not is_number or not 0 < int(port) <= _HIGHEST_PORT:
        raise ValueError("ADDRESS:PORT, such as 127.0.0.1:8765")
    plain = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if plain == "localhost":
        plain = "127.0.0.1"
    try:
        address = ipaddress.ip_address(plain)
    except ValueError as error:
        raise ValueError("ADDRESS:PORT with a numeric address, such as 127.0.0.1:8765") from error
    return ListenAddress(str(address), int(port), address.is_loopback)
