"""tunerd's own settings: every table, key and default.

Built once at the entry point (`settings_sources`) and passed on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tunerd.core.listen_address import parse_listen
from tunerd.core.window import parse_window

PREFIX = "TUNERD_"

UnitName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9:_.\\@-]{1,200}\.service$")]
UserName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]
Seconds = Annotated[float, Field(ge=0, le=86400)]


def _whole_path(path: Path) -> Path:
    """The daemon and a shell have other working folders, so a relative path would mean two things."""
    try:
        expanded = path.expanduser()
    except RuntimeError as error:
        raise ValueError("a path whose home is known") from error
    if not expanded.is_absolute():
        raise ValueError("a whole path, beginning with / or ~")
    return expanded


WholePath = Annotated[Path, AfterValidator(_whole_path)]


def _checked_window(window: str, days: str, zone: str) -> None:
    parse_window(window, days, zone)


def _window(text: str) -> str:
    _checked_window(text, "daily", "UTC")
    return text


def _days(text: str) -> str:
    _checked_window("00:00-12:00", text, "UTC")
    return text


def _zone(text: str) -> str:
    _checked_window("00:00-12:00", "daily", text)
    return text


WindowText = Annotated[str, AfterValidator(_window)]
DaysText = Annotated[str, AfterValidator(_days)]
ZoneText = Annotated[str, AfterValidator(_zone)]


class Table(BaseModel):
    """A table of the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceSettings(Table):
    """The unit that tunerd deploys, and how long its swap may take."""

    unit: UnitName = Field("llama-server.service", description="unit that is deployed")
    user: UserName | None = Field(
        None,
        description="account of the server in system mode; else the live unit's `User=`, else "
        "`llama-server`",
    )
    drain_s: Seconds = Field(30.0, description="how long a swap waits for idle slots")
    start_limit_s: Seconds = Field(1800.0, description="longest load of a model")
    stall_s: Seconds = Field(120.0, description="longest load without any sign of progress")
    generation_limit_s: Seconds = Field(180.0, description="longest first generation")
    settle_s: Seconds = Field(3.0, description="how long the new server must stay up before commit")
    stop_timeout_s: Annotated[int, Field(ge=1, le=600)] = Field(
        30, description="`TimeoutStopSec=` of the unit"
    )


class EngineSettings(Table):
    """An engine named by the operator."""

    path: WholePath = Field(description="the llama-server program")
    environment: dict[str, str] = Field(
        default_factory=dict, description="what it needs to find its libraries"
    )
    allow_writable: bool = Field(
        False, description="probe it although others than root may write the program or its folder"
    )


class ModelSettings(Table):
    """Where model files are."""

    dirs: tuple[WholePath, ...] = Field((), description="folders that are searched for model files")


class BackupSettings(Table):
    """How many backups stay."""

    keep: Annotated[int, Field(ge=0)] = Field(
        50, description="backups kept per unit; 0 keeps all; the last good one always stays"
    )


class SwapSettings(Table):
    """What a swap does beside swapping."""

    keep_engine: bool = Field(
        False, description="keep a copy of the engine that serves before each swap"
    )


class SweepSettings(Table):
    """What a sweep may do, and what becomes of what it found."""

    promote: Literal["auto", "ask", "never"] = Field(
        "ask", description="deploy a proved winner at once, propose it, or only report it"
    )
    min_gain: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.01, description="least gain in turn time that is worth a swap (0.01 is 1 %)"
    )
    may_change_output: bool = Field(
        False, description="try settings that can change what the model says, such as KV types"
    )
    downtime_s: Annotated[float, Field(ge=60, le=86400)] = Field(
        28800.0, description="longest that one sweep may keep the server away"
    )
    patience_s: Seconds = Field(
        120.0, description="how long requests of others and other disturbances are waited out"
    )
    quiet_s: Seconds = Field(
        60.0, description="how long the server must be idle before a sweep that yielded goes on"
    )
    window: WindowText | None = Field(
        None,
        description="when the unit tunerd-sweep.service may sweep, such as `01:00-06:30`; else always",
    )
    days: DaysText = Field(
        "daily", description="days on which the window opens, such as `mon-fri` or `sat,sun`"
    )
    timezone: ZoneText | None = Field(
        None,
        description="whose clock the window goes by, such as `Europe/Berlin`; else the machine's",
    )
    budget_s: Annotated[float, Field(ge=10, le=86400)] = Field(
        7200.0, description="longest that a sweep of that unit takes, within `downtime_s`"
    )
    workload: str | None = Field(
        None, description="mix of requests that it is tuned for; else the profile's own"
    )
    space: tuple[str, ...] = Field(
        (), description="values to try, each as `KEY=VALUE,VALUE`, over those of the profile"
    )
    keep: tuple[str, ...] = Field((), description="profile keys that no sweep changes")
    shares_gpu: bool = Field(
        False, description="sweep although another process computes on the GPU when it begins"
    )
    headroom_mib: Annotated[int, Field(ge=0, le=65536)] = Field(
        64, description="VRAM that must stay free with the context full, in MiB"
    )


