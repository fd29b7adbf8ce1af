from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunerd.core.embedded_command import (
    BadCommandLineError,
    CommandLine,
    Files,
    help_text,
    option_text,
    parse_command,
)
from tunerd.core.embedded_options import BY_SPELLING, OPTIONS
from tunerd.core.embedded_values import Member, Setting, margins, whole
from tunerd.core.engine import Family, FitStyle, SpecStyle, read_capabilities
from tunerd.core.help_text import parse_help

GOLDEN = Path(__file__).parent / "golden" / "cmdline" / "main-0x"


def _no_file(path: str) -> str:
    raise FileNotFoundError(path)


NO_FILES = Files(read=_no_file, is_folder=lambda _: False)


def _parse(*arguments: str) -> CommandLine:
    return parse_command(arguments, NO_FILES)


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
    assert capabilities.kv_types[:4] == ("f32", "f16", "bf16", "q8_0")
    assert capabilities.fit is FitStyle.ON_OFF
    assert capabilities.has_load_mode
    assert (capabilities.default_n_max, capabilities.default_p_min) == (3, 0.0)
    assert capabilities.default_port == 8080


def test_the_help_lists_every_spelling_and_marks_the_removed_ones() -> None:
    listed = parse_help(help_text())

    live = {
        spelling
        for option in OPTIONS
        if not option.is_removed
        for spelling in (*option.spellings, *option.negations)
    }
    assert listed.live_spellings == live
    assert {spelling for option in listed.options for spelling in option.spellings} == set(
        BY_SPELLING
    )


def test_no_two_options_share_a_spelling() -> None:
    spellings = [
        spelling for option in OPTIONS for spelling in (*option.spellings, *option.negations)
    ]

    assert len(spellings) == len(set(spellings))


def test_every_field_is_set_by_one_option() -> None:
    """But for those that have several sources."""
    shared = {"api_keys", "chat_template", "default_template_kwargs", "verbosity"}
    files = Files(read=lambda _: "text", is_folder=lambda _: True)
    fields: dict[str, set[tuple[str, ...]]] = {}
    for option in OPTIONS:
        for value in ("1", "on", "q8_0", "none", "greedy", '{"a": 1}'):
            arguments = [option.spellings[0]] + ([value] if option.argument else [])
            try:
                settings = parse_command(arguments, files).settings
            except BadCommandLineError:
                continue
            for setting in settings:
                if not setting.is_bit:
                    fields.setdefault(setting.field, set()).add(option.spellings)

    assert {field for field, options in fields.items() if len(options) > 1} == shared
    assert len(fields) > 60


def test_every_line_of_the_help_fits_110_columns() -> None:
    lines = [line for line in help_text().splitlines() if "ngram-map-k,ngram-map-k4v" not in line]

    assert max(len(line) for line in lines) <= 110


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("cpu-embedded*.txt")), ids=lambda path: path.stem
)
def test_what_the_embedded_profiles_render_is_accepted(path: Path) -> None:
    arguments = [
        word
        for line in path.read_text().splitlines()
        if not line.startswith("#")
        for word in shlex.split(line)
    ]

    command = _parse(*arguments)

    assert Setting("model.path", arguments[arguments.index("--model") + 1]) in command.settings
    assert command.warnings == ()


