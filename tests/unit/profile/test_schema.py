"""Every mistake of a profile file is found at once, with its key and the nearest valid name."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders import PROFILES, shipped_sources
from tests.support.transcripts import transcript
from tunerd.profile.schema import (
    ProfileFile,
    Range,
    Serving,
    check_file,
    is_left_to_engine,
    values_of,
)


@pytest.mark.parametrize("name", shipped_sources().names)
def test_a_shipped_profile_has_no_mistake(name: str) -> None:
    assert check_file(name, tomllib.loads((PROFILES / f"{name}.toml").read_text())) == ()


ALL_AT_ONCE = """
descripton = "x"
extra_args = ["--good", 5]
serving = { prot = 8080, port = 70000, threads = "all" }
speculation = { type = "mpt", n_mxa = 3, p_min = 2.0 }
engines.ik.memory.fit_mb = 1664
environment = { "A B" = "x", C = 1 }
sweep = { "speculation.nmax" = [1, 2], "serving.threads" = { mn = 1 } }
pin = { "serving.aliass" = "x", "serving.port" = 0, nonsense = 1 }
"""
# What a file may have wrong, one line of TOML each, under what is to be seen of it.
MISTAKES = {
    "A misspelt name comes with the nearest one": (
        "descripton = 'x'", "servin.port = 1", "serving.prot = 1", "serving.fit_mib = 1", "speculation.type = 'mpt'",
        "serving.load_mode = 'mlok'", "engines.ik.servin.port = 1", "engines.ik.serving.prot = 1",
        "sweep.'speculation.nmax' = [1]", "sweep.'speculation.n_max' = { mn = 1 }", "pin.'serving.prt' = 1",
        "pin.'servin.port' = 1", "pin.servin.port = 1", "'memory.fit_mb' = 1",
    ),
    "A text with control characters is refused": [
        f"{key} = {text}"
        for key in ("serving.alias", "model.path", "serving.chat_template")
        for text in ('"a\\nb"', '"a\\u0000b"', '"a\\u007fb"', '"a\\tb"', '""')
    ] + ["environment.X = 5", 'engines.ik.environment.X = "a\\u0000"'],
    "A value of the wrong kind is one problem": (
        "serving = 5", "serving = 'default'", "engines = 5", "pin = 5", "sweep = 5", "extra_args = '-x'",
        "engines.ik = 5", "pin.serving = 5", "environment = 5", "extends = ['a']", "engine.prefer = 'ik'",
        "engine.prefer = []", "memory.override_tensor = 'a=b'",
    ),
    "What is no number is a mistake wherever a number stands": [
        table.replace("N", number)
        for table in ("speculation.p_min = N", "sweep.'speculation.p_min' = [N]", "serving.temp = N",
                      "sweep.'speculation.p_min' = { min = 0.0, max = N }", "engines.ik.speculation.p_min = N",
                      "published.by_engine.ik.tok_s = N")
        for number in ("nan", "inf", "-inf")
    ],
    "A range whose values its key cannot have is a mistake of its file": [
        f"sweep.{line}"
        for line in ("'speculation.n_max' = { min = 4, max = 1 }", "'speculation.n_max' = []", "'speculation.n_max' = [2, 99]",
                     "'serving.reasoning_budget' = { min = 0, max = 64, step = 0 }", "'speculation.type' = ['mpt']",
                     "'serving.threads' = { min = 0, max = 4 }")
    ],
}  # fmt: skip


def test_what_is_said_of_mistakes_is_the_golden_text() -> None:
    texts = {f"{told}, {line}": line for told, lines in MISTAKES.items() for line in lines}
    texts["All mistakes of a file are reported at once"] = ALL_AT_ONCE
    found = {told: check_file("f.toml", tomllib.loads(text)) for told, text in texts.items()}
    assert {told for told, problems in found.items() if len(problems) != 1} == {
        "All mistakes of a file are reported at once"
    }
    transcript("errors/profile", ((told, map(str, problems)) for told, problems in found.items()))


def test_a_key_may_be_left_to_the_engine_in_every_table() -> None:
    text = """
    [serving]
    port = "default"
    [engines.ik.memory]
    fit_mib = "default"
    [pin]
    "speculation.n_max" = "default"
    """
    assert check_file("f", tomllib.loads(text)) == ()
    assert not is_left_to_engine("environment.X", "default")


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.dates(),
        st.sampled_from(["default", "physical", "mtp", "on"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([*ProfileFile.model_fields, *Serving.model_fields, "ik", "x.y"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*ProfileFile.model_fields, "sevring"]), VALUES, max_size=5))
def test_no_file_is_too_odd_to_check(data: dict[str, Any]) -> None:
    for problem in check_file("f", data):
        assert problem.key
        assert problem.allowed
        assert "\n" not in problem.found


@pytest.mark.parametrize(
    ("key", "told", "values"),
    [
        ("speculation.n_max", Range(min=1, max=4), (1, 2, 3, 4)),
        ("serving.n_ubatch", Range(min=256, max=2048), (256, 512, 1024, 2048)),
        ("memory.fit_mib", Range(min=0, max=128), (0, 64, 128)),
        ("speculation.p_min", Range(min=0.7, max=0.8), (0.7, 0.75, 0.8)),
        ("serving.threads", Range(values=(2, 1, 2)), (2, 1)),
    ],
)
def test_a_range_is_a_list_of_values(key: str, told: Range, values: tuple[Any, ...]) -> None:
    assert values_of(key, told) == values


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("serving.reasoning_budget", Range(min=0, max=4096)),
        ("speculation.n_max", Range(min=4, max=1)),
        ("speculation.n_max", Range(values=())),
        ("memory.fit_mib", Range(min=0, max=100_000, step=1)),
    ],
)
def test_a_range_that_gives_no_list_is_a_mistake(key: str, told: Range) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        values_of(key, told)
