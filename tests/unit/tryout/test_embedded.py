from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.folders import DATA
from tunerd.engine.capabilities import FitStyle, SpecStyle, parse_help, read_capabilities
from tunerd.tryout.embedded import (
    OPTIONS,
    BadCommandLineError,
    CommandLine,
    Member,
    help_text,
    margins,
    option_text,
    parse_command,
)
from tunerd.words import Family

GOLDEN = DATA / "golden" / "cmdline" / "main-0x"


def _parse(*arguments: str) -> CommandLine:
    return parse_command(arguments)


def _refusal(*arguments: str) -> str:
    with pytest.raises(BadCommandLineError) as caught:
        _parse(*arguments)
    return str(caught.value)


def test_probing_reads_the_help_as_that_of_a_mainline_build_since_september_2026() -> None:
    capabilities = read_capabilities(parse_help(help_text()))

    assert capabilities.family is Family.MAINLINE
    assert capabilities.dialect == "main-0x"
    assert capabilities.spec_style is SpecStyle.SPLIT
    assert "draft-mtp" in capabilities.spec_types
    assert capabilities.fit is FitStyle.ON_OFF
    assert capabilities.has_load_mode
    assert (capabilities.default_n_max, capabilities.default_p_min) == (3, 0.0)
    assert capabilities.default_port == 8080


def test_the_help_lists_every_spelling_once() -> None:
    spellings = [word for option in OPTIONS for word in (*option.spellings, *option.negations)]

    assert len(spellings) == len(set(spellings))
    assert parse_help(help_text()).live_spellings == set(spellings)


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("cpu-embedded*.txt")), ids=lambda path: path.stem
)
def test_what_the_embedded_profiles_render_is_accepted(path: Path) -> None:
    arguments = shlex.split(path.read_text(), comments=True)

    command = _parse(*arguments)

    assert ("model.path", arguments[arguments.index("--model") + 1]) in command.settings


# What a build of August 2026 printed, without the usage excerpt.
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nope"], "error: invalid argument: --nope"),
        (["--no_ctx_size"], "error: invalid argument: --no-ctx-size"),
        (["--first", "-c", "abc"], "error: invalid argument: --first"),
        (["-c"], "expected value for argument"),
        (["-c", "abc"], "stoi"),
        (["--temp", "abc"], "stof"),
        (["-ctk", "foo"], "Unsupported cache type: foo"),
        (["--spec-type", "mtp"], "unknown speculative type: mtp"),
        (["-fit", "maybe"], "error: unknown value for --fit: 'maybe'\n"),
        (["--api-key-file", "/nope"], "error: failed to open file '/nope'\n"),
    ],
)
def test_a_bad_argument_is_refused_in_llama_servers_words(arguments: list[str], words: str) -> None:
    flag = arguments[0]
    known = next((option for option in OPTIONS if flag in option.spellings), None)
    if known is not None:
        words = (
            f'error while handling argument "{flag}": {words}\n\n'
            f"usage:\n{option_text(known)}\n\nto show complete usage, run with -h"
        )
    assert _refusal("-m", "model.gguf", *arguments) == words


def test_the_version_is_printed_whatever_follows() -> None:
    assert _parse("--version", "--nope").wants_version
    assert "--nope" in _refusal("--help", "--nope")


def test_kinds_of_speculation_add_up() -> None:
    settings = _parse("--spec-type", "ngram-mod", "--spec-type", "draft-mtp,ngram-simple").settings

    assert [field for field, _ in settings] == ["+speculative.types"] * 2
    names = [member.name for _, value in settings for member in value]
    assert names == [
        "COMMON_SPECULATIVE_TYPE_NGRAM_MOD",
        "COMMON_SPECULATIVE_TYPE_DRAFT_MTP",
        "COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE",
    ]


def test_keys_are_read_from_a_file_without_its_comments(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\none\n\ntwo\n")

    settings = _parse("--api-key-file", str(keys), "--api-key", "three").settings

    assert settings == (("+api_keys", ("one", "two")), ("+api_keys", ("three",)))


def test_one_margin_is_for_every_device() -> None:
    assert margins("512") == (512 * 1024 * 1024,) * 16
    assert margins("1,2,3")[:4] == tuple(n * 1024 * 1024 for n in (1, 2, 3, 3))


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["--port", "1", "--port", "2"], [("port", 1), ("port", 2)]),
        (["--jinja", "--no-jinja"], [("use_jinja", True), ("use_jinja", False)]),
        # For the parser of answers, and for the template.
        (["--reasoning", "off"],
         [("enable_reasoning", 0), ("+default_template_kwargs", {"enable_thinking": "false"})]),
        (["--reasoning", "auto"], [("enable_reasoning", -1)]),
        (["-lm", "mmap+mlock"],
         [("load_mode", Member("llama_load_mode", "LLAMA_LOAD_MODE_MMAP_MLOCK"))]),
    ],
)  # fmt: skip
def test_an_option_sets_fields_in_the_order_of_the_command_line(
    arguments: list[str], settings: list[tuple[str, object]]
) -> None:
    assert list(_parse(*arguments).settings) == settings
