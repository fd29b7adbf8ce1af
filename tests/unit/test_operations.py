"""What may be asked for without root: closed words of a closed list of commands, whoever says them."""

from __future__ import annotations

import re
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunerd.errors import UsageError
from tunerd.operations import (
    MAY,
    Lane,
    WrongError,
    argv_of,
    asked,
    check_side,
    check_space,
    command_of,
    operation_of,
    plain_keys,
    schema_of,
    takes,
)
from tunerd.web.routes import BEGINS, READS, describe_api

# Keys that name a program, a file or an address.
DANGEROUS = (
    "engine.prefer", "extra_args", "environment.LD_PRELOAD", "model.path", "model.mmproj", "serving.host",
    "serving.api_key_file", "serving.slot_save_path", "serving.chat_template", "serving.chat_template_kwargs",
    "speculation.draft_model", "memory.override_tensor", "memory.device", "serving.alias", "engines.x.extra_args",
    "model.chat_template_file",
)  # fmt: skip
EVIL = (
    "apply ../../etc/shadow", "apply /etc/tunerd/profiles/x", "apply .hidden", "apply a\nb",
    "compare --profile a/b", "compare --workload=../../../etc/passwd", "workload learn --name ../x",
    *(f"apply x --set {key}=evil" for key in DANGEROUS),
    "apply x --set speculation.n_max=[1]", "apply x --set speculation.type=/bin/sh",
    "sweep run --space model.path=/etc/shadow", "sweep run --space engine=/home/alice/evil",
    "sweep run --space engine.prefer=ik,../evil", "sweep run --space extra_args=--x",
    "sweep run --space speculation.n_max", "sweep run --budget inf",
    "sweep start --window 01:00-06:30;rm", "compare /home/alice/evil", "compare ../x",
    "compare engine.prefer=evil", "compare serving.chat_template=x", "compare a b c d /bin/sh",
    "rollback --to /etc/shadow", "rollback --to ../llama-server.service.pre-x", "promote -- -1",
    "bench --url http://169.254.169.254/", "bench --suite all", "workload learn --unit sshd.service",
    "schedule set --timezone ../../etc/shadow", "schedule set --timezone /etc/shadow",
    "guard set service user", "jobs stop 1;reboot", "report --output /etc/cron.d/x", "report 1 -o x",
    "settings", "engines keep mainline", "profiles new x", "probation take-back 1",
    "notify send x", "daemon", "supervise", "job 1", "look status", "web", "model new /tmp/x",
    "--system status", "status --help", "--help", "", "status --version", "history 1", "top --once",
    "profiles check /etc/shadow", "engines --prove keep x", "completion bash",
)  # fmt: skip


@pytest.mark.parametrize("words", EVIL)
def test_nothing_that_names_a_file_a_program_or_free_text_passes(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError):
        asked(words.split(" "))
    assert capsys.readouterr().out == "", "what is only parsed prints nothing"


MAY_ASK = {
    "apply rtx-3090-ti-24gb --set speculation.n_max=2 --yes": ("apply", Lane.CHANGE),
    "apply x": ("apply", Lane.LOOK),
    "apply x --dry-run --yes": ("apply --dry-run", Lane.LOOK),
    "rollback --list": ("rollback --list", Lane.HERE),
    "rollback --yes --to 12": ("rollback", Lane.CHANGE),
    "compare live 14 --yes": ("compare", Lane.MEASURE),
    "compare speculation.n_max=2 rtx-3090-ti-24gb": ("compare", Lane.LOOK),
    "bench": ("bench", Lane.MEASURE),
    "bench x --suite deep": ("bench", Lane.LOOK),
    "sweep run --yes --space speculation.n_max=1,2,3 --space engine=mainline-0.7.0,ik": ("sweep run", Lane.MEASURE),
    "sweep run --space serving.load_mode=mmap+mlock --space serving.temp=0.7": ("sweep run", Lane.LOOK),
    "doctor": ("doctor", Lane.APART),
    "engines": ("engines", Lane.LOOK),
    "sweep stop": ("sweep stop", Lane.NOTE),
    "schedule set --window 01:00-06:30 --timezone Europe/Berlin --off": ("schedule set", Lane.NOTE),
    "jobs stop 3 --json": ("jobs stop", Lane.NOTE),
}  # fmt: skip