# What a build of August 2026 printed, without the usage excerpt.
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nope"], "error: invalid argument: --nope"),
        (["positional"], "error: invalid argument: positional"),
        (["--mlock"], "error: invalid argument: --mlock"),
        (["--no-mmap"], "error: invalid argument: --no-mmap"),
        (["--no_ctx_size"], "error: invalid argument: --no-ctx-size"),
        (["-c"], 'error while handling argument "-c": expected value for argument'),
        (["-c", "abc"], 'error while handling argument "-c": stoi'),
        (["-c", "99999999999"], 'error while handling argument "-c": stoi'),
        (["--ctx_size", "abc"], 'error while handling argument "--ctx-size": stoi'),
        (["--temp", "abc"], 'error while handling argument "--temp": stof'),
        (["-ctk", "foo"], 'error while handling argument "-ctk": Unsupported cache type: foo'),
        (
            ["--spec-type", "mtp"],
            'error while handling argument "--spec-type": unknown speculative type: mtp',
        ),
        (
            ["--draft-max", "3"],
            (
                'error while handling argument "--draft-max": the argument has been removed.'
                " use --spec-draft-n-max or --spec-ngram-mod-n-max"
            ),
        ),
        (
            ["-np", "0"],
            'error while handling argument "-np": error: invalid value for n_parallel\n',
        ),
        (
            ["--flash-attn", "maybe"],
            (
                'error while handling argument "--flash-attn":'
                " error: unknown value for --flash-attn: 'maybe'\n"
            ),
        ),
        (
            ["-fit", "maybe"],
            "error while handling argument \"-fit\": error: unknown value for --fit: 'maybe'\n",
        ),
        (["-lm", "foo"], 'error while handling argument "-lm": invalid value'),
        (
            ["--reasoning-format", "foo"],
            'error while handling argument "--reasoning-format": Unknown reasoning format: foo',
        ),
        (["-ngl", "foo"], 'error while handling argument "-ngl": stoi'),
        (
            ["--api-key-file", "/nope"],
            (
                'error while handling argument "--api-key-file":'
                " error: failed to open file '/nope'\n"
            ),
        ),
    ],
)
def test_a_bad_argument_is_refused_in_llama_servers_words(arguments: list[str], words: str) -> None:
    refusal = _refusal("-m", "model.gguf", *arguments)

    option = BY_SPELLING.get(arguments[0])
    if words.startswith("error: "):
        assert refusal == words
    elif option is not None:
        excerpt = f"\n\nusage:\n{option_text(option)}\n\nto show complete usage, run with -h"
        assert refusal == words + excerpt
    else:
        assert refusal.startswith(words)


def test_the_first_bad_argument_is_the_one_that_is_named() -> None:
    assert _refusal("--first", "-c", "abc") == "error: invalid argument: --first"


def test_the_version_is_printed_whatever_follows() -> None:
    assert _parse("--version", "--nope").wants_version
    assert "--nope" in _refusal("--help", "--nope")


def test_an_option_given_twice_is_warned_about_and_the_last_one_counts() -> None:
    command = _parse("--port", "1", "--port", "2")

    assert command.settings == (Setting("port", 1), Setting("port", 2))
    assert "argument '--port' specified multiple times" in command.warnings[0]


def test_kinds_of_speculation_add_up() -> None:
    command = _parse("--spec-type", "ngram-mod", "--spec-type", "draft-mtp,ngram-simple")

    names = [
        setting.value.name for setting in command.settings if isinstance(setting.value, Member)
    ]
    assert names == [
        "COMMON_SPECULATIVE_TYPE_NGRAM_MOD",
        "COMMON_SPECULATIVE_TYPE_DRAFT_MTP",
        "COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE",
    ]
    assert command.warnings == ()


def test_gpu_layers_are_warned_about_as_in_any_build_without_a_gpu() -> None:
    assert _parse("-ngl", "all").warnings == (
        "warning: no usable GPU found, --gpu-layers option will be ignored",
    )


def test_keys_are_read_from_a_file_without_its_comments() -> None:
    files = Files(read=lambda _: "# ours\none\n\ntwo\n", is_folder=lambda _: False)

    settings = parse_command(["--api-key-file", "keys", "--api-key", "three"], files).settings

    assert [setting.value for setting in settings] == ["one", "two", "three"]
    assert all(setting.field == "api_keys" and setting.is_added for setting in settings)


def test_a_switch_and_its_negation_set_the_same_field() -> None:
    assert _parse("--jinja", "--no-jinja").settings == (
        Setting("use_jinja", True),
        Setting("use_jinja", False),
    )


def test_thinking_is_switched_for_the_parser_and_for_the_template() -> None:
    on, template = _parse("--reasoning", "off").settings
    assert (on.field, on.value) == ("enable_reasoning", 0)
    assert (template.field, dict(template.value)) == (  # type: ignore[arg-type]  # a mapping
        "default_template_kwargs",
        {"enable_thinking": "false"},
    )
    assert len(_parse("--reasoning", "auto").settings) == 1


def test_one_margin_is_for_every_device() -> None:
    assert margins("512") == (512 * 1024 * 1024,) * 16
    assert margins("1,2,3")[:4] == tuple(n * 1024 * 1024 for n in (1, 2, 3, 3))


@given(st.integers(-(2**31), 2**31 - 1), st.sampled_from(["", "x", ".5", " 7"]))
def test_numbers_are_read_as_c_reads_them(number: int, rest: str) -> None:
    assert whole(f" {number}{rest}") == number
