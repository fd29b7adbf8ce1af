"""Each profile that comes from a write-up renders to what that write-up printed, and nothing unexplained.

Flags are compared under one spelling, which the build's own help text gives. What a write-up printed
only in part (no host, no model file) is compared in part.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

from tests.support.builders import (
    HELP,
    HELP_OF,
    capabilities_of,
    recorded_context,
    resolved,
    shipped_sources,
)
from tunerd.engine.commandline import KINDS_WITH_PROBABILITY, CommandLine, render
from tunerd.engine.help import HelpText, SpecStyle, parse_help

ALWAYS = {
    "--host": "never left to a build: nobody else is let in unless a profile says so",
    "--port": "never left to a build: 8080 here, 9931 in Debian's",
    "--parallel": "builds differ (1, or auto = 4 slots), and speculation wants one",
    "--no-context-shift": "dropping context silently is worse than an error, and builds differ",
    "--metrics": "tunerd reads the server's own counters",
    "--log-verbosity": "memory and placement lines are at level 4 since May 2026",
}
FIT = {
    "--fit": "the builds' own default, stated because builds differ",
    "--fit-target": "the builds' own default, stated because builds differ",
}


@dataclass(frozen=True)
class WriteUp:
    """What was printed, and what tunerd adds, each with its reason."""

    profile: str
    dialect: str
    printed: str
    added: dict[str, str]


WRITE_UPS = {
    "12 GB, mainline": WriteUp(
        "rtx-4070-super-12gb",
        "main-mid",
        "-m Qwen3.6-35B-A3B-IQ4_XS-4.19bpw.gguf --fit on --fit-target 512 --ctx-size 131072 "
        "--cache-type-k q8_0 --cache-type-v q8_0 --cache-type-k-draft q8_0 --cache-type-v-draft q8_0 "
        "--spec-type draft-mtp --spec-draft-p-min 0.75 --spec-draft-n-max 3 --no-mmap --mlock "
        "--threads 8 --temp 0.0",
        {
            **ALWAYS,
            "--alias": "a name that clients keep when the file changes",
            "--flash-attn": "the quantised V cache needs it; the build's default is auto",
            "--jinja": "the build's default, stated because ik's differs",
        },
    ),
    "12 GB, ik": WriteUp(
        "rtx-4070-super-12gb",
        "ik-may",
        "-m Qwen3.6-35B-A3B-IQ4_XS-4.19bpw.gguf --fit --fit-margin 1664 --ctx-size 131072 "
        "--cache-type-k q8_0 --cache-type-v q8_0 --cache-type-k-draft q8_0 --cache-type-v-draft q8_0 "
        "--multi-token-prediction --draft-p-min 0.75 --draft-max 3 --no-mmap --mlock --threads 8 "
        "--temp 0.0",
        {
            **{
                flag: why
                for flag, why in ALWAYS.items()
                if flag in {"--host", "--port", "--metrics"}
            },
            "--parallel": "the build's default, stated because builds differ",
            "--context-shift": "`off`: this build shifts silently by default",
            "--alias": "a name that clients keep when the file changes",
            "--flash-attn": "the build's default, stated because builds differ",
            "--jinja": "off in this build by default; chat with the model's own template fails then",
        },
    ),
    "16 GB": WriteUp(
        "rtx-5060-ti-16gb",
        "main-mid",
        "-m Qwen3.6-35B-A3B-MTP-IQ4_XS.gguf -fitt 1536 -c 131072 -n 32768 -fa on -np 1 -ctk q8_0 "
        "-ctv q8_0 -ctkd q8_0 -ctvd q8_0 -ctxcp 64 --no-mmap --mlock --no-warmup "
        "--spec-type draft-mtp --spec-draft-n-max 2 --jinja --metrics --host 0.0.0.0 --port 8080",
        {
            "--alias": "a name that clients keep when the file changes",
            "--fit": "the build's default, stated because builds differ",
            "--spec-draft-p-min": "never left to a build; 0.75 was the default of that week",
            "--no-context-shift": ALWAYS["--no-context-shift"],
            "--log-verbosity": ALWAYS["--log-verbosity"],
        },
    ),
    "24 GB, MTP": WriteUp(
        "rtx-3090-ti-24gb",
        "main-pr",
        "-m Qwen3.6-27B-Q4_K_M-mtp.gguf --spec-type mtp --spec-draft-n-max 6 --spec-draft-p-min 0.75 "
        "--reasoning-budget 256 -c 131072 -fa on -ctk q4_0 -ctv q4_0 --jinja "
        "--alias qwen3.6-27b-q4_k_m -ub 256 -b 2048",
        {**ALWAYS, **FIT},
    ),
    "24 GB, DFlash": WriteUp(
        "rtx-3090-ti-24gb-dflash",
        "bee-01",
        "--spec-type dflash --spec-draft-n-max 12 --spec-dflash-cross-ctx 1024 "
        "--no-spec-dm-adaptive -c 131072 -fa on -ctk q4_0 -ctv q4_0 --jinja "
        "--alias qwen3.6-27b-q4_k_m -ub 256 -b 2048",
        {
            **ALWAYS,
            **FIT,
            "--model": "its name is not printed",
            "--model-draft": "its name is not printed",
            "--spec-draft-p-min": "never left to a build; 0.0 is this one's default",
            "--kv-unified": "without it this build halves the context of a hybrid model",
            "--reasoning-budget": "found with the MTP build a few days later: 10 s less a request",
        },
    ),
}


@functools.cache
def help_of(dialect: str) -> HelpText:
    return parse_help((HELP / f"{HELP_OF[dialect]}.txt").read_text())


def one_spelling(words: list[str], dialect: str) -> dict[str, str | None]:
    """Each flag with its value, under its first long spelling; `-m` with the name of the file."""
    found: dict[str, str | None] = {}
    flag = ""
    for word in words:
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            option = help_of(dialect).option(word)
            long = [s for s in option.spellings if s.startswith("--")] if option is not None else []
            both = [s for s in long if s.startswith("--no-") == word.startswith("--no-")]
            flag = (both or [word])[0]
            assert flag not in found, f"{flag} is there twice"
            found[flag] = None
        else:
            found[flag] = word.rpartition("/")[2] if "model" in flag else word
    return found


def ours(write_up: WriteUp) -> dict[str, str | None]:
    capabilities = capabilities_of(write_up.dialect)
    profile = resolved(write_up.profile, capabilities.family)
    command = render(profile, capabilities, recorded_context(profile))
    assert isinstance(command, CommandLine), [str(refusal) for refusal in command]
    return one_spelling(list(command.argv[1:]), write_up.dialect)


def printed(write_up: WriteUp) -> dict[str, str | None]:
    return one_spelling(write_up.printed.split(), write_up.dialect)


@pytest.mark.parametrize("name", WRITE_UPS)
def test_every_printed_flag_is_there_with_its_printed_value(name: str) -> None:
    rendered = ours(WRITE_UPS[name])
    for flag, value in printed(WRITE_UPS[name]).items():
        assert flag in rendered, f"{flag} is printed and not rendered"
        assert rendered[flag] == value, flag


@pytest.mark.parametrize("name", WRITE_UPS)
def test_everything_that_is_added_has_its_reason(name: str) -> None:
    write_up = WRITE_UPS[name]
    added = set(ours(write_up)) - set(printed(write_up))
    assert added == {next(iter(one_spelling([flag], write_up.dialect))) for flag in write_up.added}
    assert all(write_up.added.values())


@pytest.mark.parametrize("dialect", HELP_OF)
@pytest.mark.parametrize("profile_name", shipped_sources().names)
def test_depth_and_probability_are_never_left_to_a_build(profile_name: str, dialect: str) -> None:
    capabilities = capabilities_of(dialect)
    profile = resolved(profile_name, capabilities.family)
    command = render(profile, capabilities, recorded_context(profile))
    if profile.profile.speculation.type not in KINDS_WITH_PROBABILITY:
        return
    if not isinstance(command, CommandLine):
        return
    line = " ".join(command.argv)
    n_max, p_min = profile.profile.speculation.n_max, profile.profile.speculation.p_min
    if capabilities.spec_style is SpecStyle.STAGE:
        assert f":n_max={n_max},p_min={p_min}" in line
    else:
        assert f"-max {n_max} " in line
        assert f"-p-min {p_min}" in line


def test_the_write_ups_of_may_are_all_here() -> None:
    covered = {write_up.profile for write_up in WRITE_UPS.values()}
    tuned = {
        name
        for name in shipped_sources().names
        if not name.endswith("-baseline") and not name.startswith("cpu")
    }
    assert covered == tuned