def test_what_a_member_may_ask_for_is_known_with_what_it_may_not_run_beside() -> None:
    found = {words: asked(words.split()) for words in MAY_ASK}
    assert {words: (one.kind, one.lane) for words, one in found.items()} == MAY_ASK


def test_root_is_not_held_to_what_members_may() -> None:
    words = ["sweep", "run", "--space", "engine=/opt/other/llama-server", "--yes"]
    assert asked(words, is_member=False).params["space"] == (words[3],)


def test_what_an_operator_may_set_names_no_program_file_or_address() -> None:
    assert {"speculation.n_max", "memory.fit_mib", "serving.cache_type_k"} <= plain_keys()
    assert plain_keys().isdisjoint(DANGEROUS)


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_leads_a_sweep_or_a_comparison_out_of_the_plain_keys(key: str, value: str) -> None:
    for check, text in ((check_space, f"{key}={value}"), (check_side, f"{key}={value}")):
        try:
            check(text)
        except UsageError:
            continue
        name = text.partition("=")[0]
        assert name in plain_keys() | {"engine", "engine.prefer", "speculation"}
        assert "/" not in text
        assert text.isprintable()


@given(st.sampled_from(sorted(MAY)), st.text(max_size=30), st.text(max_size=200))
def test_no_text_gets_through_that_its_schema_does_not_allow(
    kind: str, other: str, text: str
) -> None:
    for name, param in takes(kind).items():
        schema = schema_of(param)
        item = schema.get("items", schema)
        given_value: Any = [text] if "items" in schema else text
        try:
            words = argv_of(kind, {name: given_value})
        except WrongError:
            continue
        assert any(word.endswith(text) for word in words)
        assert text in item.get("enum", [text])
        assert re.fullmatch(item.get("pattern", ".*"), text)
    with pytest.raises(WrongError):
        argv_of(kind, {f"{other} ": True})


@pytest.mark.parametrize("kind", MAY)
def test_every_operation_takes_closed_values_alone_and_has_what_it_names(kind: str) -> None:
    found = operation_of(command_of(kind))
    for name in (found.render, found.preview, found.show):
        assert name is None or callable(found.named(name))
    for name, param in takes(kind).items():
        schema = schema_of(param)
        item = schema.get("items", schema)
        closed = {"integer": "maximum", "number": "maximum", "string": "pattern"}.get(item["type"])
        assert closed is None or closed in item or "enum" in item, name
    assert kind in {*READS.values(), *BEGINS.values()}, "the API has it"


def test_values_become_the_words_that_are_typed() -> None:
    body = {"sides": ["live", "14"], "set": ["speculation.n_max=2"], "budget": "20m", "pairs": 5,
            "start_after": True}  # fmt: skip
    argv = argv_of("compare", body)
    words = (
        "compare --yes --set=speculation.n_max=2 --budget=20m --pairs=5 --start-after -- live 14"
    )
    assert argv == words.split()
    assert asked(argv).params["budget"] == 1200.0
    assert "--yes" not in argv_of("compare", {"ask": True})
    form = {"profile": "x", "probation": "false", "now": "true"}
    words = "apply --yes --now --no-probation -- x"
    assert argv_of("apply", form, is_text=True) == words.split()
    for wrong in ({"ask": "true"}, {"ask": None}, {"pairs": "5"}, {"pairs": True}, {"pairs": 10**9}, {"yes": True},
                  {"sides": "live"}, {"sides": ["a"] * 65}, {"url": "x"}, {"as_json": True}):  # fmt: skip
        with pytest.raises(WrongError):
            argv_of("compare", wrong)


def test_the_description_has_every_path() -> None:
    paths = describe_api()["paths"]
    assert {*READS, *BEGINS} <= set(paths)
    body = paths["/api/apply"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["required"] == ["profile"]


def test_what_is_no_number_is_refused_wherever_a_number_is_asked_for() -> None:
    for words in ("compare --tolerance", "sweep run --at-least", "top --every"):
        command = command_of(words.partition(" --")[0])
        for number in ("nan", "-nan", "inf", "-inf", "1e999"):
            with pytest.raises(click.BadParameter):
                command.make_context("x", [*words.split()[-1:], number], help_option_names=[])
