"""The unit's text holds what the spec says, and no value adds a line to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders import ROOT, capabilities_of
from tests.support.profiles import HOSTILE, PROFILE_DATA, context, profile_of
from tunerd.engine.commandline import CommandLine, render
from tunerd.errors import ConfigError
from tunerd.production.checks import lost_lines
from tunerd.units.live import read_live
from tunerd.units.text import (
    CREDENTIAL_PATH,
    UnitFile,
    UnitSpec,
    environment_of,
    is_foreign,
    is_ours,
    parse_exec,
    parse_unit,
    render_unit,
)
from tunerd.words import Mode

TEMPLATE = (ROOT / "units" / "llama-server.service.in").read_text()
SPECIFIERS = {"S": "/var/lib", "C": "/var/cache", "d": "/run/credentials/x", "h": "/root"}
PLAIN = UnitSpec(
    unit="llama-server.service",
    mode=Mode.SYSTEM,
    profile="rtx",
    engine="mainline-0.7.0",
    argv=("/usr/bin/llama-server", "--model", "/m.gguf", "--port", "8080"),
    environment={"CUDA_VISIBLE_DEVICES": "0"},
    user="llama",
    group="llama",
    wants_mlock=True,
    wanted_by="multi-user.target",
)


def unit_of(spec: UnitSpec) -> UnitFile:
    parsed = parse_unit(render_unit(TEMPLATE, spec))
    assert parsed.problems == ()
    return parsed


def names(spec: UnitSpec) -> list[str]:
    return [f"{directive.section}.{directive.name}" for directive in unit_of(spec).directives]


def argv_of(spec: UnitSpec) -> tuple[str, ...]:
    (command,) = unit_of(spec).values("Service", "ExecStart")
    return parse_exec(command.value, {}, SPECIFIERS).argv


def value(spec: UnitSpec, name: str, section: str = "Service") -> str | None:
    return unit_of(spec).value(section, name)


def environment(spec: UnitSpec) -> dict[str, str]:
    return dict(environment_of(unit_of(spec), SPECIFIERS).pairs)


def test_the_program_gets_exactly_its_arguments() -> None:
    assert argv_of(PLAIN) == PLAIN.argv
    text = render_unit(TEMPLATE, PLAIN)
    assert "ExecStart=/usr/bin/llama-server \\\n    --model /m.gguf \\\n    --port 8080\n" in text


def test_a_percent_sign_in_the_description_is_one() -> None:
    spec = replace(PLAIN, profile="50%n faster")
    assert value(spec, "Description", "Unit") == "llama-server, profile 50%%n faster"


def test_no_place_of_the_template_is_left_open() -> None:
    for mode in Mode:
        text = render_unit(TEMPLATE, replace(PLAIN, mode=mode))
        assert "#@" not in text
        assert not [word for word in text.split() if word.startswith("@") and word.endswith("@")]
        assert "\n\n\n" not in text


def test_the_system_unit_is_hardened_and_the_users_is_not() -> None:
    assert value(PLAIN, "ProtectSystem") == "strict"
    assert value(PLAIN, "User") == "llama"
    mine = replace(PLAIN, mode=Mode.USER)
    assert value(mine, "ProtectSystem") is None
    assert value(mine, "User") is None
    assert value(mine, "Group") is None
    assert value(mine, "NoNewPrivileges") == "yes"


def test_memory_may_be_locked_only_where_it_is_asked_for() -> None:
    assert value(PLAIN, "LimitMEMLOCK") == "infinity"
    assert value(replace(PLAIN, wants_mlock=False), "LimitMEMLOCK") is None


def test_homes_are_hidden_unless_something_is_served_from_one() -> None:
    assert value(PLAIN, "ProtectHome") == "yes"
    assert value(replace(PLAIN, needs_home=True), "ProtectHome") == "read-only"


def test_what_cuda_needs_is_not_taken_away() -> None:
    for name in (
        "PrivateDevices",
        "DevicePolicy",
        "ProcSubset",
        "LimitAS",
        "MemoryDenyWriteExecute",
    ):
        assert value(PLAIN, name) is None, name


def test_the_environment_of_the_profile_wins_over_that_of_the_template() -> None:
    assert environment(PLAIN)["HOME"] == "/var/lib/llama-server"
    mine = replace(PLAIN, environment={"HOME": "/mine", "LLAMA_CACHE": "/c"})
    assert environment(mine) == {
        "GGML_NO_BACKTRACE": "1",
        "HOME": "/mine",
        "LLAMA_CACHE": "/c",
    }


@pytest.mark.parametrize("mode", Mode)
def test_no_crash_waits_for_a_backtrace_unless_the_profile_wants_one(mode: Mode) -> None:
    assert environment(replace(PLAIN, mode=mode))["GGML_NO_BACKTRACE"] == "1"
    wanted = replace(PLAIN, mode=mode, environment={"GGML_NO_BACKTRACE": "0"})
    assert environment(wanted)["GGML_NO_BACKTRACE"] == "0"


def test_a_secret_is_a_credential_and_not_in_the_unit() -> None:
    argv = (*PLAIN.argv, "--api-key-file", CREDENTIAL_PATH)
    spec = replace(PLAIN, argv=argv, api_key_file="/etc/tunerd/api-key")
    assert value(spec, "LoadCredential") == "api-key:/etc/tunerd/api-key"
    assert argv_of(spec)[-1] == "/run/credentials/x/api-key"


@pytest.mark.parametrize("path", ["/a:b", "keys", "/a\nb", "/a ", "/a\\", "/a\x00"])
def test_a_credential_that_systemd_would_read_otherwise_is_refused(path: str) -> None:
    with pytest.raises(ConfigError):
        render_unit(TEMPLATE, replace(PLAIN, api_key_file=path))


@pytest.mark.parametrize(
    "change",
    [
        {"user": "a\nExecStartPre=/bin/evil"},
        {"group": "a\\"},
        {"environment": {"A\nB": "x"}},
        {"environment": {"A": "x\x00"}},
        {"environment": {"A B": "x"}},
        {"argv": ("llama-server",)},
        {"argv": ("/usr/bin/llama\nserver",)},
        {"argv": ("/usr/bin/x", "a\x00b")},
        {"argv": ("/usr/bin/x", "\udcff")},
        {"argv": ("/usr/bin/x", *["y" * 100_000] * 11)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_no_unit_can_hold_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        render_unit(TEMPLATE, replace(PLAIN, **change))


def test_our_own_units_are_known_and_hold_nothing_foreign() -> None:
    text = render_unit(TEMPLATE, PLAIN)
    assert is_ours(text)
    assert not is_ours("# by hand\n" + text)
    live = read_live(
        unit=PLAIN.unit, path=None, text=text, drop_ins=(), file_environment={},
        specifiers=SPECIFIERS,
    )  # fmt: skip
    assert (live.argv, live.problem) == (PLAIN.argv, None)
    assert lost_lines(live, "", ()) == ()


def test_a_hand_written_copy_of_our_unit_loses_nothing() -> None:
    text = render_unit(TEMPLATE, PLAIN)
    copy = read_live(
        unit=PLAIN.unit, path=None, text="# by hand\n" + text, drop_ins=(), file_environment={},
        specifiers=SPECIFIERS,
    )  # fmt: skip
    assert lost_lines(copy, text, PLAIN.argv) == ()
    assert "UMask=0077" in lost_lines(copy, text.replace("UMask=0077\n", ""), PLAIN.argv)


WORDS = st.lists(HOSTILE, min_size=1, max_size=6).map("".join)
# Anything that systemd takes for UTF-8, control characters included.
CONTROL = st.text(
    st.characters(codec="utf-8", exclude_characters="\0").filter(lambda char: not is_foreign(char)),
    max_size=8,
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.one_of(WORDS, CONTROL), max_size=6),
    st.dictionaries(st.sampled_from(["A", "HOME", "LLAMA_CACHE"]), WORDS, max_size=3),
    WORDS,
    WORDS,
    st.sampled_from(list(Mode)),
)
def test_no_value_adds_a_line_or_changes_another(
    words: list[str], variables: dict[str, str], profile: str, engine: str, mode: Mode
) -> None:
    plain = replace(PLAIN, mode=mode, environment=dict.fromkeys(variables, "x"))
    argv = ("/usr/bin/llama-server", *words)
    spec = replace(plain, argv=argv, environment=variables, profile=profile, engine=engine)
    assert names(spec) == names(plain)
    assert argv_of(spec) == argv
    found = environment(spec)
    assert {name: found[name] for name in variables} == variables
    changing = {"ExecStart", "Environment", "Description"}
    for found_one, plain_one in zip(
        unit_of(spec).directives, unit_of(plain).directives, strict=True
    ):
        assert found_one.name in changing or found_one.value == plain_one.value
    assert is_ours(render_unit(TEMPLATE, spec))


@settings(max_examples=80, deadline=None)
@given(PROFILE_DATA, st.sampled_from(["main-0x", "ik-now", "bee-01"]))
def test_no_profile_adds_a_line_to_the_unit(data: dict[str, Any], dialect: str) -> None:
    command = render(profile_of(data), capabilities_of(dialect), context(has_gpu=True))
    if not isinstance(command, CommandLine):
        return
    spec = replace(PLAIN, argv=command.argv)
    assert names(spec) == names(PLAIN)
    assert argv_of(spec) == command.argv
    assert render_unit(TEMPLATE, spec) == render_unit(TEMPLATE, spec)
