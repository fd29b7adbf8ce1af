"""Unit text: read as systemd reads it, written so that it reads back unchanged, and no value adds a line.

What systemd makes of command lines was seen on systemd 252 and 262.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders import ROOT
from tests.support.profiles import HOSTILE
from tests.support.transcripts import refusal, transcript
from tunerd.errors import ConfigError
from tunerd.units.text import (
    CREDENTIAL_PATH,
    MAX_ARGUMENT_BYTES,
    UnitFile,
    UnitSpec,
    environment_files_of,
    environment_of,
    exec_words,
    is_foreign,
    parse_environment,
    parse_environment_file,
    parse_exec,
    parse_unit,
    plain_value,
    quote_argument,
    quote_program,
    render_unit,
)
from tunerd.words import Mode

# Directives.


ASSIGNED: dict[str, tuple[str, dict[str, str | None]]] = {
    "comments, blanks and ends of lines": ("# a\n[Unit]\r\nUser=x\n; b\n[Service]\nType = exec \rUser=a\0Group=g\n",
                                           {"Type": "exec", "User": "a", "Group": "g"}),
    "comments in a continued line": ("[Service]\nExecStart=/bin/a \\\n# why\n  ; and why\n  --one\n", {"ExecStart": "/bin/a    --one"}),
    "an empty line ends it": ("[Service]\nExecStart=/bin/a \\\n\nType=exec\n", {"ExecStart": "/bin/a", "Type": "exec"}),
    "two backslashes continue nothing": ("[Service]\nExecStart=/bin/a \\\\\nType=exec\n", {"ExecStart": "/bin/a \\\\", "Type": "exec"}),
    "continued at the end of the file": ("[Service]\nExecStart=/bin/a \\", {"ExecStart": "/bin/a"}),
    "the last assignment": ("[Service]\nUser=a\nUser=b\n", {"User": "b"}),
    "an empty one takes it away": ("[Service]\nUser=a\nUser=\n", {"User": None}),
    "a section again": ("[Service]\nType=exec\n[Unit]\nAfter=a\n[Service]\nUser=x\n", {"Type": "exec", "User": "x"}),
    "separators of Unicode": ("[Service]\nUser=a\u2028b\x85c\x0cd\n", {"User": "a\u2028b\x85c\x0cd"}),
    "a byte order mark": ("\ufeff[Service]\nUser=x\n", {"User": "x"}),
}  # fmt: skip


def test_what_a_text_assigns() -> None:
    for what, (text, values) in ASSIGNED.items():
        unit = parse_unit(text)
        assert {name: unit.value("Service", name) for name in values} == values, what
        assert unit.problems == (), what


def test_what_systemd_would_ignore_is_named_with_its_line_and_a_broken_header_ends_it_all() -> None:
    unit = parse_unit("Type=exec\n[Service]\nnonsense\nUser=\udcff\nGroup=g\n")

    assert [one.partition(":")[0] for one in unit.problems] == ["line 1", "line 3", "line 4"]
    assert [d.name for d in unit.directives] == ["Group"]
    assert not unit.is_broken

    broken = parse_unit("[Service]\nUser=a\n[Install\nWantedBy=x\n")
    assert (broken.is_broken, len(broken.directives)) == (True, 1)
    assert broken.problems[-1].startswith("line 3")


@given(st.text(alphabet=st.sampled_from("[]=\\\n\r#; \0ab\udcff"), max_size=60))
def test_no_text_makes_the_reader_of_units_fail(text: str) -> None:
    unit = parse_unit(text)

    assert all(d.value == d.value.strip(" \t\r\n") for d in unit.directives)
    assert all("\n" not in d.name + d.value for d in unit.directives)


# Command lines.

ENVIRONMENT = {"FOO": 'one "two three" fo\\ur', "Q": "a  b'c d'", "E": ""}


APART = {
    "/bin/a": ["/bin/a"],
    "/bin/a a\"b c\"d 'e f' \"\" ''": ["/bin/a", "ab cd", "e f", "", ""],
    r"/bin/a \x41\101\u00e9\U0001F600 \s\t": ["/bin/a", "AAé😀", " \t"],
    r'/bin/a "\d" \z': ["/bin/a", "\\d", "\\z"],
    r"/bin/a \xef\xb7\x90 \xff \xc3\xa9": ["/bin/a", "\ufdd0", "\udcff", "é"],
    r"/bin/a \U0000fdd0": ["/bin/a", "\\U0000fdd0"],
    r"/bin/a \x00 \000 \400": ["/bin/a", "\\x00", "\\000", "\\400"],
    r'/bin/a \; ";" a;b ;b': ["/bin/a", ";", ";", "a;b", ";b"],
    "/bin/a $FOO": ["/bin/a", "one", "two three", "four"],
    "/bin/a ${FOO} x${FOO}y": ["/bin/a", ENVIRONMENT["FOO"], f"x{ENVIRONMENT['FOO']}y"],
    "/bin/a $Q $E ${E}": ["/bin/a", "a", "bc d", ""],
    "/bin/a x$FOO $FOO/bar $$FOO": ["/bin/a", "x$FOO", "$FOO"],
    "/bin/a $NOPE ${NOPE} $": ["/bin/a", ""],
    "/bin/a ${A:-b} ${A$$:x ${A$$ $$$ z": ["/bin/a", "${A:-b}", "${A$$:x", "${A$$", "$$", "z"],
    "/bin/a %% %n \\x25n %%n %": ["/bin/a", "%", "u.service", "u.service", "%n", "%"],
    "/bin/a %- %{ %é": ["/bin/a", "%-", "%{", "%é"],
    "@/bin/a $FOO x": ["one", "two three", "four", "x"],
    "-:/bin/a $FOO $$ ${FOO}": ["/bin/a", "$FOO", "$$", "${FOO}"],
    "bare x": ["bare", "x"],
    "/bin/a x ; ": ["/bin/a", "x"],
}


def test_a_command_line_is_taken_apart() -> None:
    known = {"n": "u.service"}
    assert {value: list(parse_exec(value, ENVIRONMENT, known).argv) for value in APART} == APART


def test_prefixes_are_told_from_the_path() -> None:
    for word, prefixes in (("-@/bin/a", "-@"), ("!!/bin/a", "!!"), ('"-/bin/a"', "-")):
        command = parse_exec(f"{word} argv0", {}, {})
        assert (command.prefixes, command.path) == (prefixes, "/bin/a")


@given(st.text(alphabet=st.sampled_from("\"'\\ $%{}:;x41ua\n"), max_size=40))
def test_no_value_makes_the_reader_fail_otherwise_than_by_refusing(text: str) -> None:
    try:
        command = parse_exec(f"/bin/a {text}", {"x": "1"}, {"a": "2"})
    except ConfigError:
        return
    assert command.path == "/bin/a"


# Environments.


def test_assignments_are_unquoted_and_what_is_none_is_dropped() -> None:
    text = 'A=1 "B=two words" C="mid dle" D=%h/x E=\\x41 novalue 1B=2 "C=a\\xffb" F=%1 G=4 "H=2'

    assert list(parse_environment(text, {"h": "/root"})) == [
        ("A", "1"), ("B", "two words"), ("C", "mid dle"), ("D", "/root/x"), ("E", "A"), ("G", "4"),
    ]  # fmt: skip


def test_a_units_assignments_replace_each_other_and_its_files_are_named_in_order() -> None:
    unit = parse_unit("[Service]\nEnvironment=A=1 B=2\nEnvironment=A=3\n"
                      "EnvironmentFile=-/etc/a\nEnvironmentFile=%h/b\n")  # fmt: skip

    assert environment_of(unit, {}) == {"A": "3", "B": "2"}
    assert environment_files_of(unit, {"h": "/home/a"}) == ("-/etc/a", "/home/a/b")


VALUES = {
    "A=plain": "plain",
    "A=two words  ": "two words",
    "  A = x": "x",
    "A=": "",
    "A='single $x \\n'": "single $x \\n",
    'A="double \\" \\\\ \\$ \\n"': 'double " \\ $ \\n',
    'A="a"\'b\'"c"': "abc",
    'A="a" b': "ab",
    'A=x "y"': 'x "y"',
    "A=a\\ b\\\\": "a b\\",
    "A=a\\\nb": "ab",
    'A="a\\\nb"': "ab",
    'A="a\nb"': "a\nb",
    "A=a # no comment": "a # no comment",
    "A=a;b": "a;b",
    "A=%h $B": "%h $B",
    "A=x\r\n": "x",
    "A=b=c": "b=c",
    "export B=1\nnothing\nA=2\n": "2",
    "# as since systemd 254 \\\nA=1\n": "1",
}


def test_a_value_in_an_environment_file() -> None:
    found = {text: parse_environment_file(text) for text in VALUES}
    assert found == {text: {"A": value} for text, value in VALUES.items()}


@given(st.text(alphabet=st.sampled_from("A=1\"'\\\n\r #;$`\0"), max_size=60))
def test_no_text_makes_the_reader_of_environments_fail(text: str) -> None:
    for name, value in parse_environment_file(text).items():
        assert name
        assert "\0" not in value


# Quoting.

# All specifiers and many variables are known, so that anything left unquoted would be replaced.
SPECIFIERS = {chr(code): "SPECIFIER" for code in range(32, 127) if chr(code) != "%"}
VARIABLES = dict.fromkeys(("A", "B", "HOME", "a", "", "$", "{", "A}", "0"), "VARIABLE")
ODD = "\"'\\%$ {}AB;#=-@:+!|\n\t\r\x01\x7fäé\u2028\U0001f600abfnrtvxuU0s"


def is_whole(char: str) -> bool:
    code = ord(char)
    return not (code == 0 or 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF) and (
        code & 0xFFFE != 0xFFFE
    )


arguments = st.text(
    alphabet=st.one_of(st.sampled_from(ODD), st.characters().filter(is_whole)), max_size=30
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


def test_an_argument_may_be_as_long_as_the_kernel_takes() -> None:
    assert len(quote_argument("x" * MAX_ARGUMENT_BYTES)) == MAX_ARGUMENT_BYTES + 2


# Whole units.

TEMPLATE = (ROOT / "units" / "llama-server.service.in").read_text()
OF_A_UNIT = {"S": "/var/lib", "C": "/var/cache", "d": "/run/credentials/x", "h": "/root"}
PLAIN = UnitSpec(
    unit="llama-server.service",
    mode=Mode.SYSTEM,
    profile="rtx",
    engine="mainline-0.7.0",
    argv=("/usr/bin/llama-server", "--model", "/m.gguf", "--port", "8080"),
    environment={"CUDA_VISIBLE_DEVICES": "0"},
    user="llama",
    group="llama",
    wants_mlock=True,
    wanted_by="multi-user.target",
)


def unit_of(spec: UnitSpec) -> UnitFile:
    parsed = parse_unit(render_unit(TEMPLATE, spec))
    assert parsed.problems == ()
    return parsed


def argv_of(unit: UnitFile) -> tuple[str, ...]:
    (command,) = unit.values("Service", "ExecStart")
    return parse_exec(command.value, {}, OF_A_UNIT).argv


CHANGES: dict[str, dict[str, Any]] = {
    "The unit of a user has no account and is not hardened": {"mode": Mode.USER},
    "Memory is not locked": {"wants_mlock": False},
    "A model at home is read there": {"needs_home": True},
    "A profile of an odd name": {"profile": "50%n faster"},
    "Mounts that boot does not wait for are waited for": {"mounts": ("srv-a.mount", "srv-b.mount")},
    "A port that needs a capability gets that one": {"binds_low": True},
    "Nobody's own unit can have that capability": {"binds_low": True, "mode": Mode.USER},
    "The environment of the profile wins over that of the template": {"environment": {"HOME": "/mine", "LLAMA_CACHE": "/c"}},
    "A secret is a credential and not in the unit":
        {"argv": (*PLAIN.argv, "--api-key-file", CREDENTIAL_PATH), "api_key_file": "/etc/tunerd/api-key"},
}  # fmt: skip


def test_a_unit_is_the_golden_text_and_reads_back_as_it_was_meant() -> None:
    plain = render_unit(TEMPLATE, PLAIN)
    cases = [("The unit of a system", [plain])]
    for told, change in CHANGES.items():
        spec = replace(PLAIN, **change)
        unit = unit_of(spec)
        assert argv_of(unit) == tuple(word.replace("%d", OF_A_UNIT["d"]) for word in spec.argv)
        assert environment_of(unit, OF_A_UNIT).items() >= spec.environment.items()
        text = render_unit(TEMPLATE, spec)
        lines = list(difflib.unified_diff(plain.split("\n"), text.split("\n"), n=0, lineterm=""))
        changed = [line for line in lines[2:] if line[:2] != "@@"]
        cases.append((f"{told}, beside the unit of a system", changed))
    transcript("unit/llama-server", cases)


REFUSED: dict[str, tuple[Callable[[Any], object], Iterable[object]]] = {
    "A command line that systemd refuses": (
        lambda value: parse_exec(value, {}, {}),
        ("", '/bin/a "b', "./a", "-", "/bin/a ; /bin/b", "@/bin/a", "/bin/", "/bin/a %1"),
    ),
    "An argument that would make the unit unreadable": (
        quote_argument, ("a\0b", "\0", "model-\udcff.gguf", "\ufdd0", "\U0001ffff", "ä" * (MAX_ARGUMENT_BYTES // 2 + 1)),
    ),
    "A program that systemd would refuse": (
        quote_program, ("relative/program", "", "/bin/quo'te", '/bin/quo"te', "/bin/back\\slash", "/bin/new\nline",
                        "/bin/nu\0l", "/bin/raw\udcff", "/bin/"),
    ),
    "A value that would read back otherwise": (plain_value, ("a\nExecStart=/bin/evil", "a\\", " a", "a ", "\x00", "\udcff")),
    "What no unit can hold": (
        lambda value: render_unit(TEMPLATE, replace(PLAIN, **value)), (
                {"user": "a\nExecStartPre=/bin/evil"}, {"group": "a\\"}, {"environment": {"A B": "x"}},
                {"argv": ("llama-server",)}, {"argv": ("/usr/bin/x", "a\x00b")}, {"argv": ("/usr/bin/x", "\udcff")},
                {"argv": ("/usr/bin/x", *["y" * 100_000] * 11)},
                {"api_key_file": "/a:b"}, {"api_key_file": "keys"}, {"api_key_file": "/a\nb"}),
    ),
}  # fmt: skip


def test_what_is_refused_is_told_as_in_the_golden_text() -> None:
    transcript("errors/unit", (
        (f"{told}, {ascii(value)[:60]}", refusal(act, value))
        for told, (act, values) in REFUSED.items() for value in values
    ))  # fmt: skip


WORDS = st.lists(HOSTILE, min_size=1, max_size=6).map("".join)
# Anything that systemd takes for UTF-8, control characters included.
CONTROL = st.text(
    st.characters(codec="utf-8", exclude_characters="\0").filter(lambda char: not is_foreign(char)),
    max_size=8,
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.one_of(WORDS, CONTROL), max_size=6),
    st.dictionaries(st.sampled_from(["A", "HOME", "LLAMA_CACHE"]), WORDS, max_size=3),
    WORDS,
    WORDS,
    st.sampled_from(list(Mode)),
)
def test_no_value_adds_a_line_or_changes_another(
    words: list[str], variables: dict[str, str], profile: str, engine: str, mode: Mode
) -> None:
    spec = replace(PLAIN, mode=mode, environment=dict.fromkeys(variables, "x"))
    argv = ("/usr/bin/llama-server", *words)
    unit = unit_of(replace(spec, argv=argv, environment=variables, profile=profile, engine=engine))
    assert argv_of(unit) == argv
    found = environment_of(unit, OF_A_UNIT)
    assert {name: found[name] for name in variables} == variables
    for one, other in zip(unit.directives, unit_of(spec).directives, strict=True):
        assert (one.section, one.name) == (other.section, other.name)
        assert one.name in {"ExecStart", "Environment", "Description"} or one.value == other.value
