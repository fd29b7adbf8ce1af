"""tunerd's own settings: every table, key and default.

Built once at the entry point (`load_settings`) and passed on.
"""

from __future__ import annotations

import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from tunerd.calendar import parse_window, zone_named
from tunerd.errors import ConfigError, HostError
from tunerd.machine.files import Files
from tunerd.paths import Paths, parse_listen
from tunerd.words import (
    NAME_PATTERN,
    NAME_WORDS,
    Problem,
    nearest_name,
    of_form,
    problem_of,
    shown,
    table_in,
)

PREFIX = "TUNERD_"


_OWN = frozenset({"tunerd", "tunerd-web", "tunerd-notify"})


def _of_a_server(unit: str) -> str:
    name = unit.removesuffix(".service")
    if name in _OWN:
        raise ValueError("the unit of a server, not one of tunerd's own")
    if name.endswith("@"):
        raise ValueError(f"an instance of the template, such as {name}main.service")
    return unit


UnitName = Annotated[
    str,
    of_form(
        r"[A-Za-z0-9:_.\\@-]{1,200}\.service",
        "the name of a unit that ends in `.service`, without spaces",
    ),
    AfterValidator(_of_a_server),
]
UserName = Annotated[
    str,
    of_form(
        r"[a-z_][a-z0-9_-]{0,31}", "the name of an account: lower-case letters, digits, `_` and `-`"
    ),
]
Seconds = Annotated[float, Field(ge=0, le=86400)]
AtLeastOneSecond = Annotated[float, Field(ge=1, le=86400)]


def _whole_path(path: Path) -> Path:
    """The daemon and a shell have other working folders, so a relative path would mean two things."""
    try:
        expanded = path.expanduser()
    except RuntimeError as error:
        raise ValueError("a path below a home folder that exists") from error
    if not expanded.is_absolute():
        raise ValueError("an absolute path, beginning with / or ~")
    return expanded


WholePath = Annotated[Path, AfterValidator(_whole_path)]


def _read_by(parse: Callable[[str], object]) -> AfterValidator:
    """Refuses a text of which nothing can be made, and keeps it as a text."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


WindowText = Annotated[str, _read_by(lambda text: parse_window(text, "daily", "UTC"))]
DaysText = Annotated[str, _read_by(lambda days: parse_window("00:00-12:00", days, "UTC"))]
ZoneText = Annotated[str, _read_by(zone_named)]
# Told to ssh as it is: no option of it, and nothing that a shell obeys.
BOX_PATTERN = r"([A-Za-z_][A-Za-z0-9._-]{0,63}@)?[A-Za-z0-9][A-Za-z0-9._:-]{0,199}"
BOX_WORDS = "a name that ssh knows, or user@name; letters, digits, `.`, `_`, `-` and `:`"
BoxName = Annotated[str, of_form(BOX_PATTERN, BOX_WORDS)]


HostName = Annotated[str, of_form(r"[A-Za-z0-9.:\[\]-]{1,253}", "the name or address of a host")]
WebAddress = Annotated[
    str,
    of_form(
        r"https?://[^\s@]+",
        "an address that begins with http:// or https://, without a name and password in it",
    ),
]


class Table(BaseModel):
    """A table of the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ServiceSettings(Table):
    """The unit that tunerd deploys, and how long its swap may take."""

    unit: UnitName = "llama-server.service"
    """the unit that tunerd deploys"""
    user: UserName | None = None
    """account that the server runs as in system mode; by default the live unit's `User=`, or `llama-server`"""
    drain_s: Seconds = 30.0
    """how long a swap waits for idle slots"""
    start_limit_s: Annotated[float, Field(ge=10, le=86400)] = 1800.0
    """how long a new server may take to load its model"""
    stall_s: AtLeastOneSecond = 120.0
    """how long that load may go without any sign of progress"""
    generation_limit_s: AtLeastOneSecond = 180.0
    """how long its first generation may take"""
    settle_s: Seconds = 3.0
    """how long the new server must stay up before the swap is committed"""
    # Mainline answers nothing once it is told to stop, and waits for whoever asked: that long nobody is served.
    stop_timeout_s: Annotated[int, Field(ge=1, le=600)] = 10
    """`TimeoutStopSec=` of the unit"""

    @property
    def on_the_way_back(self) -> Self:
        """The same, with no limit below its default: one that is too short strands nothing that served."""
        names = ("start_limit_s", "stall_s", "generation_limit_s")
        fields = type(self).model_fields
        least = {name: max(getattr(self, name), fields[name].default) for name in names}
        return self.model_copy(update=least)


