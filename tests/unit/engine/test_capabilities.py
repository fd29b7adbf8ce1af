"""What a build can do, from its help text alone."""

from __future__ import annotations

import time
from operator import attrgetter

import pytest

from tests.support.builders import HELP_OF, capabilities_of
from tunerd.engine.capabilities import (
    FitStyle,
    SpecStyle,
    parse_devices,
    parse_help,
    parse_version,
    read_capabilities,
)
from tunerd.engine.flags import DEPTH_FLAGS
from tunerd.profile.schema import SPEC_WORDS
from tunerd.words import Family, PortOption


def text_of(dialect: str) -> str:
    return capabilities_of(dialect).help.text


# Family, style of speculation, style of fit and its default, load mode, defaults of n-max and
# p-min as the help prints them, port. Source: the captured texts, read by eye; ik's p-min is what its builds were
# seen to do, for the one of June prints it with one digit (0.8) and the one of August not at all.
EXPECTED = {
    "main-old": (Family.MAINLINE, SpecStyle.LEGACY, FitStyle.ON_OFF, True, False, 16, 0.75, 8080),
    "main-pr": (Family.MAINLINE, SpecStyle.SPLIT, FitStyle.ON_OFF, True, False, 16, 0.75, 8080),
    "main-mid": (Family.MAINLINE, SpecStyle.SPLIT, FitStyle.ON_OFF, True, False, 16, 0.75, 8080),
    "main-lm": (Family.MAINLINE, SpecStyle.SPLIT, FitStyle.ON_OFF, True, True, 3, 0.0, 8080),
    "main-0x": (Family.MAINLINE, SpecStyle.SPLIT, FitStyle.ON_OFF, True, True, 3, 0.0, 9931),
    "ik-may": (Family.IK, SpecStyle.IK_LEGACY, FitStyle.SWITCH, False, False, 16, 0.75, 8080),
    "ik-now": (Family.IK, SpecStyle.STAGE, FitStyle.SWITCH, False, False, 16, 0.75, 8080),
    "bee-01": (Family.BEE, SpecStyle.SPLIT, FitStyle.ON_OFF, True, False, 16, 0.0, 8080),
    "bee-03": (Family.BEE, SpecStyle.SPLIT, FitStyle.ON_OFF, True, False, 16, 0.0, 8080),
    "bee-04": (Family.BEE, SpecStyle.SPLIT, FitStyle.ON_OFF, True, True, 3, 0.0, 8080),
}


FIELDS = attrgetter("family", "spec_style", "fit", "fit_default_on", "has_load_mode", "default_n_max",
                    "default_p_min", "default_port")  # fmt: skip


def test_capabilities_are_those_of_the_build() -> None:
    assert {one: FIELDS(capabilities_of(one)) for one in EXPECTED} == EXPECTED
    assert all(capabilities_of(dialect).dialect == dialect for dialect in EXPECTED)


def test_what_a_build_drafts_by_itself_is_read_by_every_name_that_its_flag_has() -> None:
    rows = [row for row in DEPTH_FLAGS if row.key in {"speculation.n_max", "speculation.p_min"}]
    for key, word in ((row.key, word) for row in rows for word in row.spellings):
        found = read_capabilities(parse_help(f"{word} N    how far to draft (default: 7)"))
        assert getattr(found, f"default_{key.removeprefix('speculation.')}") == 7, word
    usual, other = (f"p_min override (default: {p_min})" for p_min in (0.8, 0.5))
    text = text_of("ik-may").replace(usual, other)
    assert read_capabilities(parse_help(text)).default_p_min == 0.5, "ik's own is not in its help"


def test_a_build_of_the_weeks_between_has_todays_flags_of_depth_and_no_mtp() -> None:
    """Mainline b8955 to b9179, of which none was at hand."""
    found = read_capabilities(parse_help(text_of("main-pr").replace("eagle3,mtp,", "")))
    assert (found.dialect, found.spec_style) == ("main-b8955", SpecStyle.SPLIT)
    assert found.spec_word("mtp") is None


