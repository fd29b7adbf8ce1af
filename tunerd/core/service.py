"""What a service manager says about a unit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunerd.core.result import Message, warning


@dataclass(frozen=True, slots=True)
class UnitState:
    """One reading of one unit, in systemd's own words (`systemctl show`).

    `main_pid` is None while nothing runs. `exit_status` and `exit_kind` (exited, killed, dumped)
    are of the last main process that ended. `active_since_s` is wall-clock seconds since the epoch.
    `result` is `success` or the reason of the last failure (exit-code, signal, core-dump,
    oom-kill, timeout, start-limit-hit, ...).
    """

    unit: str
    load_state: str
    active_state: str
    sub_state: str
    result: str
    main_pid: int | None
    exit_kind: str | None
    exit_status: int | None
    n_restarts: int | None
    invocation_id: str | None
    fragment_path: Path | None
    drop_ins: tuple[Path, ...]
    needs_reload: bool
    unit_file_state: str | None
    active_since_s: float | None

    @property
    def exists(self) -> bool:
        """Whether the manager found a definition for this unit."""
        return self.load_state not in {"not-found", ""}

    @property
    def is_active(self) -> bool:
        """Whether its main process runs."""
        return self.active_state == "active"

    @property
    def has_failed(self) -> bool:
        """Whether it is failed, or waits to be restarted after a failure."""
        return self.active_state == "failed" or self.sub_state.startswith("auto-restart")

    @property
    def is_enabled(self) -> bool | None:
        """Whether it starts at boot; None where the manager does not say."""
        if self.unit_file_state is None:
            return None
        return self.unit_file_state in {"enabled", "enabled-runtime", "linked", "linked-runtime"}


def lacks_manager() -> Message:
    """That a user's systemd was looked for in vain, so that tunerd's own supervisor does its work."""
    return warning(
        "no-user-manager",
        "this machine runs systemd, but your own service manager cannot be reached: tunerd's "
        "supervisor takes its place, which nothing starts at boot",
        "loginctl enable-linger, then XDG_RUNTIME_DIR=/run/user/$(id -u) where it is not set; "
        "or --local, to mean it",
    )
