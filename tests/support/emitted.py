"""Servers to be written down, and the words that the reader of each language finds in what was written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import yaml
from hypothesis import strategies as st

from tunerd.engine.emit import Flag, Server

PROGRAM = "/opt/a build/llama-server"
# What shells, YAML, INI files and systemd each make something else of.
HOSTILE = (
    "/srv/models/a b.gguf", "/m/it's \"q\".gguf", "/m/100%f $HOME ${PORT} $$ `id`.gguf", "/m/é漢😀.gguf", "~/x", "",
    "a\\", "\\n", "{}: [x], &y *z !t |", "-1", "- a", "' # x", "${env.HOME}", "%%n%", "--", "*?[a]", "a=b", "%d/api-key",
)  # fmt: skip
LINES = ("two\nlines", "\n# x", "a\\\nb", "tab\there", "cr\rlf\r\n", "\x01\x7f\x85\u2028\ufeff")
COMMENTED = ("a;b", "a#b", " blank", "blank ")
words = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn", "Zl"), exclude_characters="\ufeff\ufffe\uffff"), max_size=20),
)  # fmt: skip
any_words = st.one_of(
    words,
    st.sampled_from(LINES),
    st.text(st.characters(exclude_categories=("Cs", "Cn"), exclude_characters="\0")),
)


def server_of(*values: str, **changes: Any) -> Server:
    """A server with a flag for each of these values."""
    flags = tuple(
        Flag((f"--flag-{n}", value), f"key.{n}, set by who\n{value}")
        for n, value in enumerate(values)
    )
    fields: dict[str, Any] = {
        "title": "profile x",
        "names": ("designed", "profile-x"),
        "program": (PROGRAM,),
        "flags": flags,
        "environment": {},
        "host": "127.0.0.1",
        "port": 8080,
        "api_key_file": None,
        "user": None,
        "has_gpu": True,
        "folders": {},
        "locks_memory": False,
        "stop_timeout_s": 10,
        "load_limit_s": 1800,
    }
    return Server(**{**fields, **changes})


def words_of(server: Server) -> list[str]:
    """All arguments as they stand."""
    return [word for flag in server.flags for word in flag.words]


def swap_words(text: str) -> list[str]:
    """As llama-swap runs it on port 5800: macros first, then lines of comments, then words."""
    command = yaml.safe_load(text)["models"]["designed"]["cmd"]
    assert set(re.findall(r"\$\{[a-zA-Z0-9_.-]+\}", command)) == {"${PORT}"}
    lines = [line for line in command.splitlines() if not line.lstrip().startswith("#")]
    return shlex.split("\n".join(lines).replace("${PORT}", "5800"))


def compose_words(text: str) -> list[str]:
    """As compose runs it: with `$` of its own resolved."""
    (service,) = yaml.safe_load(text)["services"].values()
    assert all(len(run) % 2 == 0 for word in service["command"] for run in re.findall(r"\$+", word))
    return [word.replace("$$", "$") for word in service["command"]]


def same(found: Sequence[str], wanted: Sequence[str]) -> bool:
    """Raises with the first word that is another one."""
    differences = [pair for pair in zip_longest(found, wanted) if pair[0] != pair[1]]
    assert not differences, ascii(differences[0])
    return True
