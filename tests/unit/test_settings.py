"""tunerd's settings: every mistake at once, each with where it stands and the nearest name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.transcripts import inputs_of, transcript
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


def kept(paths: Paths, good: Settings, **changes: dict[str, object]) -> None:
    """A file that nobody can read, and what was last read of it, with tables that this version may not allow."""
    write(paths, "nonsense = [")
    tables = json.loads(good.model_dump_json())
    for table, values in changes.items():
        tables[table] |= values
    paths.last_settings.parent.mkdir(parents=True, exist_ok=True)
    paths.last_settings.write_text(json.dumps(tables))


def test_a_settings_file_that_is_no_plain_file_is_refused_and_keeps_nobody_waiting(
    paths: Paths,
) -> None:
    """Every command waited for whoever would write into a pipe of this name."""
    os.mkfifo(paths.settings_file)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_settings(paths, {})


def test_settings_behind_a_link_that_leads_nowhere_are_not_the_defaults(paths: Paths) -> None:
    """The disk with them was not mounted: the daemon went by the defaults, of another unit."""
    paths.settings_file.symlink_to("/nowhere/tunerd.toml")
    with pytest.raises(ConfigError, match=r"a link to `/nowhere/tunerd\.toml`, which is not there"):
        load_settings(paths, {})


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


def test_a_shared_store_has_an_address_and_a_box_whatever_account_a_directory_gives_out(
    paths: Paths,
) -> None:
    for url in (
        f"{ADDRESS}tunerd@db.lan:5432/tunerd?passfile=/etc/tunerd/pgpass&sslmode=verify-full",
        f"{ADDRESS}tunerd@/tunerd?host=/run/postgresql",
        f"{ADDRESS}/?service=tunerd",
    ):
        write(paths, f"[store]\nurl = '{url}'\n")
        assert load_settings(paths, {}).store.url == url
    boxes = ("gpu1", "john.doe@gpu1.lan", "Alice@10.0.0.7", "_svc-x@fe80::7")
    write(paths, f"fleet.boxes = {list(boxes)}\n")
    assert load_settings(paths, {}).fleet.boxes == boxes


def test_what_is_said_of_wrong_settings_is_the_golden_text(paths: Paths) -> None:
    cases: list[tuple[str, list[str]]] = []
    for heading, lines in inputs_of("errors/settings"):
        told = []
        for asked in (json.loads(line, strict=False) for line in lines):
            write(paths, asked.get("FILE", ""))
            found = problems(paths, {name: asked[name] for name in asked if name != "FILE"})
            assert "hush" not in str(found), "a password in an address, wherever it stands"
            said = "\n".join(found).replace(str(paths.settings_file), "FILE")
            # which are Python's own words
            said = re.sub("allowed: Port .*", "allowed: ...", said)
            told += [json.dumps(asked), *(f"    {one}" for one in said.split("\n"))]
        cases.append((heading, told))
    assert sum(len(told) for _, told in cases) > 100
    transcript("errors/settings", cases)


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
    assert "guards.hang" in (problem or "")
    assert "the defaults apply" in (problem or "")
    assert settings.guards.hang == settings.guards.oom == "advise"

    paths.last_settings.parent.mkdir(parents=True, exist_ok=True)
    for broken in (b"", b"\xff", b"[]", b'{"guards": {"hang": "never"}}', b"[" * 100_000):
        paths.last_settings.write_bytes(broken)
        assert settings_or_last_good(paths, {})[0] == settings
    good = Settings(guards=GuardSettings(hang="off"), models=ModelSettings(dirs=(Path("/m"),)))
    kept(paths, good)
    settings, problem = settings_or_last_good(paths, {"TUNERD_BACKUPS__KEEP": "3"})
    assert settings == good, "nothing is mixed"
    assert "the previous settings apply" in (problem or "")

    write(paths, "")
    assert settings_or_last_good(paths, {}) == (Settings(), None)


def test_kept_settings_hold_as_far_as_this_version_allows_them_and_the_rest_is_named(
    paths: Paths,
) -> None:
    """A limit below a bound that came later made all of them count as unreadable."""
    kept(
        paths, Settings(guards=GuardSettings(hang="off", oom="off")),
        service={"unit": "mine.service", "start_limit_s": 1.0, "gone": 2},
        models={"dirs": ["/m", "not whole", "nor this"]},
        engines={"a": {"path": "not whole"}, "b": {"path": "/b"}}, guards={"oom": "sometimes"},
    )  # fmt: skip

    settings, problem = settings_or_last_good(paths, {})

    assert settings.service == ServiceSettings(unit="mine.service")
    assert (settings.guards.hang, settings.guards.oom) == ("off", "advise")
    assert (settings.models.dirs, list(settings.engines)) == ((), ["b"])
    assert (problem or "").endswith(
        "the previous settings apply (except engines.a.path, guards.oom, models.dirs, service.gone, "
        "service.start_limit_s, engines.a: those values are not allowed)"
    )


def test_what_cannot_be_as_kept_gives_nothing_that_acts_by_itself_more_power(paths: Paths) -> None:
    """A limit's default in the place of somebody's own would restart what they let run."""
    rows: list[tuple[str, str, object, tuple[str, bool]]] = [
        ("daemon", "every_s", -1, ("act", True)),
        ("guards", "hang_restarts_per_hour", -1, ("advise", True)),
        ("service", "unit", "my llama.service", ("advise", False)),
        ("probation", "enabled", "never", ("act", False)),
    ]
    for table, key, value, power in rows:
        kept(paths, Settings(guards=GuardSettings(hang="act")), **{table: {key: value}})
        settings, problem = settings_or_last_good(paths, {})
        assert f"{table}.{key}" in (problem or "")
        assert (settings.guards.hang, settings.probation.enabled) == power


def test_a_way_back_has_the_defaults_where_a_limit_is_lower() -> None:
    for key in ("start_limit_s", "stall_s", "generation_limit_s"):
        default = getattr(ServiceSettings(), key)
        for chosen, expected in ((10.0, default), (2 * default, 2 * default)):
            back = ServiceSettings.model_validate({key: chosen}).on_the_way_back
            assert getattr(back, key) == expected


def test_an_engine_may_be_named_in_the_environment(paths: Paths) -> None:
    environment = {"TUNERD_ENGINES__MINE__PATH": "/opt/llama-server"}
    settings = load_settings(paths, environment)
    assert settings.engines["mine"].path == Path("/opt/llama-server")
    assert sources_of(paths, environment)["engines"] == "TUNERD_ENGINES__MINE__PATH"


def test_a_home_is_written_with_a_tilde(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    write(paths, "[models]\ndirs = ['~/models']\n")
    assert load_settings(paths, {}).models.dirs == (Path("/home/somebody/models"),)
    write(paths, "[models]\ndirs = ['~nobody-of-this-name/models']\n")
    assert "home" in problems(paths)[0]


def test_a_file_that_is_no_toml_is_one_error(paths: Paths) -> None:
    for text in ("[service\n", "\x00", "a = " + "9" * 5000, "a = " + "[" * 5000, "a = 1\na = 2"):
        write(paths, text)
        for call in (load_settings, sources_of):
            with pytest.raises(ConfigError) as caught:
                call(paths, {})
            assert str(paths.settings_file) in caught.value.message


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
