"""Command lines as systemd takes them apart; the expectations were seen on systemd 252 and 262."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunerd.errors import ConfigError
from tunerd.units.text import parse_exec

ENVIRONMENT = {"FOO": 'one "two three" fo\\ur', "Q": "a  b'c d'", "E": ""}


@pytest.mark.parametrize(
    ("value", "argv"),
    [
        ("/bin/a", ["/bin/a"]),
        ("/bin/a a\"b c\"d 'e f' \"\" ''", ["/bin/a", "ab cd", "e f", "", ""]),
        (r"/bin/a \x41\101\u00e9\U0001F600 \s\t", ["/bin/a", "AAé😀", " \t"]),
        (r'/bin/a "\d" \z', ["/bin/a", "\\d", "\\z"]),
        (r"/bin/a \xef\xb7\x90 \xff \xc3\xa9", ["/bin/a", "\ufdd0", "\udcff", "é"]),
        (r"/bin/a \U0000fdd0", ["/bin/a", "\\U0000fdd0"]),
        (r"/bin/a \x00 \000 \400", ["/bin/a", "\\x00", "\\000", "\\400"]),
        (r'/bin/a \; ";" a;b ;b', ["/bin/a", ";", ";", "a;b", ";b"]),
        ("/bin/a $FOO", ["/bin/a", "one", "two three", "four"]),
        ("/bin/a ${FOO} x${FOO}y", ["/bin/a", ENVIRONMENT["FOO"], f"x{ENVIRONMENT['FOO']}y"]),
        ("/bin/a $Q $E ${E}", ["/bin/a", "a", "bc d", ""]),
        ("/bin/a x$FOO $FOO/bar $$FOO", ["/bin/a", "x$FOO", "$FOO"]),
        ("/bin/a $NOPE ${NOPE} $", ["/bin/a", ""]),
        (
            "/bin/a ${A:-b} ${A$$:x ${A$$ $$$ z",
            ["/bin/a", "${A:-b}", "${A$$:x", "${A$$", "$$", "z"],
        ),
        ("/bin/a %% %n \\x25n %%n %", ["/bin/a", "%", "u.service", "u.service", "%n", "%"]),
        ("/bin/a %- %{ %é", ["/bin/a", "%-", "%{", "%é"]),
        ("@/bin/a $FOO x", ["one", "two three", "four", "x"]),
        ("-:/bin/a $FOO $$ ${FOO}", ["/bin/a", "$FOO", "$$", "${FOO}"]),
        ("bare x", ["bare", "x"]),
        ("/bin/a x ; ", ["/bin/a", "x"]),
    ],
)
def test_a_command_line_is_taken_apart(value: str, argv: list[str]) -> None:
    assert list(parse_exec(value, ENVIRONMENT, {"n": "u.service"}).argv) == argv


@pytest.mark.parametrize(
    ("word", "prefixes", "path"),
    [
        ("-@/bin/a", "-@", "/bin/a"),
        ("+/bin/a", "+", "/bin/a"),
        ("!!/bin/a", "!!", "/bin/a"),
        (":-/bin/a", ":-", "/bin/a"),
        ('"-/bin/a"', "-", "/bin/a"),
    ],
)
def test_prefixes_are_told_from_the_path(word: str, prefixes: str, path: str) -> None:
    command = parse_exec(f"{word} argv0", {}, {})

    assert (command.prefixes, command.path) == (prefixes, path)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "  ",
        '/bin/a "b',
        "./a",
        "-",
        "/bin/a ; /bin/b",
        "+!/bin/a",
        "/bin/a'",
        "@/bin/a",
        "/bin/",
        "/bin/a %1",
    ],
)
def test_what_systemd_refuses_is_refused(value: str) -> None:
    with pytest.raises(ConfigError):
        parse_exec(value, {}, {})


@given(st.text(alphabet=st.sampled_from("\"'\\ $%{}:;x41ua\n"), max_size=40))
def test_no_value_makes_the_reader_fail_otherwise_than_by_refusing(text: str) -> None:
    try:
        command = parse_exec(f"/bin/a {text}", {"x": "1"}, {"a": "2"})
    except ConfigError:
        return
    assert command.path == "/bin/a"
