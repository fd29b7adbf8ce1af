"""Where everything is: folders by mode, and the addresses that people write."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunerd.words import Mode


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

    @property
    def settings_file(self) -> Path:
        """`tunerd.toml`."""
        return self.config_dir / "tunerd.toml"

    @property
    def last_settings(self) -> Path:
        """The settings by which the daemon went last."""
        return self.state_dir / "settings.json"

    @property
    def site_profiles(self) -> Path:
        """Profiles of this site."""
        return self.config_dir / "profiles"

    @property
    def lock(self) -> Path:
        """The one lock."""
        return self.state_dir / "lock"

    @property
    def measure_lock(self) -> Path:
        """The lock of whoever measures: one at a time."""
        return self.state_dir / "measure.lock"

    @property
    def measurement(self) -> Path:
        """What others may know of the measurement under way; a reboot forgets it."""
        return self.runtime_dir / "measurement.json"

    @property
    def power(self) -> Path:
        """The power limit that a measurement has changed; a reboot forgets it, as it does the limit."""
        return self.runtime_dir / "power.json"

    @property
    def reserve(self) -> Path:
        """Space set aside for going back on a full disk."""
        return self.state_dir / "reserve"

    @property
    def journal_dir(self) -> Path:
        """Intent records of swaps under way."""
        return self.state_dir / "journal"

    @property
    def generations_dir(self) -> Path:
        """Numbered records of swaps."""
        return self.state_dir / "generations"

    @property
    def tuned_dir(self) -> Path:
        """What promotions found, by profile."""
        return self.state_dir / "tuned"

    @property
    def imported_dir(self) -> Path:
        """What others measured, by bundle: candidates, and no evidence."""
        return self.state_dir / "imported"

    @property
    def evidence(self) -> Path:
        """What was measured."""
        return self.state_dir / "evidence.db"

    @property
    def box(self) -> Path:
        """Who this box is among those that share a store."""
        return self.state_dir / "box.json"

    @property
    def handed_in(self) -> Path:
        """How the last handing in of evidence to the shared store ended."""
        return self.state_dir / "handed-in.json"

    @property
    def telemetry(self) -> Path:
        """The history of what was watched."""
        return self.state_dir / "telemetry.db"

    @property
    def engines_dir(self) -> Path:
        """Kept copies of engines."""
        return self.state_dir / "engines"

    @property
    def cache_dir(self) -> Path:
        """What can be found out again: probes, proofs, model headers."""
        return self.state_dir / "cache"

    @property
    def log_dir(self) -> Path:
        """Logs of units that tunerd itself supervises."""
        return self.state_dir / "log"


def paths_for(mode: Mode, environment: Mapping[str, str]) -> Paths:
    """The folders of a mode.

    `TUNERD_CONFIG_DIR`, `TUNERD_STATE_DIR`, `TUNERD_RUNTIME_DIR` and `TUNERD_UNIT_DIR` move each
    of them; user mode and local mode follow the XDG base directories.
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
    config = Path(environment.get("TUNERD_CONFIG_DIR") or config)
    state = Path(environment.get("TUNERD_STATE_DIR") or state)
    runtime = Path(environment.get("TUNERD_RUNTIME_DIR") or runtime)
    if mode is Mode.LOCAL:
        if "TUNERD_STATE_DIR" in environment and "TUNERD_RUNTIME_DIR" not in environment:
            runtime = state / "run"
        units, runtime_units = state / "units", runtime / "units"
    units = Path(environment.get("TUNERD_UNIT_DIR") or units)
    return Paths(config, state, runtime, units, runtime_units)


def _base_folder(environment: Mapping[str, str], name: str) -> Path | None:
    """A base directory; the XDG specification says to ignore relative ones."""
    value = environment.get(name, "")
    return Path(value) if value.startswith("/") else None


FROM_ELSEWHERE = "from elsewhere use ssh -L, or a proxy with a login of its own (docs/api.md)"
_HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A numeric address and a port; `is_loopback` where only this machine can reach it."""

    host: str
    port: int
    is_loopback: bool

    @property
    def name(self) -> str:
        """As a Host header has it, without the port."""
        return f"[{self.host}]" if ":" in self.host else self.host


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