# Which word each build has for each kind; a kind that is not named is not to be had.
WORDS = {
    "main-old": {"draft": "draft"},
    "main-pr": {"mtp": "mtp", "eagle3": "eagle3", "draft": "draft"},
    "main-mid": {"mtp": "draft-mtp", "eagle3": "draft-eagle3", "draft": "draft-simple"},
    "main-lm": {"mtp": "draft-mtp", "eagle3": "draft-eagle3", "draft": "draft-simple",
                "dflash": "draft-dflash", "dspark": "draft-dspark"},
    "main-0x": {"mtp": "draft-mtp", "eagle3": "draft-eagle3", "draft": "draft-simple",
                "dflash": "draft-dflash", "dspark": "draft-dspark"},
    "ik-may": {"mtp": "mtp", "draft": "draft", "dflash": "dflash"},
    "ik-now": {"mtp": "mtp", "draft": "draft", "dflash": "dflash", "dspark": "dspark"},
    "bee-01": {"dflash": "dflash"},
    "bee-03": {"mtp": "draft-mtp", "dflash": "dflash"},
    "bee-04": {"mtp": "draft-mtp", "eagle3": "draft-eagle3", "draft": "draft-simple",
               "dflash": "draft-dflash", "dspark": "draft-dspark"},
}  # fmt: skip


def test_kinds_of_speculation_have_the_builds_own_words() -> None:
    for dialect, words in WORDS.items():
        found = {kind: capabilities_of(dialect).spec_word(kind) for kind in SPEC_WORDS}
        assert {kind: word for kind, word in found.items() if word is not None} == words, dialect


def test_a_build_of_another_name_is_served_by_its_flags() -> None:
    text = text_of("main-lm").replace("llama", "somebody").replace("LLAMA", "SOMEBODY")
    found = read_capabilities(parse_help(text))
    assert found.spec_word("mtp") == "draft-mtp"
    assert found.has_load_mode
    assert found.flags == capabilities_of("main-lm").flags


def test_a_build_without_known_marks_is_unknown_and_not_refused() -> None:
    text = (
        "--ctx-size N                            context (default: 4096)\n"
        "--port N                                port (default: 1234)\n"
    )
    found = read_capabilities(parse_help(text))
    assert (found.family, found.dialect) == (Family.UNKNOWN, "unknown")
    assert found.default_port == 1234
    assert found.spec_word("mtp") is None


def test_what_ik_hides_is_known_only_of_ik() -> None:
    assert "-ngl" in capabilities_of("ik-now").flags
    assert "-ngl" not in parse_help(text_of("ik-now")).live_spellings
    assert not capabilities_of("ik-now").lists_gpu_flags


def test_a_version_is_read_wherever_it_stands() -> None:
    labels = {
        "version: 9202 (e0de4c241)\nbuilt with GNU 13.3.0 for Linux": "b9202",
        "version: 0.7.0 (build 11669, commit Debian)\n": "0.7.0",
        "version: 0.1.0-dev (build 10459, commit 41971)": "0.1.0-dev",
        "version: 0 (unknown)\n": None,
        "ggml_cuda_init: found 1 CUDA devices:\n  Device 0: x\nversion: 4522 (40254a51)": "b4522",
    }
    for text, label in labels.items():
        found = parse_version(text)
        assert found is not None
        assert found.label == label
        assert found.text.endswith(")")


def test_devices_are_read_with_their_memory() -> None:
    found = parse_devices(
        "Available devices:\n"
        "  CUDA0: NVIDIA GeForce RTX 4090 (24105 MiB, 23317 MiB free)\n"
        "  Vulkan1: llvmpipe (LLVM 19.1.7, 256 bits)\n"
    )
    sizes = [(one.name, one.total_mib, one.free_mib) for one in found]
    assert sizes == [("CUDA0", 24105, 23317), ("Vulkan1", None, None)]
    assert found[0].description == "NVIDIA GeForce RTX 4090"
    assert parse_devices("Available devices:\n  (none)\n") == ()


MANY = 200_000


def test_a_hostile_version_or_list_of_devices_is_read_in_no_time() -> None:
    began = time.process_time()
    for text in (
        "version: 1.1." + "1" * MANY,
        "version: " + "1" * MANY,
        "version: 1.1.1 (build 1" + "1" * 5000 + ", commit x)",
        "version: 1.1.1" + "x" * MANY + " (build 1, commit x)",
        "\n" * MANY,
        "  C0: x (" + "1" * 5000 + " MiB, 1 MiB free)",
        "  C0: " + "x" * MANY,
        "  " + "C" * MANY + "0: x",
    ):
        assert parse_version(text) is None
        assert all(device.total_mib is None for device in parse_devices(text))
    assert time.process_time() - began < 10.0


