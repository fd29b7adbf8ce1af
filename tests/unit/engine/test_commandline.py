"""A profile becomes a command line: the same one every time, of flags that the build has."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders import (
    HELP_OF,
    capabilities_of,
    recorded_context,
    resolved,
    shipped_sources,
)
from tests.support.folders import DATA
from tests.support.profiles import KEYS, PROFILE_DATA, context, profile_of
from tunerd.engine.commandline import CommandLine, Refusal, render
from tunerd.engine.flags import ALL_FLAGS, KeyFlag
from tunerd.profile.layers import Layer
from tunerd.profile.schema import all_keys

DIALECTS = st.sampled_from(sorted(HELP_OF))


def line(dialect: str, *, has_gpu: bool = True, cores: int | None = 8, **data: Any) -> CommandLine:
    result = rendered(dialect, has_gpu=has_gpu, cores=cores, **data)
    assert isinstance(result, CommandLine), [str(refusal) for refusal in result]
    return result


def rendered(
    dialect: str, *, has_gpu: bool = True, cores: int | None = 8, **data: Any
) -> CommandLine | tuple[Refusal, ...]:
    profile = profile_of({key.replace("__", "."): value for key, value in data.items()})
    return render(profile, capabilities_of(dialect), context(has_gpu=has_gpu, cores=cores))


def refusal(dialect: str, *, has_gpu: bool = True, cores: int | None = 8, **data: Any) -> Refusal:
    result = rendered(dialect, has_gpu=has_gpu, cores=cores, **data)
    assert not isinstance(result, CommandLine)
    (found,) = result
    return found


def flags(command: CommandLine) -> dict[str, str | None]:
    return {argument.flag: argument.value for argument in command.arguments}


def notes(command: CommandLine) -> dict[str, str]:
    return {note.key: note.text for note in command.notes}


# What every key becomes, in words that differ between dialects.


@pytest.mark.parametrize(
    ("mode", "legacy"),
    [
        ("none", ["--no-mmap"]),
        ("mlock", ["--no-mmap", "--mlock"]),
        ("mmap+mlock", ["--mlock"]),
        ("dio", ["--direct-io"]),
        ("mmap", []),
        ("auto", []),
    ],
)
def test_a_load_mode_is_spelled_as_the_build_wants_it(mode: str, legacy: list[str]) -> None:
    assert flags(line("main-0x", serving__load_mode=mode))["--load-mode"] == mode
    words = [word for word in line("main-mid", serving__load_mode=mode).argv if word in
             {"--no-mmap", "--mlock", "--direct-io", "--load-mode"}]  # fmt: skip
    assert words == legacy


def test_a_load_mode_that_a_build_has_not_is_refused() -> None:
    found = refusal("ik-now", serving__load_mode="dio")
    assert "--direct-io" in found.reason
    assert found.origin.layer is Layer.SITE


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        ("main-pr", ["--spec-type", "mtp", "--spec-draft-n-max", "2", "--spec-draft-p-min", "0.5"]),
        ("main-mid", ["--spec-type", "draft-mtp", "--spec-draft-n-max", "2", "--spec-draft-p-min", "0.5"]),
        ("ik-may", ["--multi-token-prediction", "--draft-max", "2", "--draft-p-min", "0.5"]),
        ("ik-now", ["--spec-type", "mtp:n_max=2,p_min=0.5"]),
    ],
)  # fmt: skip
def test_mtp_is_spelled_as_the_build_wants_it(dialect: str, words: list[str]) -> None:
    command = line(dialect, speculation__type="mtp", speculation__n_max=2, speculation__p_min=0.5)
    start = command.argv.index(words[0])
    assert list(command.argv[start : start + len(words)]) == words


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        ("main-0x", ["--spec-draft-n-min", "2", "--spec-draft-p-min", "0.00001"]),
        ("ik-may", ["--draft-min", "2", "--draft-p-min", "0.00001"]),
        ("ik-now", ["--spec-type", "mtp:n_max=3,n_min=2,p_min=0.00001"]),
    ],
)
def test_the_least_draft_and_a_tiny_probability_reach_the_engine(
    dialect: str, words: list[str]
) -> None:
    command = line(
        dialect,
        speculation__type="mtp",
        speculation__n_max=3,
        speculation__n_min=2,
        speculation__p_min=0.00001,
    )
    start = command.argv.index(words[0])
    assert list(command.argv[start : start + len(words)]) == words


@pytest.mark.parametrize("dialect", ["main-old", "bee-01"])
def test_mtp_on_a_build_without_it_is_refused_with_what_it_has(dialect: str) -> None:
    found = refusal(dialect, speculation__type="mtp")
    assert found.key == "speculation.type"
    assert dialect in found.reason
    assert "ngram-mod" in found.reason
    assert "site.toml" in str(found)


def test_a_kind_with_a_draft_model_needs_one() -> None:
    found = refusal("main-0x", speculation__type="dflash")
    assert "draft_model" in found.hint
    command = line("main-0x", speculation__type="dflash", speculation__draft_model="/d.gguf")
    assert flags(command)["--model-draft"] == "/d.gguf"


def test_fit_is_spelled_as_the_build_wants_it() -> None:
    assert list(flags(line("main-0x", memory__fit_mib=900)).items())[-2:] == [
        ("--fit", "on"), ("--fit-target", "900"),
    ]  # fmt: skip
    assert flags(line("ik-now", memory__fit_mib=900))["--fit-margin"] == "900"
    assert flags(line("ik-now", memory__fit_mib=900))["--fit"] is None


def test_fit_can_be_switched_off_and_on_without_a_margin() -> None:
    assert flags(line("main-0x", memory__fit=False))["--fit"] == "off"
    assert "--fit-target" not in flags(line("main-0x", memory__fit=False))
    assert "--fit" not in flags(line("ik-now", memory__fit=False))
    assert flags(line("main-0x", memory__fit=True, memory__fit_mib="default"))["--fit"] == "on"
    assert "--fit" in flags(line("ik-now", memory__fit=True, memory__fit_mib="default"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_gpu_layers", 20), ("n_cpu_moe", 11), ("cpu_moe", True), ("override_tensor", ["a=CPU"])],
)
def test_a_placement_by_hand_switches_fit_off(key: str, value: Any) -> None:
    command = line("main-0x", **{f"memory__{key}": value, "memory__fit_mib": 512})
    assert flags(command)["--fit"] == "off"
    assert "--fit-target" not in flags(command)
    assert "by hand" in notes(command)["memory.fit_mib"]
    assert "--fit" not in flags(line("ik-now", **{f"memory__{key}": value}))


@pytest.mark.parametrize("dialect", HELP_OF)
def test_without_a_gpu_nothing_is_said_about_one(dialect: str) -> None:
    command = line(
        dialect, has_gpu=False, memory__fit_mib=512, memory__n_gpu_layers=5, memory__device="CUDA0",
        memory__fit=False,
    )  # fmt: skip
    gpu = {"--fit", "--fit-target", "--fit-margin", "--n-gpu-layers", "--gpu-layers", "--device"}
    assert gpu.isdisjoint(command.argv)
    for key in ("fit_mib", "n_gpu_layers", "device", "fit"):
        assert "no usable GPU" in notes(command)[f"memory.{key}"]


def test_physical_cores_are_counted_and_unknown_is_refused() -> None:
    assert flags(line("main-0x", serving__threads="physical"))["--threads"] == "8"
    found = refusal("main-0x", cores=None, serving__threads="physical")
    assert (found.key, "number" in found.hint) == ("serving.threads", True)


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0.0"), (1, "1"), (0.1234567, "0.1234567"), (1e-05, "0.00001")]
)
def test_a_number_keeps_its_digits_and_has_no_exponent(value: float, shown: str) -> None:
    assert flags(line("main-0x", serving__temp=value))["--temp"] == shown


def test_what_only_tunerd_suggested_is_left_out_where_a_build_has_no_flag() -> None:
    command = line("ik-now")
    assert "--log-verbosity" in notes(command)["serving.log_verbosity"]
    found = refusal("ik-now", serving__log_verbosity=3)
    assert "engines.ik" in found.hint


def test_every_refusal_is_reported_at_once() -> None:
    result = rendered("ik-now", serving__log_verbosity=3, serving__poll=1, memory__n_cpu_ffn=2)
    assert not isinstance(result, CommandLine)
    assert [found.key for found in result] == [
        "serving.poll", "serving.log_verbosity", "memory.n_cpu_ffn",
    ]  # fmt: skip


# Arguments of the user's own.


def test_extra_arguments_are_passed_and_marked() -> None:
    command = line("main-0x", extra_args=["--lora", "a b.gguf", "--no-perf"])
    assert command.argv[-3:] == ("--lora", "a b.gguf", "--no-perf")
    assert {a.key for a in command.arguments[-3:]} == {"extra_args"}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--port", "1"], "serving.port"),
        (["-c", "1"], "serving.ctx_size"),
        (["--ctx_size", "1"], "serving.ctx_size"),
        (["--mlock"], "serving.load_mode"),
        (["--spec-type", "none"], "speculation.type"),
        (["-m", "x"], "model.path"),
    ],
)
def test_an_extra_argument_may_not_repeat_a_key(words: list[str], key: str) -> None:
    result = rendered("main-lm", extra_args=words)
    assert not isinstance(result, CommandLine)
    assert key in result[0].reason


@pytest.mark.parametrize(
    "flag", ["--api-key", "--api_key", "--hf-token", "-hft", "--hf-token-draft"]
)
def test_a_secret_may_not_be_an_extra_argument(flag: str) -> None:
    result = rendered("main-lm", extra_args=[flag, "hunter2"])
    assert not isinstance(result, CommandLine)
    assert "process list" in result[0].reason
    assert "hunter2" not in str(result[0])


def test_an_extra_argument_may_not_repeat_a_flag_that_is_there_for_another_reason() -> None:
    sizes = ["--spec-ngram-mod-n-max", "48"]
    assert line("main-0x", extra_args=sizes).argv[-2:] == tuple(sizes)
    result = rendered(
        "main-0x", extra_args=sizes, speculation__type="ngram-mod", speculation__n_max=64
    )
    assert not isinstance(result, CommandLine)
    assert "speculation.n_max" in result[0].reason


@pytest.mark.parametrize("word", ["--nope", "-zz", "--port=9", "--draft-max"])
def test_an_extra_flag_that_the_build_does_not_list_is_refused(word: str) -> None:
    result = rendered("main-0x", extra_args=[word])
    assert not isinstance(result, CommandLine)


def test_a_flag_of_the_same_name_is_the_users_own_where_the_key_has_no_flag() -> None:
    """ik's `--verbosity` is another scale than `--log-verbosity`, which ik has not."""
    assert line("ik-now", extra_args=["--verbosity", "1"]).argv[-2:] == ("--verbosity", "1")
    assert not isinstance(rendered("main-0x", extra_args=["--verbosity", "1"]), CommandLine)