class ProbationSettings(Table):
    """How a new server is watched after a swap."""

    enabled: bool = Field(
        True, description="watch a new server, and go back by itself where it does worse"
    )
    duration_s: Annotated[float, Field(ge=10, le=604800)] = Field(
        3600.0, description="how long it is watched"
    )
    every_s: Annotated[float, Field(ge=5, le=3600)] = Field(
        30.0, description="time between two looks"
    )


class DaemonSettings(Table):
    """How the daemon looks at what it watches."""

    every_s: Annotated[float, Field(ge=1, le=3600)] = Field(
        10.0, description="time between two looks while the server rests"
    )
    busy_every_s: Annotated[float, Field(ge=1, le=3600)] = Field(
        60.0, description="longest time between two looks while it works"
    )


def _listen(text: str) -> str:
    parse_listen(text)
    return text


class PageSettings(Table):
    """The page and the API on a port, beside the socket; off without `listen`."""

    listen: Annotated[str, AfterValidator(_listen)] | None = Field(
        None, description="address and port of the page, such as `127.0.0.1:8765`"
    )
    token_file: WholePath | None = Field(
        None,
        description="file with the token that opens the page, mode 0600; any address that others "
        "can reach needs one",
    )
    hosts: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.:\[\]-]{1,253}$")], ...] = (
        Field(
            (), description="further names under which browsers reach the page, such as `box.lan`"
        )
    )


class GuardSettings(Table):
    """What the guards may do: `act`, only `advise`, or nothing (`off`)."""

    oom: Literal["act", "advise", "off"] = Field(
        "act", description="raise the fit margin of a server that runs out of VRAM again and again"
    )
    oom_steps: Annotated[int, Field(ge=1, le=10)] = Field(
        2, description="most steps by which it raises the margin until a person deploys something"
    )
    hang: Literal["act", "advise", "off"] = Field(
        "act", description="restart a server that says it is well and generates nothing"
    )
    hang_every_s: Annotated[float, Field(ge=5, le=86400)] = Field(
        900.0, description="how long nothing was generated before it is asked for a tiny generation"
    )
    hang_limit_s: Annotated[float, Field(ge=1, le=600)] = Field(
        30.0, description="longest that a tiny generation of an idle server may take"
    )
    hang_restarts_per_hour: Annotated[int, Field(ge=1, le=20)] = Field(
        2, description="most restarts of a server that hangs, in an hour"
    )
    drift: Literal["act", "advise", "off"] = Field(
        "advise",
        description="tell when the server leaves what was measured of it; `act` restarts one that decays",
    )
    upgrade: Literal["act", "advise", "off"] = Field(
        "act",
        description="tell when the engine or the driver changed, and what will refuse to start; `act` "
        "has the next night compare a kept copy of the build before with the one after",
    )


class ScheduleSettings(Table):
    """Whether the daemon begins sweeps by itself; when, [sweep] says."""

    enabled: bool = Field(
        False, description="start tunerd-sweep.service whenever `sweep.window` opens"
    )
    missed: Literal["late", "skip"] = Field(
        "late",
        description="a night whose beginning was missed (off, asleep) begins late or is skipped",
    )


class NotifySettings(Table):
    """Who else is told what the journal is told."""

    webhook: Annotated[str, StringConstraints(pattern=r"^https?://[^\s@]+$")] | None = Field(
        None, description="address that notices are posted to; without a name and password in it"
    )
    format: Literal["json", "ntfy"] = Field(
        "json", description="what it takes: a JSON object, or text with the headers of ntfy"
    )
    token_file: WholePath | None = Field(
        None, description="file with the token that it wants (`Authorization: Bearer`)"
    )
    least: Literal["note", "warning", "error"] = Field(
        "warning", description="how grave a notice must be to be sent"
    )


class Settings(BaseSettings):
    """All settings."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    mode: Literal["system", "user", "local"] | None = Field(
        None, description="service manager; else by who calls and what is there"
    )
    service: ServiceSettings = ServiceSettings()
    engines: dict[str, EngineSettings] = Field(
        default_factory=dict, description="engines by name, beside those that are found"
    )
    models: ModelSettings = ModelSettings()
    backups: BackupSettings = BackupSettings()
    swap: SwapSettings = SwapSettings()
    sweep: SweepSettings = SweepSettings()
    probation: ProbationSettings = ProbationSettings()
    daemon: DaemonSettings = DaemonSettings()
    guards: GuardSettings = GuardSettings()
    notify: NotifySettings = NotifySettings()
    schedule: ScheduleSettings = ScheduleSettings()
    page: PageSettings = PageSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load_settings` has read: the environment of the call, over the file."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)
