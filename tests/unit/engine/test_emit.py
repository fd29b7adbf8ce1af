"""What is written for others is read back as the same words, and what it lacks is said."""

from __future__ import annotations

import configparser
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.emitted import (
    COMMENTED,
    HOSTILE,
    LINES,
    PROGRAM,
    any_words,
    compose_words,
    same,
    server_of,
    swap_words,
    words,
    words_of,
)
from tunerd.engine.emit import Flag, Server, Target, emit, flags_of
from tunerd.errors import UsageError
from tunerd.units.text import parse_exec, parse_unit

PORT_AND_HOST = ["--host", "0.0.0.0", "--port", "8080"]  # noqa: S104 -- of the container
ORIGINS = [
    ("--model /m/a b.gguf", "model.path", "x.toml"),
    ("--jinja", "serving.jinja", "tunerd"),
    ("--chat-template -x", "serving.chat_template", "--set"),
    ("--lora-scaled", "extra_args", "x.toml"),
    ("/m/l", "extra_args", "x.toml"),
    ("0.5", "extra_args", "x.toml"),
]


def test_flags_are_told_from_values_by_who_set_them() -> None:
    argv = ["--model", "/m/a b.gguf", "--jinja", "--chat-template", "-x", "--lora-scaled", "/m/l", "0.5",
            "--seed", "-1", "--new"]  # fmt: skip
    found = flags_of(argv, ORIGINS)
    assert [flag.words for flag in found] == [
        ("--model", "/m/a b.gguf"), ("--jinja",), ("--chat-template", "-x"), ("--lora-scaled", "/m/l", "0.5"),
        ("--seed", "-1"), ("--new",),
    ]  # fmt: skip
    assert found[0].origin == "model.path, set by x.toml"
    assert found[3].origin == "extra_args, set by x.toml"
    assert found[5].origin is None


@given(st.lists(words, max_size=4))
def test_llama_swap_runs_the_same_words(values: list[str]) -> None:
    server = server_of(*values)
    argv = [PROGRAM, *words_of(server), "--host", "127.0.0.1", "--port", "5800"]
    assert same(swap_words(emit(Target.LLAMA_SWAP, [server]).text), argv)


@given(st.lists(any_words, max_size=4))
def test_compose_runs_the_same_words(values: list[str]) -> None:
    server = server_of(*values)
    assert same(compose_words(emit(Target.COMPOSE, [server]).text), [*words_of(server), *PORT_AND_HOST])  # fmt: skip


@given(st.lists(any_words.filter(bool), max_size=4))
def test_a_quadlet_runs_the_same_words(values: list[str]) -> None:
    server = server_of(*values)
    unit = parse_unit(emit(Target.QUADLET, [server]).text)
    assert not unit.problems
    line = unit.value("Container", "Exec")
    assert same(parse_exec(f"/x {line}", {}, {}).argv[1:], [*words_of(server), *PORT_AND_HOST])


@given(
    st.lists(words.filter(lambda word: not any(c in word for c in ";#") and word == word.strip()))
)
def test_a_preset_holds_the_same_values(values: list[str]) -> None:
    server = server_of(*values)
    text = emit(Target.MODELS_INI, [server]).text
    read = configparser.RawConfigParser(
        delimiters=("=",), comment_prefixes=("#",), empty_lines_in_values=False
    )
    read.read_string(text.replace("version = 1", ""))
    assert dict(read["designed"]) == {**{f"flag-{n}": one for n, one in enumerate(values)}, "alias": "profile-x"}  # fmt: skip


TWICE = (Flag(("-ot", "a=CPU")), Flag(("--override-tensor", "b=CPU")))


@pytest.mark.parametrize(
    ("target", "server"),
    [
        *((target, server_of("/m/\udcff.gguf")) for target in Target),
        (Target.QUADLET, server_of("a", "", "b")),
        *((Target.MODELS_INI, server_of(word)) for word in [*LINES, *COMMENTED]),
        *((Target.LLAMA_SWAP, server_of(word)) for word in LINES),
        *((Target.MODELS_INI, server_of(names=("designed", name))) for name in ("a;b", "a#b")),
        (Target.MODELS_INI, server_of(flags=TWICE)),
        (Target.MODELS_INI, server_of(names=("*",))),
    ],
)
def test_what_a_target_cannot_hold_is_refused(target: Target, server: Server) -> None:
    with pytest.raises(UsageError, match=f"{target} cannot hold"):
        emit(target, [server])


@pytest.mark.parametrize("target", Target)
def test_the_same_server_gives_the_same_bytes_and_hostile_remarks_stay_remarks(
    target: Target,
) -> None:
    server = replace(server_of(*(w for w in HOSTILE if w and w.strip() == w and "#" not in w)), title="a\nb: ${PORT}")  # fmt: skip
    text = emit(target, [server]).text
    assert text == emit(target, [server]).text
    assert "# a?b: $ {PORT}\n" in text
    assert "key.0, set by who?/srv/models/a b.gguf" in text


@pytest.mark.parametrize("target", Target)
def test_no_secret_is_written_and_its_loss_is_said(target: Target) -> None:
    line = "--api-key sk-1 --hf_token sk-2 --jinja --api-key -sk-1 --api-key"
    environment = {
        "HF_TOKEN": "sk-3", "LLAMA_API_KEY": "sk-4", "HTTPS_PROXY": "http://me:sk-2@proxy:3128",
        "AWS_ACCESS_KEY_ID": "sk-5", "DB_PASSWD": "sk-6", "API_KEYS": "sk-7",
    }  # fmt: skip
    server = server_of(flags=flags_of(line.split(), []), environment=environment)
    made = emit(target, [server])
    assert "sk-" not in made.text + str(made.lost)
    assert any("key or token" in line for line in made.lost)
    assert "jinja" in made.text
    assert sum("may hold a secret" in line for line in made.lost) == 6
    assert all(f"# not carried over: {line}" in made.text for line in made.lost)


