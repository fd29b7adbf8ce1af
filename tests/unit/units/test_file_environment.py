"""Environments of units as systemd reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunerd.units.text import (
    EnvironmentFile,
    environment_files_of,
    environment_of,
    parse_environment,
    parse_environment_file,
    parse_unit,
)


def test_assignments_are_unquoted_and_specifiers_put_in() -> None:
    parsed = parse_environment('A=1 "B=two words" C="mid dle" D=%h/x E=\\x41', {"h": "/root"})

    assert parsed.pairs == (
        ("A", "1"),
        ("B", "two words"),
        ("C", "mid dle"),
        ("D", "/root/x"),
        ("E", "A"),
    )


def test_an_invalid_assignment_is_dropped_and_noted() -> None:
    parsed = parse_environment('A=1 novalue 1B=2 "C=a\\xffb" D=4', {})

    assert parsed.pairs == (("A", "1"), ("D", "4"))
    assert len(parsed.notes) == 3


def test_what_follows_broken_quoting_is_dropped_but_not_what_came_before() -> None:
    parsed = parse_environment('A=1 "B=2', {})

    assert parsed.pairs == (("A", "1"),)
    assert len(parsed.notes) == 1


def test_a_units_assignments_replace_each_other_in_order() -> None:
    unit = parse_unit("[Service]\nEnvironment=A=1 B=2\nEnvironment=A=3\n")

    assert dict(environment_of(unit, {}).pairs) == {"A": "3", "B": "2"}


def test_a_dash_makes_an_environment_file_optional() -> None:
    unit = parse_unit(
        "[Service]\nEnvironmentFile=-/etc/default/llama-server\nEnvironmentFile=%h/b\n"
    )

    assert environment_files_of(unit, {"h": "/home/a"}) == (
        EnvironmentFile("/etc/default/llama-server", is_optional=True),
        EnvironmentFile("/home/a/b", is_optional=False),
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=plain", "plain"),
        ("A=two words  ", "two words"),
        ("  A = x", "x"),
        ("A=", ""),
        ("A='single $x \\n'", "single $x \\n"),
        ('A="double \\" \\\\ \\$ \\n"', 'double " \\ $ \\n'),
        ('A="a"\'b\'"c"', "abc"),
        ('A="a" b', "ab"),
        ('A=x "y"', 'x "y"'),
        ("A=a\\ b\\\\", "a b\\"),
        ("A=a\\\nb", "ab"),
        ('A="a\\\nb"', "ab"),
        ('A="a\nb"', "a\nb"),
        ("A=a # no comment", "a # no comment"),
        ("A=a;b", "a;b"),
        ("A=%h $B", "%h $B"),
        ("A=x\r\n", "x"),
        ("A=b=c", "b=c"),
    ],
)
def test_a_value_in_an_environment_file(text: str, value: str) -> None:
    assert parse_environment_file(text).pairs == (("A", value),)


def test_lines_that_are_no_assignments_are_noted() -> None:
    parsed = parse_environment_file("export A=1\nnothing\nB=2\n")

    assert parsed.pairs == (("B", "2"),)
    assert len(parsed.notes) == 2


def test_a_comment_ends_with_its_line_as_since_systemd_254() -> None:
    parsed = parse_environment_file("# a \\\nA=1\n")

    assert parsed.pairs == (("A", "1"),)


@given(st.text(alphabet=st.sampled_from("A=1\"'\\\n\r #;$`\0"), max_size=60))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    for name, value in parse_environment_file(text).pairs:
        assert name
        assert "\0" not in value
