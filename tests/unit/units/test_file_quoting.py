"""What is quoted reads back as itself, and what cannot be quoted is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunerd.errors import ConfigError
from tunerd.units.text import (
    MAX_ARGUMENT_BYTES,
    exec_words,
    parse_environment,
    parse_exec,
    parse_unit,
    plain_value,
    quote_argument,
    quote_environment,
    quote_program,
)

# All specifiers and many variables are known, so that anything left unquoted would be replaced.
SPECIFIERS = {chr(code): "SPECIFIER" for code in range(32, 127) if chr(code) != "%"}
VARIABLES = dict.fromkeys(("A", "B", "HOME", "a", "", "$", "{", "A}", "0"), "VARIABLE")
HOSTILE = "\"'\\%$ {}AB;#=-@:+!|\n\t\r\x01\x7fäé\u2028\U0001f600abfnrtvxuU0s"


def is_whole(char: str) -> bool:
    code = ord(char)
    return not (code == 0 or 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF) and (
        code & 0xFFFE != 0xFFFE
    )


arguments = st.text(
    alphabet=st.one_of(st.sampled_from(HOSTILE), st.characters().filter(is_whole)), max_size=30
)
paths = st.text(
    alphabet=st.sampled_from(" %${}AB;#=-@:+!|äé\u2028\U0001f600ab0"), min_size=1, max_size=20
).map(lambda name: f"/opt/{name}")


@pytest.mark.parametrize("between", [" ", " \\\n    "], ids=["in a line", "a word a line"])
@given(path=paths, words=st.lists(arguments, max_size=6))
def test_an_argument_list_survives_the_unit_and_adds_no_directive(
    between: str, path: str, words: list[str]
) -> None:
    text = between.join(exec_words([path, *words]))
    unit = parse_unit(f"[Service]\nExecStart={text}\nType=exec\n")

    assert [d.name for d in unit.directives] == ["ExecStart", "Type"]
    assert unit.problems == ()
    command = parse_exec(unit.directives[0].value, VARIABLES, SPECIFIERS)
    assert (command.path, list(command.argv)) == (path, [path, *words])


@given(arguments)
def test_behind_a_colon_a_dollar_sign_is_not_doubled(argument: str) -> None:
    value = f":/bin/a {quote_argument(argument, expands=False)}"

    assert parse_exec(value, VARIABLES, SPECIFIERS).argv == ("/bin/a", argument)


@given(
    st.text(
        alphabet=st.one_of(
            st.sampled_from("\"'\\%$ {}\n\t\r\x01\x7fABab="),
            st.characters().filter(is_whole),
        ),
        max_size=30,
    )
)
def test_an_environment_value_survives_the_unit(value: str) -> None:
    text = f"[Service]\nEnvironment={quote_environment('NAME', value)}\nType=exec\n"

    unit = parse_unit(text)

    read = unit.value("Service", "Environment")
    assert read is not None
    assert parse_environment(read, SPECIFIERS).pairs == (("NAME", value),)
    assert [d.name for d in unit.directives] == ["Environment", "Type"]


@pytest.mark.parametrize("argument", ["a\0b", "\0", "model-\udcff.gguf", "\ufdd0", "\U0001ffff"])
def test_what_would_make_the_unit_unreadable_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError):
        quote_argument(argument)


def test_an_argument_may_be_as_long_as_the_kernel_takes_and_no_longer() -> None:
    assert len(quote_argument("x" * MAX_ARGUMENT_BYTES)) == MAX_ARGUMENT_BYTES + 2
    with pytest.raises(ConfigError, match="longer than 131071 bytes"):
        quote_argument("ä" * (MAX_ARGUMENT_BYTES // 2 + 1))


@pytest.mark.parametrize(
    "path",
    [
        "relative/program",
        "",
        "/bin/quo'te",
        '/bin/quo"te',
        "/bin/back\\slash",
        "/bin/new\nline",
        "/bin/nu\0l",
        "/bin/raw\udcff",
        "/bin/",
        "/" + "x" * 256,
        "/x" * 2100,
    ],
)
def test_a_program_that_systemd_would_refuse_is_refused(path: str) -> None:
    with pytest.raises(ConfigError):
        quote_program(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("1A", "x"), ("A B", "x"), ("", "x"), ("A", "\0"), ("A", "\udcff"), ("A", "\ufdd0")],
)
def test_what_systemd_would_drop_from_the_environment_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError):
        quote_environment(name, value)


def test_a_plain_value_keeps_its_percent_signs() -> None:
    unit = parse_unit(f"[Unit]\nDescription={plain_value('100 % of it')}\n")

    assert unit.value("Unit", "Description") == "100 %% of it"


@pytest.mark.parametrize("value", ["a\nExecStart=/bin/evil", "a\\", " a", "a ", "\x00", "\udcff"])
def test_a_plain_value_that_would_read_back_otherwise_is_refused(value: str) -> None:
    with pytest.raises(ConfigError):
        plain_value(value)