# Help texts of real builds, and of hostile ones.


@pytest.mark.parametrize("dialect", EXPECTED)
def test_how_a_build_binds_its_port_is_known_of_those_that_were_looked_at(dialect: str) -> None:
    found, text = capabilities_of(dialect), text_of(dialect)
    before = read_capabilities(parse_help(text.replace("--reuse-port", "--other")))
    is_ik = found.family is Family.IK
    assert found.port_option is (PortOption.REUSE_PORT if is_ik else PortOption.REUSE_ADDR)
    assert before.port_option is (PortOption.REUSE_PORT if is_ik else None)


def test_an_option_of_mainline_is_read_whole() -> None:
    found = capabilities_of("main-lm").help.option("--cache-type-k")
    assert found is not None
    assert found.spellings == ("-ctk", "--cache-type-k")
    assert (found.argument, found.default) == ("TYPE", "f16")
    assert found.env == "LLAMA_ARG_CACHE_TYPE_K"
    assert not found.is_removed


def test_a_removed_option_is_listed_but_not_live_and_comes_after_a_live_one() -> None:
    parsed = capabilities_of("main-0x").help
    twice = parse_help(
        "--thing N                               the argument has been removed. use --other\n"
        "--thing N                               how many (default: 3)\n"
    )
    removed, live = parsed.option("--draft-max"), twice.option("--thing")
    assert removed is not None
    assert removed.is_removed
    assert "--draft-max" not in parsed.live_spellings
    assert "--spec-draft-n-max" in parsed.live_spellings
    assert live is not None
    assert live.default == "3"


@pytest.mark.parametrize("dialect", HELP_OF)
def test_every_line_that_begins_an_option_is_read_as_one_with_its_variable(dialect: str) -> None:
    """A count by another rule than the parser's: lines whose first word is a flag."""
    parsed, text = capabilities_of(dialect).help, text_of(dialect)
    heads = [
        line.split()[0].rstrip(",")
        for line in text.splitlines()
        if line.lstrip().startswith("-") and len(line) - len(line.lstrip()) <= 12
    ]
    heads = [head for head in heads if head.lstrip("-")[:1].isalpha()]
    listed = {spelling for entry in parsed.options for spelling in entry.spellings}
    assert {head.removesuffix("(s)") for head in heads} <= listed
    assert len(parsed.options) == len(heads)
    assert len(parsed.options) > 200
    assert not any("  " in entry.argument for entry in parsed.options)
    # Some variables stand after a blank line within the description.
    named = [entry.env for entry in parsed.options if entry.env is not None]
    assert len(named) == text.count("(env: ")


HOSTILE = {
    "on and off": "--a " + "on-" * MANY,
    "types": "--spec-type SPEC  types: " + "a, " * MANY + "!",
    "blanks among types": "--spec-type SPEC  types: " + " " * MANY + "!",
    "types in brackets": "--spec-type [" + "none|" * MANY,
    "a huge default": "--port N  (default: " + "9" * MANY + ")\n--spec-draft-n-max N  (default: "
    + "9" * 1500 + ")\n--spec-draft-p-min N  (default: " + "9" * 1500 + ".5)",
    "many spellings on a line": "-a " * MANY,
    "many placeholders on a line": "-a " + "N, -b " * MANY,
    "nested defaults": "--a N\n" + " " * 40 + "(default: " * MANY,
    "balanced parentheses in a default": "--a N\n" + " " * 40 + "(default: " + "()" * MANY,
    "a long placeholder": "--a " + "on " * MANY,
    "a long gap": "--a" + " " * MANY + "x",
    "a long description": "--a N\n" + (" " * 40 + "word\n") * (MANY // 10),
    "blank lines": "\n" * MANY,
    "many options": "--a N\n" * (MANY // 4),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_read_in_no_time(name: str) -> None:
    """Anything worse than linear takes minutes at this size; linear takes some 0.1 s."""
    began = time.process_time()
    parsed = parse_help(HOSTILE[name])
    found = read_capabilities(parsed)
    assert time.process_time() - began < 10.0
    assert all(len(entry.description) <= 10_000 for entry in parsed.options)
    assert (found.default_port, found.default_n_max) == (None, None)
