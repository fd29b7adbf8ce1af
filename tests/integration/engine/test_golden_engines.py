"""Every golden command line goes through the argument check of a real build of its dialect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.builders import HELP_OF, capabilities_of
from tests.support.golden import NO_MODEL, dry, golden_lines
from tests.support.ports import free_port
from tunerd.engine.capabilities import IK_HIDDEN_FLAGS, Found
from tunerd.engine.flags import FLAG_ROWS
from tunerd.engine.health import argument_error
from tunerd.engine.probe import EngineProber, own_server
from tunerd.machine.files import Files
from tunerd.machine.process import probe_account
from tunerd.units.sandbox import Sandbox

# Dialects without a build are held by their help texts alone.
DIALECTS = [
    *(
        pytest.param(dialect, marks=pytest.mark.engine)
        for dialect in ("main-old", "main-mid", "main-lm", "ik-may", "ik-now", "bee-01")
    ),
    pytest.param("main-0x", marks=pytest.mark.llama),
]
# mainline of 16 May 2026 ends before its log thread wrote in one run of five.
_TRIES = 20


def program_of(dialect: str) -> Found:
    if dialect != "main-0x":
        return Found(needs.engine(HELP_OF[dialect]), "test")
    program = own_server()
    assert program is not None
    return Found(program, "test")


@pytest.fixture
def prober(tmp_path: Path) -> EngineProber:
    return EngineProber(tmp_path, Files(), Sandbox(probe_account(None)), timeout_s=60)


def complaint(prober: EngineProber, dialect: str, words: Sequence[str]) -> str | None:
    """What the build says against the line; None once it has gone on and looked for the model."""
    for _ in range(_TRIES):
        done = prober.run(program_of(dialect), dry(words, free_port()))
        said = done.stdout + "\n" + done.stderr
        refused = argument_error(done.returncode, said)
        if refused is not None or NO_MODEL in said:
            return refused
    raise AssertionError(f"{dialect} neither refused the line nor looked for the model: {said}")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_build_takes_every_golden_line_of_its_dialect(dialect: str, prober: EngineProber) -> None:
    lines = golden_lines(dialect)
    said = {name: complaint(prober, dialect, words) for name, words in lines.items()}

    assert said == dict.fromkeys(lines)


LACKS = [
    ("main-old", "mtp", 'argument "--spec-type": unknown speculative decoding type'),
    ("main-old", "dflash", 'argument "--spec-type": unknown speculative decoding type'),
    ("main-mid", "draft-dflash", "unknown speculative type: draft-dflash"),
    ("bee-01", "draft-mtp", 'argument "--spec-type": unknown speculative decoding type'),
]


@pytest.mark.engine
@pytest.mark.parametrize(("dialect", "kind", "words"), LACKS)
def test_what_a_golden_file_refuses_the_build_refuses_too(
    dialect: str, kind: str, words: str, prober: EngineProber
) -> None:
    line = [*golden_lines(dialect)["rtx-3090-ti-24gb-baseline"], "--spec-type", kind]

    assert words in (complaint(prober, dialect, line) or "")


@pytest.mark.engine
@pytest.mark.parametrize("dialect", ["ik-may", "ik-now"])
def test_ik_knows_every_flag_that_its_help_leaves_out(dialect: str, prober: EngineProber) -> None:
    runs = {
        flag: prober.run(program_of(dialect), ["-m", NO_MODEL, flag, "0"])
        for flag in IK_HIDDEN_FLAGS
    }

    said = {flag: (done.stdout + done.stderr).splitlines() for flag, done in runs.items()}
    assert [flag for flag in said if f"error: unknown argument: {flag}" in said[flag]] == []
    assert all(said.values())


@pytest.mark.engine
def test_ik_takes_no_flag_of_a_key_that_is_not_known_of_it(prober: EngineProber) -> None:
    words = {word for row in FLAG_ROWS for word in (*row.spellings, *dict(row.shorts))}
    taken = []
    for flag in words - capabilities_of("ik-may").flags:
        done = prober.run(program_of("ik-may"), ["-m", NO_MODEL, flag, "0"])
        lines = (done.stdout + done.stderr).splitlines()
        taken += [] if f"error: unknown argument: {flag}" in lines else [flag]
    assert taken == []