def test_every_row_of_the_flag_table_is_a_profile_key() -> None:
    keys = [row.key for row in ALL_FLAGS]
    assert set(keys) <= set(all_keys())
    assert len(keys) == len(set(keys))
    assert set(keys) - set(KEYS) == {"serving.api_key_file"}, "give random profiles the new key"


@pytest.mark.parametrize("row", ALL_FLAGS, ids=[row.key for row in ALL_FLAGS])
def test_every_row_of_the_flag_table_is_a_flag_of_some_build(row: KeyFlag) -> None:
    for spelling in row.spellings:
        owners = [d for d in HELP_OF if spelling in capabilities_of(d).flags]
        assert owners, f"no captured build takes {spelling}"


# Properties.


@settings(max_examples=200, deadline=None)
@given(PROFILE_DATA, DIALECTS, st.booleans())
def test_a_command_line_holds_known_flags_once_and_is_the_same_every_time(
    data: dict[str, Any], dialect: str, has_gpu: bool
) -> None:
    capabilities = capabilities_of(dialect)
    result = render(profile_of(data), capabilities, context(has_gpu=has_gpu))
    assert result == render(profile_of(data), capabilities, context(has_gpu=has_gpu))
    if not isinstance(result, CommandLine):
        assert all(refusal.key in data for refusal in result)
        assert all(refusal.hint and refusal.reason for refusal in result)
        return
    names = [argument.flag for argument in result.arguments]
    assert set(names) <= capabilities.flags
    assert len(names) == len(set(names))
    assert all("\n" not in word and "\0" not in word for word in result.argv)
    # Every key that somebody set left a trace, and every flag says who set it.
    seen = {argument.key for argument in result.arguments}
    assert set(data) <= seen | {note.key for note in result.notes}
    for argument in result.arguments:
        is_theirs = argument.key in data and argument.key != "speculation.type"
        assert not is_theirs or argument.origin.layer is Layer.SITE


# Each shipped profile on each dialect is exactly one command line, or a refusal with its reason.
# `TUNERD_TEST_UPDATE_GOLDEN=1` rewrites the files; the review reads the diff.

GOLDEN = DATA / "golden" / "cmdline"


def golden_text(profile_name: str, dialect: str) -> str:
    capabilities = capabilities_of(dialect)
    profile = resolved(profile_name, capabilities.family)
    result = render(profile, capabilities, recorded_context(profile))
    if isinstance(result, CommandLine):
        lines = [" ".join(argument.words) for argument in result.arguments]
        notes = [f"# {note.key}: {note.text}" for note in result.notes]
        return "\n".join([*lines, *notes]) + "\n"
    return "".join(f"REFUSED {refusal}\n" for refusal in result)


@pytest.mark.parametrize("dialect", HELP_OF)
@pytest.mark.parametrize("profile_name", shipped_sources().names)
def test_a_shipped_profile_renders_to_its_golden_line(profile_name: str, dialect: str) -> None:
    path = GOLDEN / dialect / f"{profile_name}.txt"
    text = golden_text(profile_name, dialect)
    if os.environ.get("TUNERD_TEST_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
