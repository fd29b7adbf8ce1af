"""Reads the help texts of real builds, and survives those of hostile ones."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders import HELP, HELP_OF
from tunerd.engine.help import Option, parse_help


def option(dialect: str, spelling: str) -> Option:
    found = parse_help((HELP / f"{HELP_OF[dialect]}.txt").read_text()).option(spelling)
    assert found is not None, f"{dialect} lists no {spelling}"
    return found


def test_an_option_of_mainline_is_read_whole() -> None:
    found = option("main-lm", "--cache-type-k")
    assert found.spellings == ("-ctk", "--cache-type-k")
    assert found.argument == "TYPE"
    assert found.default == "f16"
    assert found.env == "LLAMA_ARG_CACHE_TYPE_K"
    assert not found.is_removed
    assert found.allowed_values[:4] == ("f32", "f16", "bf16", "q8_0")


def test_an_option_of_ik_is_read_whole() -> None:
    found = option("ik-now", "--ctx-size")
    assert found.spellings == ("-c", "--ctx-size")
    assert (found.argument, found.default, found.env) == ("N", "0, 0 = loaded from model", None)


def test_a_placeholder_between_two_spellings_is_no_third_one() -> None:
    found = option("ik-now", "-ctx-ckpt")
    assert found.spellings == ("-ctx-ckpt", "--ctx-checkpoints")
    assert (found.argument, found.default) == ("N", "32")


def test_a_comma_before_a_description_is_not_part_of_it() -> None:
    assert option("ik-may", "--merge-qkv").description == "merge Q,K,V (default: 0)"
    assert option("ik-may", "--merge-qkv").argument == ""


def test_both_sides_of_a_switch_are_spellings_of_one_option() -> None:
    found = option("main-lm", "--no-warmup")
    assert "--warmup" in found.spellings
    assert found.argument == ""


def test_a_removed_option_is_listed_but_not_live() -> None:
    parsed = parse_help((HELP / f"{HELP_OF['main-0x']}.txt").read_text())
    found = parsed.option("--draft-max")
    assert found is not None
    assert found.is_removed
    assert "--draft-max" not in parsed.live_spellings
    assert "--spec-draft-n-max" in parsed.live_spellings


def test_a_deprecated_option_is_live() -> None:
    found = option("main-lm", "--no-mmap")
    assert not found.is_removed


def test_a_live_entry_comes_before_a_removed_one_of_the_same_spelling() -> None:
    text = (
        "--thing N                               the argument has been removed. use --other\n"
        "--thing N                               how many (default: 3)\n"
    )
    found = parse_help(text).option("--thing")
    assert found is not None
    assert found.default == "3"


@pytest.mark.parametrize("dialect", HELP_OF)
def test_every_line_that_begins_an_option_is_read_as_one(dialect: str) -> None:
    """A count by another rule than the parser's: lines whose first word is a flag."""
    text = (HELP / f"{HELP_OF[dialect]}.txt").read_text()
    heads = [
        line.split()[0].rstrip(",")
        for line in text.splitlines()
        if line.lstrip().startswith("-") and len(line) - len(line.lstrip()) <= 12
    ]
    heads = [head for head in heads if head.lstrip("-")[:1].isalpha()]
    parsed = parse_help(text)
    listed = {spelling for entry in parsed.options for spelling in entry.spellings}
    assert {head.removesuffix("(s)") for head in heads} <= listed
    assert len(parsed.options) == len(heads)
    assert len(parsed.options) > 200


@pytest.mark.parametrize("dialect", HELP_OF)
def test_every_name_of_a_variable_is_read(dialect: str) -> None:
    """Some stand after a blank line within the description."""
    text = (HELP / f"{HELP_OF[dialect]}.txt").read_text()
    named = [entry.env for entry in parse_help(text).options if entry.env is not None]
    assert len(named) == text.count("(env: ")
    if dialect == "main-0x":
        assert {"LLAMA_ARG_SPEC_TYPE", "LLAMA_ARG_LOAD_MODE"} <= set(named)


@pytest.mark.parametrize("dialect", HELP_OF)
def test_no_spelling_or_placeholder_holds_a_description(dialect: str) -> None:
    for entry in parse_help((HELP / f"{HELP_OF[dialect]}.txt").read_text()).options:
        assert all(" " not in spelling for spelling in entry.spellings)
        assert "  " not in entry.argument


HELP_LIKE = st.lists(
    st.one_of(
        st.text(max_size=60),
        st.builds(
            lambda indent, words: " " * indent + " ".join(words),
            st.integers(0, 45),
            st.lists(
                st.sampled_from(
                    ["-a", "--abc", "--no-abc,", "N", "[on|off|auto]", "(default:", "3)", "(env:",
                     "LLAMA_ARG_A)", "types:", "none,", "canonical", "-", "--", "--a(s)", ",",
                     "allowed values:", "f16,", "DEPRECATED", "the argument has been removed"]
                ),
                max_size=8,
            ),
        ),
    ),
    max_size=20,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(HELP_LIKE)
def test_no_text_is_too_odd_to_parse(lines: list[str]) -> None:
    parsed = parse_help("\n".join(lines))
    for entry in parsed.options:
        assert entry.spellings
        assert all(spelling.startswith("-") for spelling in entry.spellings)
        assert parsed.option(entry.spellings[0]) is not None
        assert isinstance(entry.allowed_values, tuple)


MANY = 200_000
HOSTILE = {
    "many spellings on a line": "-a " * MANY,
    "many placeholders on a line": "-a " + "N, -b " * MANY,
    "nested defaults": "--a N\n" + " " * 40 + "(default: " * MANY,
    "balanced parentheses in a default": "--a N\n" + " " * 40 + "(default: " + "()" * MANY,
    "a long placeholder": "--a " + "on " * MANY,
    "a long gap": "--a" + " " * MANY + "x",
    "a long description": "--a N\n" + (" " * 40 + "word\n") * (MANY // 10),
    "blank lines": "\n" * MANY,
    "many options": "--a N\n" * MANY,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_read_in_no_time(name: str) -> None:
    """Anything worse than linear takes minutes at this size; linear takes some 0.1 s."""
    began = time.process_time()
    parsed = parse_help(HOSTILE[name])
    assert time.process_time() - began < 10.0
    assert all(len(entry.description) <= 10_000 for entry in parsed.options)


def test_what_follows_a_million_characters_is_not_looked_at() -> None:
    text = "--early N\n" + "x" * 1_000_000 + "\n--late N\n"
    assert parse_help(text).live_spellings == {"--early"}
