"""Reading unit text as systemd reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunerd.units.text import Directive, parse_unit


def test_directives_come_in_order_with_their_section_and_line() -> None:
    unit = parse_unit(
        "# a comment\n[Unit]\nDescription = the server \n\n[Service]\n"
        "; another\nType=exec\nExecStart=/bin/a\n",
    )

    assert unit.directives == (
        Directive("Unit", "Description", "the server", 3),
        Directive("Service", "Type", "exec", 7),
        Directive("Service", "ExecStart", "/bin/a", 8),
    )
    assert unit.problems == ()


def test_a_continued_line_is_joined_by_a_space_and_keeps_its_first_line_number() -> None:
    unit = parse_unit("[Service]\nExecStart=/bin/a \\\n  --one \\\n  --two\nType=exec\n")

    assert [(d.name, d.value, d.line) for d in unit.directives] == [
        ("ExecStart", "/bin/a    --one    --two", 2),
        ("Type", "exec", 5),
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[Service]\nExecStart=/bin/a \\\n# why\n  ; and why\n  --one\n",
         {"ExecStart": "/bin/a    --one"}),
        ("[Service]\nExecStart=/bin/a \\\n\nType=exec\n", {"ExecStart": "/bin/a", "Type": "exec"}),
        ("[Service]\nExecStart=/bin/a \\\\\nType=exec\n",
         {"ExecStart": "/bin/a \\\\", "Type": "exec"}),
        ("[Service]\nExecStart=/bin/a \\", {"ExecStart": "/bin/a"}),
        ("[Service]\nUser=a\nUser=b\n", {"User": "b"}),
        ("[Service]\nUser=a\nUser=\n", {"User": None}),
        ("[Service]\nType=exec\n[Unit]\nAfter=a\n[Service]\nUser=x\n", {"Type": "exec", "User": "x"}),
        ("[Service]\nUser=a\u2028b\x85c\x0cd\n", {"User": "a\u2028b\x85c\x0cd"}),
        ("\ufeff[Service]\nUser=x\n", {"User": "x"}),
    ],
    ids=["comments in a continued line", "an empty line ends it", "two backslashes continue nothing",
         "continued at the end of the file", "the last assignment", "an empty one takes it away",
         "a section again", "separators of Unicode", "a byte order mark"],
)  # fmt: skip
def test_what_a_text_assigns(text: str, values: dict[str, str | None]) -> None:
    unit = parse_unit(text)

    assert {name: unit.value("Service", name) for name in values} == values


def test_an_empty_assignment_resets_a_list() -> None:
    unit = parse_unit(
        "[Service]\nEnvironment=A=1\nEnvironment=\nEnvironment=B=2\nEnvironment=C=3\n"
    )

    assert [d.value for d in unit.values("Service", "Environment")] == ["B=2", "C=3"]


def test_a_drop_in_comes_after_the_unit_and_can_reset_it() -> None:
    unit = parse_unit("[Service]\nExecStart=/bin/a\nUser=x\n")
    drop_in = parse_unit("[Service]\nExecStart=\nExecStart=/bin/b\n")

    both = unit.with_drop_in(drop_in)

    assert [d.value for d in both.values("Service", "ExecStart")] == ["/bin/b"]
    assert both.value("Service", "User") == "x"


def test_lines_end_with_carriage_returns_and_nul_too() -> None:
    unit = parse_unit("[Service]\r\nType=exec\r\nUser=a\rGroup=b\0Nice=3\n\nUMask=1")

    assert [(d.name, d.value, d.line) for d in unit.directives] == [
        ("Type", "exec", 2),
        ("User", "a", 3),
        ("Group", "b", 4),
        ("Nice", "3", 5),
        ("UMask", "1", 7),
    ]


def test_what_systemd_would_ignore_is_named_with_its_line() -> None:
    unit = parse_unit("Type=exec\n[Service]\nnonsense\nUser=\udcff\nGroup=g\n")

    assert [(p.line, p.is_fatal) for p in unit.problems] == [(1, False), (3, False), (4, False)]
    assert [d.name for d in unit.directives] == ["Group"]


def test_a_broken_section_header_makes_the_whole_file_unusable() -> None:
    unit = parse_unit("[Service]\nUser=a\n[Install\nWantedBy=x\n")

    assert [(p.line, p.is_fatal) for p in unit.problems] == [(3, True)]


def test_a_line_of_a_mebibyte_makes_the_whole_file_unusable() -> None:
    unit = parse_unit("[Service]\nExecStart=/bin/a " + "x" * 1024 * 1024)

    assert unit.problems[0].is_fatal


@given(st.text(alphabet=st.sampled_from("[]=\\\n\r#; \0ab\udcff"), max_size=60))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    unit = parse_unit(text)

    assert all(d.value == d.value.strip(" \t\r\n") for d in unit.directives)
    assert all("\n" not in d.name + d.value for d in unit.directives)
