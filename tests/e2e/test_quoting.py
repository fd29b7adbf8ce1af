"""What tunerd writes into units, and reads out of them, means the same to a real systemd.

TUNERD_TEST_QUOTING_LISTS is the number of argument lists, TUNERD_TEST_SEED what the random ones are
made from: for a long run set both, as in

    TUNERD_TEST_QUOTING_LISTS=20000 TUNERD_TEST_SEED=$RANDOM python -m pytest tests/e2e/test_quoting.py
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.machine import Machine
from tests.support.nvml_stub import compiler
from tests.support.programs import program
from tunerd.errors import ConfigError
from tunerd.units.text import (
    MAX_ARGUMENT_BYTES,
    exec_words,
    parse_environment_file,
    parse_exec,
    quote_argument,
    quote_environment,
    quote_program,
)

N_LISTS = int(os.environ.get("TUNERD_TEST_QUOTING_LISTS", "160"))
SEED = int(os.environ.get("TUNERD_TEST_SEED", "20261121"))
DUMP = "/usr/local/lib/dump"
_PER_UNIT = 100
# A Python for each of hundreds of lines would take twenty times as long.
_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
int main(void) {
    FILE *out = fopen(getenv("DUMP_TO"), "a");
    for (int environ = 0; environ < 2; environ++) {
        FILE *in = fopen(environ ? "/proc/self/environ" : "/proc/self/cmdline", "rb");
        for (int byte; (byte = getc(in)) != EOF;) fprintf(out, "%02x", byte);
        putc(environ ? '\n' : ' ', out);
    }
    return fclose(out);
}
"""


_WRITE = """
import json, sys
for path, text in json.load(sys.stdin).items():
    with open(path, "w", newline="") as file:
        file.write(text)
"""
# Arguments, command lines and environment files that try to be misread; the same for one seed.
NASTY = (
    "", " ", "a b", "\t", "\n", "\r\n", "a\nExecStartPost=/bin/touch /pwned", "\\", "\\\\", "a\\", "\\n",
    "\\x41", "\\u0041", "\\d", '"', "'", '"a" "b"', "it's", '\\"', "$", "$$", "$HOME", "${HOME}",
    "x${HOME}y", "$HOME/x", "${HOME", "$}", "${}", "${A:-b}", "%", "%%", "%n", "%h/x", "100%", "%%n", "%z",
    ";", "\\;", "a;b", "#", "# no comment", "-", "--flag=value", "-@:+!x", "@", ":", "+", "!", "!!", "|",
    "~", "*", "?", "[a]", "{a,b}", "$(touch /pwned)", "`touch /pwned`", "a|b>c&d", "\x01\x02\x1b[31m\x7f",
    "\u2028\u2029\x85", "äöü€\U0001f600", "e\u0301\u202e", "=", "A=b", "[Install]", "x" * 4096,
)  # fmt: skip
_ALPHABET = "\"'\\%$ {}AB;#=-@:+!|\n\t\r\x01\x7fäé\u2028\U0001f600abfnrtvxuU0s/~*"
_RAW_ALPHABET = "\"'\\%$ {}AB;#=-@:+!ab041xuUns"
_FILE_ALPHABET = "\"'\\\n\r #;$`=  ab"


def argument_lists(n: int, seed: int) -> list[list[str]]:
    """The nasty ones one by one and together, then random ones."""
    chance = random.Random(seed)
    lists = [[text] for text in NASTY] + [list(NASTY)]
    while len(lists) < n:
        lengths = (chance.randrange(12) for _ in range(chance.randrange(1, 9)))
        lists.append(["".join(chance.choices(_ALPHABET, k=length)) for length in lengths])
    return lists


def raw_values(n: int, seed: int) -> list[str]:
    """What may stand in a hand-written `ExecStart=` behind its program, well-formed or not."""
    chance = random.Random(seed)
    texts = ("".join(chance.choices(_RAW_ALPHABET, k=chance.randrange(1, 16))) for _ in range(n))
    # A trailing backslash would swallow the next line, which is the unit's and not the value's.
    return [text.strip().rstrip("\\") or "x" for text in texts]


@dataclass(frozen=True)
class Seen:
    """What a program was started with."""

    argv: list[str]
    environment: dict[str, str]


@pytest.fixture
def dumping(machine: Machine, tmp_path: Path) -> Machine:
    """Its program `DUMP` tells what it was started with."""
    (tmp_path / "dump.c").write_text(_SOURCE)
    program(compiler(), "-O2", tmp_path / "dump.c", "-o", tmp_path / "dump")
    machine.write(DUMP, (tmp_path / "dump").read_bytes(), mode=0o755)
    machine.sh("mkdir -p /srv/out")
    return machine


def write_all(machine: Machine, files: Mapping[str, str]) -> None:
    """Files by their paths, as they are."""
    machine.run("/usr/bin/python3", "-c", _WRITE, stdin=json.dumps(files))


def run_lines(
    machine: Machine, name: str, lines: Sequence[str], *, more: Sequence[str] = ()
) -> list[Seen]:
    """What each of these `ExecStart=` values starts, in units of many commands each."""
    seen: list[Seen] = []
    for first in range(0, len(lines), _PER_UNIT):
        unit, out = f"{name}-{first}.service", f"/srv/out/{name}-{first}.json"
        text = [
            *("[Unit]", "Description=untouched", "[Service]", "Type=oneshot", "UMask=0027"),
            f"Environment=DUMP_TO={out}",
            *more,
            *(f"ExecStart={line}" for line in lines[first : first + _PER_UNIT]),
        ]
        machine.write(
            f"/etc/systemd/system/{unit}",
            ("\n".join(text) + "\n").encode("utf-8", "surrogateescape"),
        )
        machine.systemctl("daemon-reload")
        machine.systemctl("start", unit)
        seen += [_seen(line) for line in machine.read(out).splitlines()]
        names = ("Description", "UMask", "ExecStartPost", "ExecStartPre", "LoadState")
        shown = machine.systemctl("show", f"--property={','.join(names)}", unit)
        assert {*shown.splitlines()} == {"Description=untouched", "LoadState=loaded", "UMask=0027"}
    assert not machine.exists("/pwned")
    return seen