@pytest.mark.parametrize("target", [Target.COMPOSE, Target.QUADLET])
def test_containers_publish_addresses_alone(target: Target) -> None:
    assert "127.0.0.1:8080:8080" in emit(target, [server_of(host="localhost")]).text
    assert "[::1]:8080:8080" in emit(target, [server_of(host="::1")]).text
    for host in ("/run/llama.sock", "fe80::1%eth0", "box.lan"):
        with pytest.raises(UsageError, match="cannot listen on"):
            emit(target, [server_of(host=host)])


def test_a_key_file_is_named_as_a_mount_and_never_by_its_credential() -> None:
    flags = (Flag(("--api-key-file", "/etc/keys/k")),)
    server = server_of(flags=flags, api_key_file="/etc/keys/k")
    service = yaml.safe_load(emit(Target.COMPOSE, [server]).text)["services"]["designed"]
    assert service["command"][:2] == ["--api-key-file", "/run/secrets/api-key"]
    assert service["volumes"] == [
        {"type": "bind", "source": "/etc/keys/k", "target": "/run/secrets/api-key", "read_only": True}
    ]  # fmt: skip
    assert "Volume=/etc/keys/k:/run/secrets/api-key:ro\n" in emit(Target.QUADLET, [server]).text
    ini = emit(Target.MODELS_INI, [server]).text
    assert "--api-key-file /etc/keys/k --models-preset" in ini
    assert "api-key-file =" not in ini


def test_model_folders_are_mounted_read_only_and_paths_follow_them() -> None:
    flags = (
        Flag(("--model", "/m/a:b $x/m.gguf")),
        Flag(("--model-draft", "/hub/snapshots/1/d.gguf")),
        Flag(("--slot-save-path", "/slots")),
        Flag(("--chat-template-file", "/gone/t.jinja")),
    )
    folders = {
        "/m/a:b $x/m.gguf": ("/m/a:b $x", "m.gguf"),
        "/hub/snapshots/1/d.gguf": ("/hub", "snapshots/1/d.gguf"),
        "/slots": ("/slots", "."),
    }
    server = server_of(flags=flags, folders=folders, locks_memory=True)
    made = emit(Target.COMPOSE, [server])
    service = yaml.safe_load(made.text)["services"]["designed"]
    assert service["command"][1:8:2] == ["/mnt/0/m.gguf", "/mnt/1/snapshots/1/d.gguf", "/mnt/2", "/gone/t.jinja"]  # fmt: skip
    assert [(one["source"], one["target"], one["read_only"]) for one in service["volumes"]] == [
        ("/m/a:b $$x", "/mnt/0", True), ("/hub", "/mnt/1", True), ("/slots", "/mnt/2", False),
    ]  # fmt: skip
    assert service["ulimits"] == {"memlock": -1}
    assert any("/gone/t.jinja" in line for line in made.lost)
    with pytest.raises(UsageError, match="quadlet cannot hold"):
        emit(Target.QUADLET, [server])


def test_cards_are_asked_for_only_where_there_are_some() -> None:
    with_card, without = server_of(), server_of(has_gpu=False)
    assert "capabilities: [gpu]" in emit(Target.COMPOSE, [with_card]).text
    assert "AddDevice=nvidia.com/gpu=all" in emit(Target.QUADLET, [with_card]).text
    text = emit(Target.COMPOSE, [without]).text
    assert "gpu]" not in text
    assert 'llama.cpp:server"' in text
    assert 'image: "x/y:z"' in emit(Target.COMPOSE, [with_card], image="x/y:z").text


def test_variables_are_carried_where_that_is_possible_and_named_where_not() -> None:
    server = server_of(environment={"GGML_X": "a b", "lower": "1", "HOME": "/x", "M": "${PORT}"})
    made = emit(Target.LLAMA_SWAP, [server])
    assert yaml.safe_load(made.text)["models"]["designed"]["env"] == ["GGML_X=a b"]
    assert {line.partition(":")[0].split()[-1] for line in made.lost if "variable" in line} == {"lower", "HOME", "M"}  # fmt: skip
    ini = emit(Target.MODELS_INI, [server])
    assert sum("variable" in line for line in ini.lost) == 4
    compose = yaml.safe_load(emit(Target.COMPOSE, [server]).text)["services"]["designed"]
    assert compose["environment"] == {"GGML_X": "a b", "lower": "1", "M": "$${PORT}"}


@pytest.mark.parametrize(("together", "swap", "most"), [(True, False, 2), (False, True, 1), (None, True, 1)])  # fmt: skip
def test_several_models_run_together_only_where_they_are_known_to_fit(
    together: bool | None, swap: bool, most: int
) -> None:
    servers = [server_of(names=("designed", "a")), server_of(names=("designed", "b"))]
    found = yaml.safe_load(emit(Target.LLAMA_SWAP, servers, together=together).text)
    assert list(found["models"]) == ["a", "b"], "a name that both have belongs to neither"
    assert found["groups"] == {"tunerd": {"swap": swap, "members": ["a", "b"]}}
    ini = emit(Target.MODELS_INI, servers, together=together).text
    assert f"--models-max {most}\n" in ini
    assert "\n[a]\n" in ini
    assert "\n[b]\n" in ini
    with pytest.raises(UsageError, match="compose takes one server, not 2"):
        emit(Target.COMPOSE, servers)