class EngineSettings(Table):
    """An engine that you name yourself."""

    path: WholePath
    """the llama-server program"""
    environment: dict[str, str] = Field(default_factory=dict)
    """variables that it needs to find its libraries"""
    allow_writable: bool = False
    """run it although accounts other than root may write to the program or its folder"""


class ModelSettings(Table):
    """Where model files are."""

    dirs: tuple[WholePath, ...] = ()
    """folders to search for model files"""


class BackupSettings(Table):
    """How many backups are kept."""

    keep: Annotated[int, Field(ge=0)] = 50
    """backups kept per unit; 0 keeps all; the last good one is always kept"""


class SwapSettings(Table):
    """What else a swap does."""

    keep_engine: bool = False
    """at each swap, keep copies of the engine that serves and of the one that is deployed"""


class SweepSettings(Table):
    """What a sweep may do, and what becomes of what it found."""

    promote: Literal["auto", "ask", "never"] = "ask"
    """deploy a proved winner at once, propose it, or only report it"""
    min_gain: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    """least gain in turn time that is worth a swap (0.01 is 1 %)"""
    may_change_output: bool = False
    """try settings that can change what the model says, such as KV types"""
    downtime_s: Annotated[float, Field(ge=60, le=86400)] = 28800.0
    """how long one sweep may keep the server from serving"""
    patience_s: Seconds = 120.0
    """how long a sweep waits for other people's requests and other disturbances to end"""
    quiet_s: Seconds = 60.0
    """how long the server must be idle before a sweep that yielded goes on"""
    window: WindowText | None = None
    """times of day in which a night may sweep, such as `01:00-06:30`; by default all day"""
    days: DaysText = "daily"
    """days on which the window opens, such as `mon-fri` or `sat,sun`"""
    timezone: ZoneText | None = None
    """time zone of the window, such as `Europe/Berlin`; by default the machine's"""
    budget_s: Annotated[float, Field(ge=10, le=86400)] = 7200.0
    """time limit of a night, within `downtime_s`"""
    workload: str | None = None
    """mix of requests to tune for; by default the profile's own"""
    space: tuple[str, ...] = ()
    """values to try, each as `KEY=VALUE,VALUE`, instead of the profile's"""
    keep: tuple[str, ...] = ()
    """profile keys that no sweep changes"""
    shares_gpu: bool = False
    """begin a sweep although another process computes on the GPU"""
    headroom_mib: Annotated[int, Field(ge=0, le=65536)] = 64
    """VRAM in MiB that must stay free when the context is full"""
    keep_days: Annotated[int, Field(ge=0, le=36500)] = 200
    """days for which the starts and requests of a sweep are kept (the newest 50 sweeps are always kept whole); 0 keeps
    all; verdicts, figures and pairs always stay"""


class ProbationSettings(Table):
    """How a new server is watched after a swap."""

    enabled: bool = True
    """watch a new server, and go back if it does worse"""
    duration_s: Annotated[float, Field(ge=10, le=604800)] = 3600.0
    """how long it is watched"""
    every_s: Annotated[float, Field(ge=5, le=3600)] = 30.0
    """time between two readings"""


class DaemonSettings(Table):
    """How often the daemon takes a reading of the server."""

    every_s: Annotated[float, Field(ge=1, le=3600)] = 10.0
    """time between two readings while the server is idle"""
    busy_every_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """longest time between two readings while it is busy"""


class PageSettings(Table):
    """The page and the API on a port, beside the socket; off without `listen`."""

    listen: Annotated[str, _read_by(parse_listen)] | None = None
    """loopback address and port of the page, such as `127.0.0.1:8765`"""
    token_file: str | None = None
    """not used: the page has no tokens; to reach it from another machine use `ssh -L`, or a proxy with a
    login of its own"""
    hosts: tuple[HostName, ...] = ()
    """other names by which browsers reach the page, such as `box.lan`"""


