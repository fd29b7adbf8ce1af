"""What is written for others is read back as the same words, and what it lacks is said."""

from __future__ import annotations

import configparser
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
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
from tests.support.transcripts import transcript
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
    flags = [("--model", "/m/a b.gguf"), ("--jinja",), ("--chat-template", "-x"), ("--lora-scaled", "/m/l", "0.5"),
             ("--seed", "-1"), ("--new",)]  # fmt: skip
    found = flags_of([word for words in flags for word in words], ORIGINS)
    assert [flag.words for flag in found] == flags
    origins = "model.path, set by x.toml", "extra_args, set by x.toml", None
    assert (found[0].origin, found[3].origin, found[5].origin) == origins


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


def bare(**changes: Any) -> list[Server]:
    return [server_of(**changes)]


FOLDERS = server_of(
    flags=tuple(Flag(words) for words in (
        ("--model", "/m/a:b $x/m.gguf"), ("--model-draft", "/hub/snapshots/1/d.gguf"),
        ("--slot-save-path", "/slots"), ("--chat-template-file", "/gone/t.jinja"),
    )),
    folders={
        "/m/a:b $x/m.gguf": ("/m/a:b $x", "m.gguf"),
        "/hub/snapshots/1/d.gguf": ("/hub", "snapshots/1/d.gguf"),
        "/slots": ("/slots", "."),
    },
    locks_memory=True,
)  # fmt: skip
SECRETS = server_of(
    flags=flags_of(["--api-key", "sk-1", "--hf_token", "sk-2", "--jinja", "--api-key", "-sk-1", "--api-key"], []),
    environment={
        "HF_TOKEN": "sk-3", "LLAMA_API_KEY": "sk-4", "HTTPS_PROXY": "http://me:sk-2@proxy:3128",
        "AWS_ACCESS_KEY_ID": "sk-5", "DB_PASSWD": "sk-6", "API_KEYS": "sk-7",
    },
)  # fmt: skip
TWICE = (Flag(("-ot", "a=CPU")), Flag(("--override-tensor", "b=CPU")))
INI, LLAMA_SWAP, COMPOSE, QUADLET = Target.MODELS_INI, Target.LLAMA_SWAP, Target.COMPOSE, Target.QUADLET  # fmt: skip
CONTAINERS = (COMPOSE, QUADLET)
TWO = [server_of(names=("designed", "a")), server_of(names=("designed", "b"))]
WRITTEN: dict[str, tuple[Sequence[Target], list[Server], dict[str, Any]]] = {
    "A file that is no text is refused": (tuple(Target), [server_of("/m/\udcff.gguf")], {}),
    "An empty word has no place in a quadlet": ([QUADLET], [server_of("a", "", "b")], {}),
    **{f"A preset cannot hold a value such as {word!r}": ([INI], [server_of(word)], {}) for word in [*LINES, *COMMENTED]},
    **{f"llama-swap cannot hold a value such as {word!r}": ([LLAMA_SWAP], [server_of(word)], {}) for word in LINES},
    **{f"A preset has no name such as {name!r}": ([INI], bare(names=("designed", name)), {}) for name in ("a;b", "a#b")},
    "A preset has each flag once": ([INI], bare(flags=TWICE), {}),
    "A preset has no model of the name of all": ([INI], bare(names=("*",)), {}),
    "Hostile remarks stay remarks": (
        tuple(Target),
        [replace(server_of(*(w for w in HOSTILE if w and w.strip() == w and "#" not in w)), title="a\nb: ${PORT}")], {}),
    "No secret is written and its loss is said": (tuple(Target), [SECRETS], {}),
    **{f"Containers publish addresses alone, {host}": (CONTAINERS, bare(host=host), {})
       for host in ("localhost", "::1", "/run/llama.sock", "fe80::1%eth0", "box.lan")},
    "A key file is named as a mount and never by its credential": (
        (INI, *CONTAINERS), bare(flags=(Flag(("--api-key-file", "/etc/keys/k")),), api_key_file="/etc/keys/k"), {}),
    "Model folders are mounted read-only and paths follow them": (CONTAINERS, [FOLDERS], {}),
    "No card is asked for where there is none": (CONTAINERS, bare(has_gpu=False), {}),
    "Somebody names the image": (CONTAINERS, bare(), {"image": "x/y:z"}),
    "Variables are carried where that is possible and named where not": (
        tuple(Target), bare(environment={"GGML_X": "a b", "lower": "1", "HOME": "/x", "M": "${PORT}"}), {}),
    **{f"Several models run together only where they are known to fit, {together}": (
        (INI, LLAMA_SWAP), TWO, {"together": together}) for together in (True, False, None)},
    "A container takes one server": (CONTAINERS, TWO, {}),
    "A router starts one program": (
        [INI], [server_of("x"), server_of("y", names=("b",), program=("/opt/ik/llama-server",))], {}),
    "A router has one address and one key": (
        [INI], [server_of("x"), server_of("y", names=("b",), host="::1", api_key_file="/etc/keys/k",
                                         flags=(Flag(("--ssl-key-file", "/k")),))], {}),
    # llama-swap never saw such a server ready, and a router got 404 for each request from a model with a prefix.
    "A router answers by TLS or below a prefix as its first server does, and llama-swap asks no such server": (
        [INI, LLAMA_SWAP], bare(flags=(Flag(("--ssl-key-file", "/k")), Flag(("--ssl-cert-file", "/c")),
                                       Flag(("--api-prefix", "/llm")))), {}),
}  # fmt: skip


def written(target: Target, servers: list[Server], options: dict[str, Any]) -> list[str]:
    try:
        made = emit(target, servers, **options)
    except UsageError as error:
        return [f"refused: {error.message}", f"cause: {error.cause}", f"hint: {error.hint}"]
    assert made == emit(target, servers, **options)
    return [made.text, *(f"lost: {line}" for line in made.lost)]


@pytest.mark.parametrize("target", Target)
def test_what_is_written_for_others_is_the_golden_text(target: Target) -> None:
    text = transcript(f"emitted/{target}", (
        (told, written(target, servers, options))
        for told, (targets, servers, options) in WRITTEN.items() if target in targets
    ))  # fmt: skip
    assert "sk-" not in text
