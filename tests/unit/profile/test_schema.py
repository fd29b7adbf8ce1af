"""Every mistake of a profile file is found at once, with its key and the nearest valid name."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders import PROFILES, shipped_sources
from tunerd.profile.schema import (
    ProfileFile,
    Range,
    Serving,
    check_file,
    is_left_to_engine,
    values_of,
)
from tunerd.words import Problem


def problems(text: str) -> dict[str, Problem]:
    return {problem.key: problem for problem in check_file("f.toml", tomllib.loads(text))}


def only(text: str) -> Problem:
    (problem,) = problems(text).values()
    return problem


@pytest.mark.parametrize("name", shipped_sources().names)
def test_a_shipped_profile_has_no_mistake(name: str) -> None:
    assert check_file(name, tomllib.loads((PROFILES / f"{name}.toml").read_text())) == ()


def test_all_mistakes_of_a_file_are_reported_at_once() -> None:
    found = problems(
        """
        descripton = "x"
        extra_args = ["--good", 5]
        [serving]
        prot = 8080
        port = 70000
        threads = "all"
        [speculation]
        type = "mpt"
        n_mxa = 3
        p_min = 2.0
        [engines.ik.memory]
        fit_mb = 1664
        [environment]
        "A B" = "x"
        C = 1
        [sweep]
        "speculation.nmax" = [1, 2]
        "serving.threads" = { mn = 1 }
        [pin]
        "serving.aliass" = "x"
        "serving.port" = 0
        nonsense = 1
        """
    )
    assert set(found) == {
        "descripton",
        "extra_args.1",
        "serving.prot",
        "serving.port",
        "serving.threads",
        "speculation.type",
        "speculation.n_mxa",
        "speculation.p_min",
        "engines.ik.memory.fit_mb",
        "environment.A B",
        "environment.C",
        "sweep.speculation.nmax",
        "sweep.serving.threads.mn",
        "pin.serving.aliass",
        "pin.serving.port",
        "pin.nonsense",
    }


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("descripton = 'x'", "description"),
        ("[servin]\nport = 1", "serving"),
        ("[serving]\nprot = 1", "port"),
        ("[serving]\nfit_mib = 1", "memory.fit_mib"),
        ("[speculation]\ntype = 'mpt'", "mtp"),
        ("[serving]\nload_mode = 'mlok'", "mlock"),
        ("[engines.ik.servin]\nport = 1", "serving"),
        ("[engines.ik.serving]\nprot = 1", "port"),
        ("[sweep]\n'speculation.nmax' = [1]", "speculation.n_max"),
        ("[sweep]\n'speculation.n_max' = { mn = 1 }", "min"),
        ("[pin]\n'serving.prt' = 1", "port"),
        ("[pin]\n'servin.port' = 1", "serving.port"),
        ("[pin.servin]\nport = 1", "serving.port"),
        ("'memory.fit_mb' = 1", "memory.fit_mib"),
    ],
)
def test_a_misspelt_name_comes_with_the_nearest_one(text: str, nearest: str) -> None:
    assert only(text).nearest == nearest
    assert f"did you mean `{nearest}`?" in str(only(text))


@pytest.mark.parametrize("text", ['"a\\nb"', '"a\\u0000b"', '"a\\u007fb"', '"a\\tb"', '""'])
@pytest.mark.parametrize("key", ["serving.alias", "model.path", "serving.chat_template"])
def test_a_text_with_control_characters_is_refused(key: str, text: str) -> None:
    table, _, name = key.partition(".")
    found = only(f"[{table}]\n{name} = {text}")
    assert found.key == key
    assert found.allowed in {"one line of text without control characters", "at least 1 character"}


def test_a_key_may_be_left_to_the_engine_in_every_table() -> None:
    text = """
    [serving]
    port = "default"
    [engines.ik.memory]
    fit_mib = "default"
    [pin]
    "speculation.n_max" = "default"
    """
    assert problems(text) == {}
    assert not is_left_to_engine("environment.X", "default")
    assert only("[environment]\nX = 5").key == "environment.X"
    assert only('[engines.ik.environment]\nX = "a\\u0000"').key == "engines.ik.environment.X"


@pytest.mark.parametrize(
    "text",
    ["serving = 5", "serving = 'default'", "engines = 5", "pin = 5", "sweep = 5", "extra_args = '-x'",
     "engines.ik = 5", "pin.serving = 5", "environment = 5", "extends = ['a']", "engine.prefer = 'ik'",
     "engine.prefer = []", "memory.override_tensor = 'a=b'"],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_one_problem(text: str) -> None:
    assert only(text).key == text.partition(" ")[0]


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


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "table",
    [
        "[speculation]\np_min = {}",
        "[sweep]\n'speculation.p_min' = [{}]",
        "[sweep]\n'speculation.p_min' = {{ min = 0.0, max = {} }}",
        "[serving]\ntemp = {}",
        "[engines.ik.speculation]\np_min = {}",
        "[published.by_engine.ik]\ntok_s = {}",
    ],
)
def test_what_is_no_number_is_a_mistake_wherever_a_number_stands(table: str, number: str) -> None:
    assert problems(table.format(number))


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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("'speculation.n_max' = { min = 4, max = 1 }", "a `max` that is not below it"),
        ("'serving.reasoning_budget' = { min = 0, max = 64, step = 0 }", "a `step` above 0"),
        ("'speculation.n_max' = []", "an empty list"),
        ("'speculation.n_max' = [2, 99]", "64"),
        ("'speculation.type' = ['mpt']", "mtp"),
        ("'serving.threads' = { min = 0, max = 4 }", "1"),
    ],
)
def test_a_range_whose_values_its_key_cannot_have_is_a_mistake_of_its_file(
    line: str, words: str
) -> None:
    problem = only(f"[sweep]\n{line}")
    assert problem.key.startswith("sweep.")
    assert words in str(problem)