class GuardSettings(Table):
    """What each guard may do: `act`, only `advise`, or nothing (`off`)."""

    oom: Literal["act", "advise", "off"] = "act"
    """raise the fit margin of a server that keeps running out of VRAM"""
    oom_steps: Annotated[int, Field(ge=1, le=10)] = 2
    """most steps by which it raises the margin before a person deploys something"""
    hang: Literal["act", "advise", "off"] = "act"
    """restart a server that reports that it is healthy but generates nothing"""
    hang_every_s: Annotated[float, Field(ge=5, le=86400)] = 900.0
    """how long a server may generate nothing before it is asked for a tiny generation"""
    hang_limit_s: Annotated[float, Field(ge=1, le=600)] = 30.0
    """how long a tiny generation of an idle server may take"""
    hang_restarts_per_hour: Annotated[int, Field(ge=1, le=20)] = 2
    """most restarts of a hanging server in an hour"""
    drift: Literal["act", "advise", "off"] = "advise"
    """report when the server does worse than it was measured to do, or when other settings would be faster;
    `act` also restarts a server that decays, and sweeps when the window next opens"""
    upgrade: Literal["act", "advise", "off"] = "act"
    """report when the engine or the driver changed, and what will refuse to start; `act` also has the
    next night compare a kept copy of the old build with the new one"""


class ScheduleSettings(Table):
    """Whether the daemon begins sweeps by itself; [sweep] says when."""

    enabled: bool = False
    """begin a night whenever `sweep.window` opens"""
    missed: Literal["late", "skip"] = "late"
    """whether a night whose beginning was missed (the machine was off or asleep) begins late or is skipped"""
    begin: Literal["open", "asleep"] = "open"
    """begin a night when `sweep.window` opens, or as soon as the server sleeps within it
    (`serving.sleep_idle_s`); with `asleep`, `missed` is always `late`"""


class NotifySettings(Table):
    """Where notices are sent, besides the journal."""

    webhook: WebAddress | None = None
    """address that notices are posted to, without a user name and password"""
    format: Literal["json", "ntfy"] = "json"
    """what it accepts: a JSON object, or text with ntfy's headers"""
    token_file: WholePath | None = None
    """file with the token that it requires (`Authorization: Bearer`)"""
    least: Literal["note", "warning", "error"] = "warning"
    """least severity of a notice that is sent"""


class FleetSettings(Table):
    """Other boxes, which `tunerd fleet` reaches over ssh."""

    boxes: tuple[BoxName, ...] = ()
    """boxes as ssh knows them, the canary first, such as `gpu1` or `root@gpu2`"""
    command: Annotated[tuple[str, ...], Field(min_length=1)] = ("tunerd",)
    """how to call tunerd there, such as `["sudo", "-n", "tunerd"]`"""
    every_s: Annotated[float, Field(ge=1, le=600)] = 15.0
    """time between two readings of a probation there"""
    limit_s: Annotated[float, Field(ge=1, le=3600)] = 180.0
    """how long a box may take to answer a question"""
    change_s: Annotated[float, Field(ge=1, le=86400)] = 3600.0
    """how long a deployment on a box may take"""
    away_s: Seconds = 600.0
    """how long a box may be unreachable while its probation runs, as during a reboot"""


_DATABASE = "postgresql+psycopg://"


def _database(text: str) -> str:
    """Refuses a password, which would be shown wherever settings are."""
    if not text.startswith(_DATABASE) or any(letter.isspace() for letter in text):
        raise ValueError(
            f"an address that begins with {_DATABASE}, such as {_DATABASE}tunerd@db/tunerd"
        )
    # As SQLAlchemy reads it: a `/`, `?` or `#` in a password ends the host for urlsplit.
    named = re.match(r"[^:/]*:[^@]*@", text.removeprefix(_DATABASE))
    try:
        parts = urlsplit(text)
        has_password = named or parts.password is not None
        _ = has_password or parts.port
    except ValueError as error:
        raise ValueError("an address whose host and port are valid: `HOST:5432`") from error
    if has_password or {"password", "sslpassword"} & set(parse_qs(parts.query)):
        raise ValueError(
            "an address without a password: that comes from a file (`?passfile=/etc/tunerd/pgpass`, "
            "PGPASSFILE, a service of PGSERVICEFILE), or a systemd credential"
        )
    return text


class StoreSettings(Table):
    """A database that many boxes hand their evidence in to; each also keeps its own file. Off without `url`."""

    url: Annotated[str, StringConstraints(max_length=2000), AfterValidator(_database)] | None = None
    """address of the PostgreSQL database, without a password, such as
    `postgresql+psycopg://tunerd@db.lan/tunerd?passfile=/etc/tunerd/pgpass`"""
    box: Annotated[str, of_form(NAME_PATTERN, NAME_WORDS)] | None = None
    """name of this box there; by default the machine's"""


