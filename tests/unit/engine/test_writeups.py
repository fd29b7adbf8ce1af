"""Each profile that comes from a write-up renders to what that write-up printed.

Flags are compared under one spelling, which the build's own help text gives. What a write-up printed
only in part (no host, no model file) is compared in part.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.support.builders import capabilities_of, recorded_context, resolved
from tunerd.engine.flags import CommandLine, render


class WriteUp(NamedTuple):
    """What was printed, for which profile, and which build took it."""

    profile: str
    dialect: str
    printed: str


WRITE_UPS = {
    "12 GB, mainline": WriteUp("rtx-4070-super-12gb", "main-mid", (
        "-m Qwen3.6-35B-A3B-IQ4_XS-4.19bpw.gguf --fit on --fit-target 512 --ctx-size 131072 --cache-type-k q8_0 "
        "--cache-type-v q8_0 --cache-type-k-draft q8_0 --cache-type-v-draft q8_0 --spec-type draft-mtp "
        "--spec-draft-p-min 0.75 --spec-draft-n-max 3 --no-mmap --mlock --threads 8 --temp 0.0"
    )),
    "12 GB, ik": WriteUp("rtx-4070-super-12gb", "ik-may", (
        "-m Qwen3.6-35B-A3B-IQ4_XS-4.19bpw.gguf --fit --fit-margin 1664 --ctx-size 131072 --cache-type-k q8_0 "
        "--cache-type-v q8_0 --cache-type-k-draft q8_0 --cache-type-v-draft q8_0 --multi-token-prediction "
        "--draft-p-min 0.75 --draft-max 3 --no-mmap --mlock --threads 8 --temp 0.0"
    )),
    "16 GB": WriteUp("rtx-5060-ti-16gb", "main-mid", (
        "-m Qwen3.6-35B-A3B-MTP-IQ4_XS.gguf -fitt 1536 -c 131072 -n 32768 -fa on -np 1 -ctk q8_0 -ctv q8_0 "
        "-ctkd q8_0 -ctvd q8_0 -ctxcp 64 --no-mmap --mlock --no-warmup --spec-type draft-mtp "
        "--spec-draft-n-max 2 --jinja --metrics --host 0.0.0.0 --port 8080"
    )),
    "24 GB, MTP": WriteUp("rtx-3090-ti-24gb", "main-pr", (
        "-m Qwen3.6-27B-Q4_K_M-mtp.gguf --spec-type mtp --spec-draft-n-max 6 --spec-draft-p-min 0.75 "
        "--reasoning-budget 256 -c 131072 -fa on -ctk q4_0 -ctv q4_0 --jinja --alias qwen3.6-27b-q4_k_m -ub 256 -b 2048"
    )),
    "24 GB, DFlash": WriteUp("rtx-3090-ti-24gb-dflash", "bee-01", (
        "--spec-type dflash --spec-draft-n-max 12 --spec-dflash-cross-ctx 1024 --no-spec-dm-adaptive -c 131072 -fa on "
        "-ctk q4_0 -ctv q4_0 --jinja --alias qwen3.6-27b-q4_k_m -ub 256 -b 2048"
    )),
}  # fmt: skip


def one_spelling(words: list[str], dialect: str) -> dict[str, str | None]:
    """Each flag with its value, under its first long spelling; `-m` with the name of the file."""
    found: dict[str, str | None] = {}
    flag = ""
    for word in words:
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            option = capabilities_of(dialect).help.option(word)
            long = [s for s in option.spellings if s.startswith("--")] if option is not None else []
            both = [s for s in long if s.startswith("--no-") == word.startswith("--no-")]
            flag = (both or [word])[0]
            assert flag not in found, f"{flag} is there twice"
            found[flag] = None
        else:
            found[flag] = word.rpartition("/")[2] if "model" in flag else word
    return found


@pytest.mark.parametrize("name", WRITE_UPS)
def test_every_printed_flag_is_there_with_its_printed_value(name: str) -> None:
    write_up = WRITE_UPS[name]
    capabilities = capabilities_of(write_up.dialect)
    profile = resolved(write_up.profile, capabilities.family)
    command = render(profile, capabilities, recorded_context(profile))
    assert isinstance(command, CommandLine), [str(refusal) for refusal in command]

    ours = one_spelling(list(command.argv[1:]), write_up.dialect)
    printed = one_spelling(write_up.printed.split(), write_up.dialect)
    assert {flag: ours.get(flag, "not there") for flag in printed} == printed