def _seen(line: str) -> Seen:
    argv, environ = (
        bytes.fromhex(words).decode("utf-8", "surrogateescape").split("\0")[:-1]
        for words in line.split(" ")
    )
    return Seen(argv, dict(word.split("=", 1) for word in environ))


@pytest.mark.both_roots
def test_every_argument_list_arrives_unchanged_and_behind_a_colon_without_doubled_dollar_signs(
    dumping: Machine,
) -> None:
    lists = [*argument_lists(N_LISTS, SEED), ["x" * MAX_ARGUMENT_BYTES], ["%" * 50_000] * 10]
    lines = [" ".join(exec_words([DUMP, *words])) for words in lists]
    for words in lists:
        unexpanded = (quote_argument(word, expands=False) for word in words)
        lines.append(" ".join([f":{quote_program(DUMP)}", *unexpanded]))

    seen = run_lines(dumping, "arguments", lines)

    assert [one.argv[1:] for one in seen] == lists * 2


@pytest.mark.both_roots
def test_every_environment_value_arrives_unchanged(dumping: Machine) -> None:
    values: list[str] = []
    for text in (*NASTY, *(word for words in argument_lists(200, SEED + 2) for word in words)):
        try:
            quote_environment("A", text)
        except ConfigError:
            continue  # what systemd would drop is refused
        values.append(text)
    more = [
        f"Environment={quote_environment(f'V{number}', value)}"
        for number, value in enumerate(values)
    ]

    (seen,) = run_lines(dumping, "environment", [DUMP], more=more)

    assert [seen.environment.get(f"V{number}") for number in range(len(values))] == values
    assert len(values) > 200


@pytest.mark.both_roots
def test_a_hand_written_command_line_is_read_as_systemd_reads_it(dumping: Machine) -> None:
    environment = {"A": 'one "two three" fo\\ur', "B": "", "AB": "x  y"}
    more = [f"Environment={quote_environment(name, value)}" for name, value in environment.items()]
    taken: list[tuple[str, list[str]]] = []
    refused: list[str] = []
    for value in raw_values(N_LISTS, SEED):
        line = f"{DUMP} {value}"
        try:
            command = parse_exec(line, environment, {})
        except ConfigError:
            refused.append(line)
            continue
        # What a specifier stands for is the machine's business, also where a quote stands within it.
        if not re.search("%[A-Za-z]", re.sub(r"[\"'\\]", "", line).replace("%%", "")):
            taken.append((line, list(command.argv)))

    seen = run_lines(dumping, "raw", [line for line, _ in taken], more=more)
    wrong = [
        (line, expected, one.argv)
        for (line, expected), one in zip(taken, seen, strict=True)
        if one.argv != expected
    ]
    assert wrong == []

    head, units = "[Service]\nType=exec\nExecStart=", [f"x{n}.service" for n in range(len(refused))]
    named = zip(units, refused, strict=True)
    write_all(dumping, {f"/etc/systemd/system/{unit}": f"{head}{line}\n" for unit, line in named})
    dumping.systemctl("daemon-reload")
    states = dumping.systemctl("show", "--value", "--property=LoadState", *units).split()
    # Two commands in one line are refused here for being two, and by systemd only without `oneshot`.
    assert dict(zip(refused, states, strict=True)) == dict.fromkeys(refused, "bad-setting")
    assert len(taken) > N_LISTS / 4
    assert refused


@pytest.mark.both_roots
def test_an_environment_file_is_read_as_systemd_reads_it(dumping: Machine) -> None:
    chance = random.Random(SEED)
    texts = [
        "".join(
            f"V{number}=" + "".join(chance.choices(_FILE_ALPHABET, k=chance.randrange(14))) + "\n"
            for number in range(6)
        )
        for _ in range(60)
    ]
    unit = "/etc/systemd/system/env@.service"
    reads = f"[Service]\nType=oneshot\nEnvironmentFile=/srv/env-%i\nExecStart={DUMP}\n"
    files = {f"/srv/env-{number}": text for number, text in enumerate(texts)}
    write_all(dumping, {unit: f"{reads}Environment=DUMP_TO=/srv/out/env-%i\n", **files})
    dumping.systemctl("daemon-reload")
    dumping.systemctl("start", *(f"env@{number}" for number in range(len(texts))))
    names = " ".join(f"env-{number}" for number in range(len(texts)))
    lines = dumping.sh(f"cd /srv/out; cat {names}").stdout.splitlines()

    wrong = []
    for text, line in zip(texts, lines, strict=True):
        environment = _seen(line).environment
        real = {name: value for name, value in environment.items() if name[:1] in "Vab"}
        ours = parse_environment_file(text)
        # A comment that ends in a backslash: systemd before 254 skips the next line too.
        differs_by_version = re.search(r"(^|[\n\r])\s*[#;].*\\\n", text)
        if real != ours and not differs_by_version:
            wrong.append((text, real, ours))

    assert wrong == []
