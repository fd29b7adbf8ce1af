"""Whoever may send a request to a server, or wrote it, writes lines of its log, and may mean them to be slow.

No pattern may take more than in proportion to a line's length; lines ten times longer than any reader
hands out show it, by the processor time of the process that reads them.
"""

from __future__ import annotations

import sys

import pytest

from tunerd.machine.process import Limits, Setting, run

N_CHARS = 20_000
CPU_S = 10  # linear patterns take 1 s, a quadratic one 30 s, a cubic one an hour
READERS = {
    "failure": "from tunerd.engine.health import classify as read",
    "arguments": "from tunerd.engine.health import argument_error\n"
    "def read(lines): argument_error(1, '\\n'.join(lines))",
    "requests": "from tunerd.engine.log import read_requests as read",
    "memory": "from tunerd.model.verdict import parse_report as read",
    "placement": "from tunerd.sweep.space import read_fit as read",
    "doctor": "from tunerd.doctor.facts import read_server_log as read",
}
PIECES = (
    ("CUDA", ""),
    ("invalid", ""),
    ("slot released |", "n_past=1 "),
    ("slot released | id_task=1 n_past=1 ", "n_past=1 "),
    ("| CUDA : ", "| CUDA : "),
    ("system_info: n_threads | CUDA : ", "a | b"),
    ("- a", ""),
    ("- a: ", " "),
    ("|  - ", " "),
    ("load_tensors: ", "x "),
    ("a", ""),
    ("a ", " "),
    ("failed to open ", ""),
    ("Stopping ", "..."),
    ("a.service", ""),
    ("\x1b[0m", ""),
    ("prompt eval time = ", " "),
    ("draft acceptance = ", "("),
    ("n_ctx ", " "),
    ("1.", "1"),
)
SCRIPT = """
import sys
{reader}
for first, then in {pieces!r}:
    begin = first * ({n_chars} // 2 // len(first))
    for line in (2 * begin, (begin + (then or first) * {n_chars})[:{n_chars}], (first + then * {n_chars})[:{n_chars}]):
        read(["slot launch_slot_: id  0 | task 1 | processing task, is_child = 0", line, line])
"""


@pytest.mark.parametrize("reader", READERS)
def test_no_line_is_slow_to_read(reader: str) -> None:
    script = SCRIPT.format(reader=READERS[reader], pieces=PIECES, n_chars=N_CHARS)
    done = run([sys.executable, "-c", script], Setting(limits=Limits(cpu_s=CPU_S)), timeout_s=120)

    assert done.is_ok, done.stderr or f"signal {done.signal}, after {CPU_S} s of processor time"


def test_a_unit_of_many_continued_lines_is_read_once() -> None:
    script = (
        "from tunerd.units.text import parse_unit\n"
        "parse_unit('[Service]\\nA=' + 'x' * 20 + '\\\\\\n' + ('x' * 20 + '\\\\\\n') * 200_000)"
    )
    done = run([sys.executable, "-c", script], Setting(limits=Limits(cpu_s=CPU_S)), timeout_s=120)

    assert done.is_ok, done.stderr or f"signal {done.signal}"
