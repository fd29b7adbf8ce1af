"""tunerd's settings: every mistake at once, each with where it stands and the nearest name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tunerd.errors import ConfigError
from tunerd.paths import Paths, paths_for
from tunerd.settings import (
    GuardSettings,
    ModelSettings,
    ServiceSettings,
    Settings,
    load_settings,
    settings_or_last_good,
    sources_of,
)
from tunerd.words import Mode


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path, tmp_path, tmp_path, tmp_path, tmp_path)


def write(paths: Paths, text: str) -> None:
    paths.settings_file.write_text(text)


def problems(paths: Paths, environment: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(paths, environment or {})
    assert caught.value.state == "nothing was touched"
    return (caught.value.cause or "").splitlines()


def test_the_environment_wins_over_the_file_and_both_say_so(paths: Paths) -> None:
    write(paths, "[service]\nunit = 'a.service'\ndrain_s = 5\n[backups]\nkeep = 7\n")
    environment = {"TUNERD_SERVICE__UNIT": "b.service", "TUNERD_MODELS__DIRS": '["/m"]'}
    settings = load_settings(paths, environment)
    assert (settings.service.unit, settings.service.drain_s) == ("b.service", 5)
    assert settings.models.dirs == (Path("/m"),)
    sources = sources_of(paths, environment)
    assert sources["service.unit"] == "TUNERD_SERVICE__UNIT"
    assert sources["service.drain_s"] == sources["backups.keep"] == str(paths.settings_file)
    assert sources["models.dirs"] == "TUNERD_MODELS__DIRS"
    assert sources["service.stall_s"] == "default"


ADDRESS = "postgresql+psycopg://"


@pytest.mark.parametrize(
    "url",
    [
        f"{ADDRESS}tunerd@db.lan:5432/tunerd?passfile=/etc/tunerd/pgpass&sslmode=verify-full",
        f"{ADDRESS}tunerd@/tunerd?host=/run/postgresql",
        f"{ADDRESS}/?service=tunerd",
    ],
)
def test_a_shared_store_has_an_address(paths: Paths, url: str) -> None:
    write(paths, f"[store]\nurl = '{url}'\n")
    assert load_settings(paths, {}).store.url == url


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        (f"{ADDRESS}tunerd:hush@db.lan/tunerd", "without a password"),
        (f"{ADDRESS}tunerd:a/hush@db.lan/tunerd", "without a password"),
        (f"{ADDRESS}tunerd:12/hush@db.lan/tunerd", "without a password"),
        (f"{ADDRESS}tunerd:12?hush@db.lan/tunerd", "without a password"),
        (f"{ADDRESS}tunerd#1:hush@db.lan/tunerd", "without a password"),
        (f"{ADDRESS}tunerd@db.lan/tunerd?sslmode=require&password=hush", "without a password"),
        (f"{ADDRESS}tunerd@db.lan/tunerd?sslpassword=hush", "without a password"),
        ("postgresql://tunerd:hush@db.lan/tunerd", "begins with"),
        ("sqlite:////srv/hush@x", "begins with"),
        (f"{ADDRESS}tunerd@db.lan:port/tunerd", ""),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_shown(
    paths: Paths, url: str, allowed: str
) -> None:
    (problem,) = problems(paths, {"TUNERD_STORE__URL": url})
    assert problem.startswith("TUNERD_STORE__URL: store.url: found")
    assert allowed in problem
    assert "hush" not in problem
    write(paths, f"[store]\nurl = '{url}'\n")
    assert "hush" not in " ".join(problems(paths))


def test_only_the_environment_of_the_call_counts(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNERD_SERVICE__UNIT", "mine.service")
    assert load_settings(paths, {}).service.unit == "llama-server.service"
    assert load_settings(paths, dict(os.environ)).service.unit == "mine.service"


def test_where_settings_are_wrong_the_last_good_ones_hold_else_careful_defaults(
    paths: Paths,
) -> None:
    write(paths, "[guards]\nhang = 'sometimes'\n")
    settings, problem = settings_or_last_good(paths, {})
    assert problem is not None
    assert "guards.hang" in problem
    assert "the defaults hold" in problem
    assert settings.guards.hang == settings.guards.oom == "advise"

    paths.last_settings.parent.mkdir(parents=True, exist_ok=True)
    for broken in (b"", b"\xff", b"[]", b'{"guards": {"hang": "never"}}', b"[" * 100_000):
        paths.last_settings.write_bytes(broken)
        assert settings_or_last_good(paths, {})[0] == settings
    good = Settings(guards=GuardSettings(hang="off"), models=ModelSettings(dirs=(Path("/m"),)))
    paths.last_settings.write_text(good.model_dump_json())
    settings, problem = settings_or_last_good(paths, {"TUNERD_BACKUPS__KEEP": "3"})
    assert settings == good, "nothing is mixed"
    assert "those of before hold" in (problem or "")

    write(paths, "")
    assert settings_or_last_good(paths, {}) == (Settings(), None)


def test_kept_settings_hold_as_far_as_this_version_allows_them_and_the_rest_is_named(
    paths: Paths,
) -> None:
    """A limit below a bound that came later made all of them count as unreadable."""
    write(paths, "nonsense = [")
    kept = json.loads(Settings(guards=GuardSettings(hang="off", oom="off")).model_dump_json())
    kept["service"] |= {"unit": "mine.service", "start_limit_s": 1.0, "gone": 2}
    kept["models"]["dirs"] = ["/m", "not whole", "nor this"]
    kept["engines"] = {"a": {"path": "not whole"}, "b": {"path": "/b"}}
    kept["guards"]["oom"] = "sometimes"
    paths.last_settings.parent.mkdir(parents=True, exist_ok=True)
    paths.last_settings.write_text(json.dumps(kept))

    settings, problem = settings_or_last_good(paths, {})

    assert settings.service == ServiceSettings(unit="mine.service")
    assert (settings.guards.hang, settings.guards.oom) == ("off", "advise")
    assert settings.models.dirs == ()
    assert list(settings.engines) == ["b"]
    assert (problem or "").endswith(
        "those of before hold, but for engines.a.path, guards.oom, models.dirs, service.gone, "
        "service.start_limit_s, engines.a, which cannot be as kept"
    )


@pytest.mark.parametrize(
    ("table", "key", "value", "acts", "takes_back"),
    [
        ("daemon", "every_s", -1, "act", True),
        ("guards", "hang_restarts_per_hour", -1, "advise", True),
        ("service", "unit", "my llama.service", "advise", False),
        ("probation", "enabled", "never", "act", False),
    ],
)
def test_what_cannot_be_as_kept_gives_nothing_that_acts_by_itself_more_power(
    paths: Paths, table: str, key: str, value: object, acts: str, takes_back: bool
) -> None:
    """A limit's default in the place of somebody's own would restart what they let run."""
    write(paths, "nonsense = [")
    kept = json.loads(Settings(guards=GuardSettings(hang="act")).model_dump_json())
    kept[table][key] = value
    paths.last_settings.parent.mkdir(parents=True, exist_ok=True)
    paths.last_settings.write_text(json.dumps(kept))

    settings, problem = settings_or_last_good(paths, {})

    assert f"{table}.{key}" in (problem or "")
    assert (settings.guards.hang, settings.probation.enabled) == (acts, takes_back)


def test_all_mistakes_are_reported_at_once_each_with_its_place(paths: Paths) -> None:
    write(
        paths,
        """
        mdoe = "user"
        [service]
        uint = "x.service"
        drain_s = -1
        stop_timeout_s = "soon"
        [engines.mine]
        pth = "/x"
        [models]
        dirs = ["relative"]
        """,
    )
    environment = {
        "TUNERD_SERVICE__STALL_S": "long",
        "TUNERD_SERVCE__UNIT": "x.service",
        "TUNERD_MODELS__DIRS": "/a:/b",
    }
    found = problems(paths, environment)
    file = str(paths.settings_file)
    expected = [
        ("environment: TUNERD_SERVCE__UNIT", "did you mean TUNERD_SERVICE__UNIT?"),
        ("TUNERD_MODELS__DIRS: found '/a:/b'", "JSON"),
        (f"{file}: mdoe", "did you mean `mode`?"),
        (f"{file}: service.uint", "did you mean `unit`?"),
        (f"{file}: service.drain_s", "greater than or equal to 0"),
        (f"{file}: service.stop_timeout_s", "a whole number"),
        ("TUNERD_SERVICE__STALL_S: service.stall_s: found 'long'", "a number"),
        (f"{file}: engines.mine.pth", "did you mean `path`?"),
        (f"{file}: engines.mine.path: found nothing", "required"),
        (f"{file}: models.dirs.0", "a whole path"),
    ]
    for begin, text in expected:
        matching = [line for line in found if line.startswith(begin)]
        assert len(matching) == 1, (begin, found)
        assert text in matching[0]
    assert len(found) == len(expected)


def test_what_may_stand_there_is_told_in_words(paths: Paths) -> None:
    write(
        paths,
        """
        service = { unit = "my server", user = "Root" }
        notify = { webhook = "ftp://x" }
        page = { hosts = ["a b"] }
        fleet = { boxes = ["-x"] }
        store = { box = "a b" }
        sweep = { window = "25:00-03:00", days = "mon,fnd", timezone = "Europe/Berlni" }
        """,
    )
    allowed = {line.split(": ")[1]: line.partition("allowed: ")[2] for line in problems(paths)}
    assert allowed == {
        "service.unit": "the name of a unit that ends in `.service`, without spaces",
        "service.user": "the name of an account: small letters, digits, `_` and `-`",
        "notify.webhook": "an address that begins with http:// or https://, without a name and password in it",
        "page.hosts.0": "the name or address of a host",
        "fleet.boxes.0": "a name that ssh knows, or user@name; letters, digits, `.`, `_`, `-` and `:`",
        "store.box": "a letter or digit, then letters, digits, `.`, `_` and `-`; at most 100",
        "sweep.window": "two times of day, such as 01:00-06:30",
        "sweep.days": "days such as daily, mon-fri or sat,sun",
        "sweep.timezone": "the name of a time zone, such as Europe/Berlin",
    }


@pytest.mark.parametrize("key", ["start_limit_s", "stall_s", "generation_limit_s"])
def test_a_limit_in_which_nothing_can_start_is_refused_and_a_way_back_has_the_defaults(
    paths: Paths, key: str
) -> None:
    write(paths, f"[service]\n{key} = 0\n")
    (line,) = problems(paths)
    assert f"service.{key}" in line
    assert "greater than or equal to" in line
    default = getattr(ServiceSettings(), key)
    for chosen, expected in ((10.0, default), (2 * default, 2 * default)):
        back = ServiceSettings.model_validate({key: chosen}).on_the_way_back
        assert getattr(back, key) == expected


@pytest.mark.parametrize(
    ("unit", "words"),
    [("tunerd.service", "tunerd's own"), ("llama@.service", "such as llama@main.service")],
)
def test_a_unit_that_can_serve_nothing_is_refused(paths: Paths, unit: str, words: str) -> None:
    write(paths, f"[service]\nunit = '{unit}'\n")
    (line,) = problems(paths)
    assert "service.unit" in line
    assert words in line


@pytest.mark.parametrize(
    "variable", ["TUNERD_SERVICE__UINT", "TUNERD_MODLES__DIRS", "TUNERD_STATE_DRI", "TUNERD_X"]
)
def test_a_misspelt_variable_is_caught(paths: Paths, variable: str) -> None:
    (line,) = problems(paths, {variable: "x.service"})
    assert variable in line


def test_an_engine_may_be_named_in_the_environment(paths: Paths) -> None:
    environment = {"TUNERD_ENGINES__MINE__PATH": "/opt/llama-server"}
    settings = load_settings(paths, environment)
    assert settings.engines["mine"].path == Path("/opt/llama-server")
    assert sources_of(paths, environment)["engines"] == "TUNERD_ENGINES__MINE__PATH"
    (line,) = problems(paths, {**environment, "TUNERD_ENGINES__MINE__PTH": "/x"})
    assert line.startswith("TUNERD_ENGINES__MINE__PTH: engines.mine.pth")
    assert "`path`" in line


def test_a_home_is_written_with_a_tilde(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    write(paths, "[models]\ndirs = ['~/models']\n")
    assert load_settings(paths, {}).models.dirs == (Path("/home/somebody/models"),)
    write(paths, "[models]\ndirs = ['~nobody-of-this-name/models']\n")
    assert "home" in problems(paths)[0]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("unit", name) for name in ("a.service\nExecStart=x", "../x.service", "a b.service", "x.timer", "")),
        *(("user", name) for name in ("root\n", "Root", "a b", "-x", "%i", "")),
    ],
)  # fmt: skip
def test_a_name_that_is_no_unit_or_account_is_refused(paths: Paths, key: str, name: str) -> None:
    (line,) = problems(paths, {f"TUNERD_SERVICE__{key.upper()}": name})
    assert f"service.{key}" in line


@pytest.mark.parametrize(
    "text", ["[service\n", "\x00", "a = " + "9" * 5000, "a = " + "[" * 5000, "a = 1\na = 2"]
)
def test_a_file_that_is_no_toml_is_one_error(paths: Paths, text: str) -> None:
    write(paths, text)
    for call in (load_settings, sources_of):
        with pytest.raises(ConfigError) as caught:
            call(paths, {})
        assert str(paths.settings_file) in caught.value.message


@pytest.mark.parametrize(
    "text",
    ["service = 5", "engines = 5", "engines.a = 5", "models.dirs = 'x'", "backups.keep = -1"],
)
def test_a_value_of_the_wrong_kind_is_one_problem(paths: Paths, text: str) -> None:
    write(paths, text)
    (line,) = problems(paths)
    assert line.startswith(f"{paths.settings_file}: {text.partition(' ')[0]}")


# The settings file that install.sh writes: every line in it that can be uncommented is a default.

SHIPPED = Path(__file__).parents[2] / "units" / "tunerd.toml"


def test_the_shipped_settings_are_the_defaults(tmp_path: Path) -> None:
    paths = paths_for(Mode.SYSTEM, {"TUNERD_CONFIG_DIR": str(tmp_path)})
    defaults = load_settings(paths, {})

    text = SHIPPED.read_text()
    own = "".join(f"[{table}]\n" for table in re.findall(r"(?m)^#\[([a-z]+)\]$", text))
    assert own.count("[") >= 8, "and each may be begun anew below"
    for content in (text, re.sub(r"(?m)^#(?=\[|[a-z_]+ = )", "", text), text + own):
        paths.settings_file.write_text(content)
        assert load_settings(paths, {}) == defaults
    assert len(re.findall(r"(?m)^#[a-z_]+ = ", text)) >= 5
