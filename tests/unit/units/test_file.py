"""Reading unit text as systemd reads it."""

from __future__ import annotations

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


def test_a_comment_inside_a_continued_line_is_left_out() -> None:
    unit = parse_unit("[Service]\nExecStart=/bin/a \\\n# why\n  ; and why\n  --one\n")

    assert unit.value("Service", "ExecStart") == "/bin/a    --one"


def test_an_empty_line_ends_a_continued_line() -> None:
    unit = parse_unit("[Service]\nExecStart=/bin/a \\\n\nType=exec\n")

    assert unit.value("Service", "ExecStart") == "/bin/a"
    assert unit.value("Service", "Type") == "exec"


def test_an_even_number_of_backslashes_at_the_end_continues_nothing() -> None:
    unit = parse_unit("[Service]\nExecStart=/bin/a \\\\\nType=exec\n")

    assert unit.value("Service", "ExecStart") == "/bin/a \\\\"
    assert unit.value("Service", "Type") == "exec"


def test_a_continuation_at_the_end_of_the_file_still_counts() -> None:
    assert parse_unit("[Service]\nExecStart=/bin/a \\").value("Service", "ExecStart") == "/bin/a"


def test_an_empty_assignment_resets_a_list() -> None:
    unit = parse_unit(
        "[Service]\nEnvironment=A=1\nEnvironment=\nEnvironment=B=2\nEnvironment=C=3\n"
    )

    assert [d.value for d in unit.values("Service", "Environment")] == ["B=2", "C=3"]


def test_the_last_assignment_of_a_single_value_counts_and_an_empty_one_takes_it_away() -> None:
    assert parse_unit("[Service]\nUser=a\nUser=b\n").value("Service", "User") == "b"
    assert parse_unit("[Service]\nUser=a\nUser=\n").value("Service", "User") is None


def test_a_drop_in_comes_after_the_unit_and_can_reset_it() -> None:
    unit = parse_unit("[Service]\nExecStart=/bin/a\nUser=x\n")
    drop_in = parse_unit("[Service]\nExecStart=\nExecStart=/bin/b\n")

    both = unit.with_drop_in(drop_in)

    assert [d.value for d in both.values("Service", "ExecStart")] == ["/bin/b"]
    assert both.value("Service", "User") == "x"


def test_the_same_section_may_come_again() -> None:
    unit = parse_unit("[Service]\nType=exec\n[Unit]\nAfter=a\n[Service]\nUser=x\n")

    assert unit.value("Service", "Type") == "exec"
    assert unit.value("Service", "User") == "x"


def test_lines_end_with_carriage_returns_and_nul_too() -> None:
    unit = parse_unit("[Service]\r\nType=exec\r\nUser=a\rGroup=b\0Nice=3\n\nUMask=1")

    assert [(d.name, d.value, d.line) for d in unit.directives] == [
        ("Type", "exec", 2),
        ("User", "a", 3),
        ("Group", "b", 4),
        ("Nice", "3", 5),
        ("UMask", "1", 7),
    ]


def test_unicode_line_separators_end_no_line() -> None:
    unit = parse_unit("[Unit]\nDescription=a\u2028b\x85c\x0cd\n")

    assert unit.value("Unit", "Description") == "a\u2028b\x85c\x0cd"


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_unit("\ufeff[Unit]\nDescription=x\n").value("Unit", "Description") == "x"


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