class Settings(BaseSettings):
    """All settings."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    mode: Literal["system", "user", "local"] | None = None
    """service manager: `system`, `user` or `local`; by default chosen by who calls and what is available"""
    service: ServiceSettings = ServiceSettings()
    engines: dict[str, EngineSettings] = Field(default_factory=dict)
    """engines by name, in addition to those that are found"""
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
    fleet: FleetSettings = FleetSettings()
    store: StoreSettings = StoreSettings()

    @classmethod
    def settings_customise_sources(
        cls, *_: Any, **sources: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load_settings` has read: the environment of the call, over the file."""
        return (sources["init_settings"],)


# Read before there are settings, or by the tests alone.
_ELSEWHERE = ("MODE", "CONFIG_DIR", "STATE_DIR", "RUNTIME_DIR", "UNIT_DIR", "LOG_LEVEL")
_LOG_LEVELS = ("debug", "info", "warning", "error")
_TEST_PREFIX = "TUNERD_TEST_"
_CAREFUL = {"oom": "advise", "hang": "advise", "upgrade": "advise"}


def load_settings(paths: Paths, environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of this machine and call.

    Raises:
        ConfigError: the file cannot be read or parsed, a name is unknown, or a value is not
            allowed; all problems at once.
    """
    variables = _variables(environment)
    problems = [*_unknown_variables(variables), *_wrong_log_level(environment)]
    data, readable = _read(paths.settings_file), []
    for name in sorted(filter(_is_known, variables)):  # a table of its own before a key of it
        try:
            source = EnvSettingsSource(Settings)  # nested tables, JSON where a list is wanted
            source.env_vars = {name.lower(): variables[name]}
            data = _over(data, source())
            readable.append(name)
        except SettingsError:
            found = shown(variables[name])
            problems.append(f'{name}: found {found}; allowed: JSON, such as ["/models"]')
    try:
        settings = Settings(**data)
    except ValidationError as error:
        problems += _described(readable, paths.settings_file, error)
    if problems:
        raise ConfigError(
            f"settings are wrong in {len(problems)} place{'s' if len(problems) > 1 else ''}",
            cause="\n".join(problems),
            state="nothing was touched",
            hint=f"correct `{paths.settings_file}` or the environment",
        )
    return settings


def settings_or_last_good(
    paths: Paths, environment: Mapping[str, str] = os.environ, last: Settings | None = None
) -> tuple[Settings, str | None]:
    """The settings; where they are wrong the last ones that were right, and what is the matter.

    Those are `last`, else what the daemon kept, as far as this version allows it. Where it kept none the
    defaults hold. Where it is not known what guards may do, how far and with which unit, they only advise,
    and nothing is taken back by itself where that is not known of probation.
    """
    try:
        return load_settings(paths, environment), None
    except ConfigError as error:
        problem = error.words.replace("\n", "; ")
    if last is not None:
        return last, f"{problem}; until that is corrected, the previous settings apply"
    try:
        kept, refused = _as_far_as_allowed(Files().read_json(paths.last_settings))
    except (HostError, ValueError, TypeError):
        kept, _ = _as_far_as_allowed({})
        return kept, f"{problem}; until that is corrected, the defaults apply"
    but = f" (except {', '.join(refused)}: those values are not allowed)" if refused else ""
    return kept, f"{problem}; until that is corrected, the previous settings apply{but}"


def _as_far_as_allowed(data: dict[str, Any]) -> tuple[Settings, list[str]]:
    """Kept settings, with defaults for what is not allowed any more, and the names of that.

    Raises:
        ValueError, TypeError: they are no table at all.
    """
    refused: list[str] = []
    while True:
        guards = {**data}.get("guards", {})
        told = _CAREFUL | guards if isinstance(guards, dict) else guards
        try:
            found = Settings(**{**data, "guards": told})
            return _less_powerful(found, {name.partition(".")[0] for name in refused}), refused
        except ValidationError as error:
            places = {_place_in(data, entry["loc"]) for entry in error.errors()}
        for *tables, key in sorted(places):
            table = data
            for name in tables:
                table = table.get(name, {})
            table.pop(key, None)
            refused.append(".".join((*tables, key)))


def _less_powerful(settings: Settings, doubtful: set[str]) -> Settings:
    """Nothing that acts by itself goes by a default in the place of what is not allowed any more."""
    update: dict[str, Any] = {}
    if doubtful & {"guards", "service"}:
        guards = settings.guards
        careful = {name: word for name, word in _CAREFUL.items() if getattr(guards, name) != "off"}
        update["guards"] = guards.model_copy(update=careful)
    if doubtful & {"probation", "service"}:
        update["probation"] = settings.probation.model_copy(update={"enabled": False})
    return settings.model_copy(update=update)


def _place_in(data: Any, location: Iterable[Any]) -> tuple[str, ...]:
    """The innermost key on the way to a value that is refused; lists are refused as a whole."""
    found: list[str] = []
    for part in location:
        if not isinstance(data, Mapping) or part not in data:
            break
        found.append(part)
        data = data[part]
    return tuple(found)


def check_settings(content: bytes, path: Path) -> None:
    """Whether this may be the settings file.

    Raises:
        ConfigError: it cannot be parsed, or holds what is not allowed; all problems at once.
    """
    try:
        Settings(**_parsed(content, path))
    except ValidationError as error:
        problems = "\n".join(_described((), path, error))
        raise ConfigError("the settings would be wrong", cause=problems) from error


def sources_of(paths: Paths, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Dotted name of every setting, with where its value comes from."""
    variables = _variables(environment)
    file = str(paths.settings_file)
    set_keys = [*map(_key, variables), *_dotted(_read(paths.settings_file))]
    found = {}
    for name in _known():
        keys = [key for key in set_keys if _is_within(key, name)]
        origins = dict.fromkeys(variable_of(key, variables) or file for key in keys)
        found[name] = ", ".join(origins) or "default"
    return found


def variable_of(key: str, variables: Iterable[str]) -> str | None:
    """Which of these variables sets a key, whatever the file says; None where none does."""
    ours = (name for name in variables if name.startswith(PREFIX))
    return next((name for name in ours if _is_within(key, _key(name))), None)


def _is_within(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")


def _key(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower().replace("__", ".")


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are settings, or are meant to be."""
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(PREFIX)
        and not name.startswith(_TEST_PREFIX)
        and (name.removeprefix(PREFIX) not in _ELSEWHERE or _key(name) in _known())
    }


def _over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Both, key by key; `top` wins."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _over(below, value)
        else:
            merged[key] = value
    return merged


def _is_known(variable: str) -> bool:
    return _key(variable) in _known() or _key(variable).startswith("engines.")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = Files().read(path)
    except HostError as error:
        raise ConfigError(error.message, cause=error.cause, hint=error.hint) from error
    if content is None and path.is_symlink():  # where its disk is not mounted, say
        raise ConfigError(f"`{path}` is a link to `{path.readlink()}`, which is not there")
    return {} if content is None else _parsed(content, path)


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        raise ConfigError(
            f"not valid TOML: `{path}`",
            cause=str(error),
            state="nothing was touched",
            hint=f"correct `{path}`",
        ) from error


def _unknown_variables(variables: Mapping[str, str]) -> list[str]:
    names = [key.upper().replace(".", "__") for key in _known()]
    problems = []
    for variable in variables:
        if _is_known(variable):
            continue
        nearest = nearest_name(variable.removeprefix(PREFIX), [*names, *_ELSEWHERE])
        hint = f" (did you mean {PREFIX}{nearest}?)" if nearest else ""
        problems.append(f"environment: {variable}: no such setting{hint}")
    return problems


def _wrong_log_level(environment: Mapping[str, str]) -> list[str]:
    variable = f"{PREFIX}LOG_LEVEL"
    level = environment.get(variable, _LOG_LEVELS[1])
    if level.lower() in _LOG_LEVELS:
        return []
    nearest = nearest_name(level.lower(), _LOG_LEVELS)
    return [str(Problem("environment", variable, repr(level), ", ".join(_LOG_LEVELS), nearest))]


def _described(variables: Iterable[str], file: Path, error: ValidationError) -> list[str]:
    found = (problem_of(Settings, "", dict(entry)) for entry in error.errors())
    return [str(replace(one, source=variable_of(one.key, variables) or str(file))) for one in found]


def _known() -> tuple[str, ...]:
    """Dotted names of every setting; of `engines` only the table itself."""
    names: list[str] = []
    for name, field in Settings.model_fields.items():
        table = table_in(field.annotation)
        if table is None or typing.get_origin(field.annotation) is dict:
            names.append(name)
        else:
            names.extend(f"{name}.{inner}" for inner in table.model_fields)
    return tuple(names)


def _dotted(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            names.extend(_dotted(value, f"{prefix}{key}."))
        else:
            names.append(f"{prefix}{key}")
    return names
