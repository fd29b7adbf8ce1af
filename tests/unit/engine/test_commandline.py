"""A profile becomes a command line: the same one every time, of flags that the build has."""

from __future__ import annotations

import json
from dataclasses import replace
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
from tests.support.transcripts import compare, inputs_of, transcript
from tunerd.engine.flags import (
    FLAG_ROWS,
    PLAIN_FLAGS,
    CommandLine,
    Refusal,
    named_files,
    render,
)
from tunerd.profile.layers import Layer
from tunerd.profile.schema import all_keys

DIALECTS = st.sampled_from(sorted(HELP_OF))


def line(dialect: str, *, has_gpu: bool = True, **data: Any) -> CommandLine:
    result = rendered(dialect, has_gpu=has_gpu, **data)
    assert isinstance(result, CommandLine), [str(refusal) for refusal in result]
    return result


def rendered(
    dialect: str, *, has_gpu: bool = True, cores: int | None = 8, **data: Any
) -> CommandLine | tuple[Refusal, ...]:
    """Keys may be words: `serving__port`."""
    profile = profile_of({key.replace("__", "."): value for key, value in data.items()})
    return render(profile, capabilities_of(dialect), context(has_gpu=has_gpu, cores=cores))


def flags(command: CommandLine) -> dict[str, str | None]:
    return {argument.flag: argument.value for argument in command.arguments}


def notes(command: CommandLine) -> dict[str, str]:
    return {note.key: note.text for note in command.notes}


# What every key becomes, in words that differ between dialects.

DEPTH = {"speculation.n_max": 2, "speculation.p_min": 0.5}
MTP: dict[str, Any] = {"speculation.type": "mtp", **DEPTH}
DRAFT: dict[str, Any] = {"speculation.type": "draft", "speculation.draft_model": "/d.gguf"}
TINY = {**MTP, "speculation.n_min": 1, "speculation.p_min": 0.00001}
NO_MARGIN = {"memory.fit": True, "memory.fit_mib": "default"}


@pytest.mark.parametrize(
    ("dialect", "data", "words", "absent"),
    [
        *(("main-0x", {"serving.load_mode": mode}, f"--load-mode {mode}", "--no-mmap --mlock")
          for mode in ("none", "mlock", "mmap+mlock", "dio", "mmap", "auto")),
        ("main-lm", {"serving.load_mode": "auto"}, "", "--load-mode"),
        ("main-lm", {"serving.load_mode": "mmap"}, "--load-mode mmap", ""),
        ("main-mid", {"serving.load_mode": "none"}, "--no-mmap", "--mlock --load-mode"),
        ("main-mid", {"serving.load_mode": "mlock"}, "--no-mmap --mlock", "--load-mode"),
        ("main-mid", {"serving.load_mode": "mmap+mlock"}, "--mlock", "--no-mmap"),
        ("main-mid", {"serving.load_mode": "dio"}, "--direct-io", "--no-mmap --mlock"),
        *(("main-mid", {"serving.load_mode": mode}, "", "--no-mmap --mlock --direct-io --load-mode")
          for mode in ("mmap", "auto")),
        ("main-pr", MTP, "--spec-type mtp --spec-draft-n-max 2 --spec-draft-p-min 0.5", ""),
        ("main-mid", MTP, "--spec-type draft-mtp --spec-draft-n-max 2 --spec-draft-p-min 0.5", ""),
        ("ik-may", MTP, "--multi-token-prediction --draft-max 2 --draft-p-min 0.5", ""),
        ("ik-now", MTP, "--spec-type mtp:n_max=2,p_min=0.5", ""),
        ("main-0x", TINY, "--spec-draft-n-min 1 --spec-draft-p-min 0.00001", ""),
        ("ik-may", TINY, "--draft-min 1 --draft-p-min 0.00001", ""),
        ("ik-now", TINY, "--spec-type mtp:n_max=2,n_min=1,p_min=0.00001", ""),
        ("main-0x", {"speculation.type": "dflash", "speculation.draft_model": "/d.gguf"},
         "--model-draft /d.gguf", ""),
        # Three tokens are a model's depth; n-gram kinds go to 16 and 64 by themselves.
        *((dialect, {"speculation.type": "ngram-mod", "speculation.n_min": 8}, said, flag)
          for dialect, said, flag in (
              ("main-0x", "--spec-type ngram-mod --spec-ngram-mod-n-min 8", "--spec-ngram-mod-n-max"),
              ("main-old", "--spec-type ngram-mod --draft-min 8", "--draft-max"),
              ("ik-now", "--spec-type ngram-mod:n_min=8", ""))),
        # What a kind takes no notice of is left out, also where the build takes the word.
        *((dialect, {"speculation.type": kind, "speculation.ngram_size_n": 4, "speculation.ngram_size_m": 2},
           said, "--spec-ngram-size-n --spec-ngram-size-m" if kind == "ngram-cache" else "")
          for dialect, kind, said in (
              ("ik-now", "ngram-cache", "--spec-type ngram-cache"),
              ("ik-now", "ngram-mod", "--spec-type ngram-mod:ngram_size_n=4"),
              ("ik-now", "ngram-simple", "--spec-type ngram-simple:ngram_size_n=4,ngram_size_m=2"),
              ("main-old", "ngram-cache", "--spec-type ngram-cache"),
              ("main-0x", "ngram-cache", "--spec-type ngram-cache"))),
        *((dialect, {**MTP, "speculation.ctx_size": 512}, "", "--ctx-size-draft --spec-draft-ctx-size")
          for dialect in ("ik-may", "ik-now", "bee-03")),
        *((dialect, {**DRAFT, "speculation.ctx_size": 512}, "--ctx-size-draft 512", "")
          for dialect in ("main-old", "ik-may")),
        ("main-0x", {"memory.fit_mib": 900}, "--fit on --fit-target 900", ""),
        ("ik-now", {"memory.fit_mib": 900}, "--fit --fit-margin 900", ""),
        ("main-0x", {"memory.fit": False}, "--fit off", "--fit-target"),
        ("ik-now", {"memory.fit": False}, "", "--fit"),
        ("main-0x", NO_MARGIN, "--fit on", "--fit-target"),
        ("main-0x", {"memory.n_gpu_layers": "auto", "memory.fit_mib": 9}, "--fit on --fit-target 9 --n-gpu-layers auto", ""),
        ("ik-now", NO_MARGIN, "--fit", "--fit-margin"),
        ("main-0x", {"serving.threads": "physical"}, "--threads 8", ""),
        *((dialect, {"memory.n_gpu_layers": "all"}, f"--n-gpu-layers {said}", "")
          for dialect, said in (("main-old", "all"), ("main-0x", "all"), ("bee-01", "all"),
                                ("ik-may", "999"), ("ik-now", "999"))),
        ("ik-now", {**DRAFT, "speculation.n_gpu_layers": "all"}, "--n-gpu-layers-draft 999", ""),
        ("main-old", {**DRAFT, "speculation.cpu_moe": True}, "--cpu-moe-draft", ""),
        ("main-0x", {**DRAFT, "speculation.cpu_moe": True}, "--spec-draft-cpu-moe", ""),
        *(("main-0x", {"serving.temp": value}, f"--temp {shown}", "")
          for value, shown in ((0.0, "0.0"), (1, "1"), (0.1234567, "0.1234567"), (1e-05, "0.00001"))),
        # ik's `--verbosity` is another scale than `--log-verbosity`, which ik has not.
        ("ik-now", {"extra_args": ["--verbosity", "1"]}, "--verbosity 1", "--log-verbosity"),
        ("main-0x", {"extra_args": ["--spec-ngram-mod-n-max", "48"]}, "--spec-ngram-mod-n-max 48", ""),
    ],
)  # fmt: skip
def test_a_key_is_spelled_as_the_build_wants_it(
    dialect: str, data: dict[str, Any], words: str, absent: str
) -> None:
    command = line(dialect, **data)
    assert f" {words} ".replace("  ", " ") in f" {' '.join(command.argv)} "
    assert set(absent.split()).isdisjoint(command.argv)


def test_what_a_build_cannot_serve_is_refused_as_in_the_golden_text() -> None:
    cases = []
    for heading, lines in inputs_of("errors/commandline"):
        told = []
        for line in lines:
            dialect, keys = line.split(": ", 1)
            result = rendered(dialect, cores=None, **json.loads(keys))
            assert not isinstance(result, CommandLine)
            assert "hunter2" not in str(result)
            told += [line, *(f"    {one}" for one in result)]
        cases.append((heading, told))
    assert sum(len(told) for _, told in cases) >= 50
    transcript("errors/commandline", cases)


def test_a_placement_by_hand_switches_fit_off() -> None:
    numbers: dict[str, Any] = {"n_gpu_layers": 20, "n_cpu_moe": 11, "cpu_moe": True}
    for key, value in [*numbers.items(), ("override_tensor", ["a=CPU"])]:
        own: dict[str, Any] = {f"memory__{key}": value, "memory__fit_mib": 512}
        command = line("main-0x", serving__ctx_size=4096, **own)
        assert flags(command)["--fit"] == "off"
        assert "--fit-target" not in flags(command)
        assert "by hand" in notes(command)["memory.fit_mib"]
        assert "--fit" not in flags(line("ik-now", **{f"memory__{key}": value}))
        # It lowers a context that nobody set, as it did on the command line that was adopted.
        assert "--fit" not in flags(line("main-0x", **own))
        assert flags(line("main-0x", memory__fit=False, **own))["--fit"] == "off"


GPU = {"fit_mib": 512, "n_gpu_layers": 5, "device": "CUDA0", "fit": True}


@pytest.mark.parametrize("dialect", HELP_OF)
def test_without_a_gpu_nothing_is_said_about_one(dialect: str) -> None:
    command = line(
        dialect, has_gpu=False, **{f"memory__{key}": value for key, value in GPU.items()}
    )
    gpu = {"--fit", "--fit-target", "--fit-margin", "--n-gpu-layers", "--gpu-layers", "--device"}
    assert gpu.isdisjoint(command.argv)
    assert all("no usable GPU" in notes(command)[f"memory.{key}"] for key in GPU)


def test_without_a_gpu_fit_is_switched_off_where_it_would_lower_a_context_to_the_ram() -> None:
    """The plan counted all of the context that was trained, and the server made less."""
    assert flags(line("main-0x", has_gpu=False, memory__fit=False))["--fit"] == "off"
    assert "--fit" not in line("ik-now", has_gpu=False, memory__fit=False).argv


@pytest.mark.parametrize("dialect", HELP_OF)
def test_a_card_that_the_profile_does_not_want_is_kept_idle(dialect: str) -> None:
    """Most builds use one unasked, of which neither the plan nor `fits` knew anything."""
    kind = "dflash" if dialect.startswith("bee") else "draft"
    drafting = {"speculation.type": kind, "speculation.draft_model": "/m/d.gguf"}
    profile = profile_of({"match.gpu": "none", "memory.device": "CUDA0", **drafting})
    here, build = context(has_gpu=False), capabilities_of(dialect)
    kept = render(profile, build, replace(here, keeps_off_gpu=True))
    usual = render(profile, build, here)
    assert isinstance(kept, CommandLine)
    assert isinstance(usual, CommandLine)
    more = {flag: value for flag, value in flags(kept).items() if flag not in usual.argv}
    draft = next(
        (one for one in ("--spec-draft-device", "--device-draft") if one in build.flags), None
    )
    if "--device" in build.flags:
        assert more == {"--device": "none"} | ({draft: "none"} if draft else {})
    elif "--n-gpu-layers" in build.flags:
        assert more == {"--n-gpu-layers": "0"}
    assert more
    assert {one.key for one in kept.arguments if one.flag in more} == {"match.gpu"}


def test_what_only_tunerd_suggested_is_left_out_where_a_build_has_no_flag() -> None:
    """And what somebody set is refused, all of it at once."""
    assert "--log-verbosity" in notes(line("ik-now"))["serving.log_verbosity"]
    result = rendered("ik-now", serving__log_verbosity=3, serving__poll=1, memory__n_cpu_ffn=2)
    assert not isinstance(result, CommandLine)
    keys = ["serving.poll", "serving.log_verbosity", "memory.n_cpu_ffn"]
    assert [found.key for found in result] == keys


# Arguments of the user's own.


def test_extra_arguments_are_passed_and_marked() -> None:
    command = line("main-0x", extra_args=["--lora", "a b.gguf", "--no-perf"])
    assert command.argv[-3:] == ("--lora", "a b.gguf", "--no-perf")
    assert {a.key for a in command.arguments[-3:]} == {"extra_args"}


def test_every_row_of_the_flag_table_is_a_profile_key() -> None:
    keys = [row.key for row in PLAIN_FLAGS]
    assert set(keys) <= set(all_keys())
    assert len(keys) == len(set(keys))
    assert set(keys) - set(KEYS) == {"serving.api_key_file"}


def test_every_row_of_the_flag_table_is_a_flag_of_some_build() -> None:
    taken = {flag for dialect in HELP_OF for flag in capabilities_of(dialect).flags}
    assert {spelling for row in FLAG_ROWS for spelling in row.spellings} - taken == set()


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
    compare(GOLDEN / dialect / f"{profile_name}.txt", golden_text(profile_name, dialect))


def test_the_files_that_a_server_reads_are_known_by_every_flag_that_names_some() -> None:
    """Adapters, grammars and schemas count as model and template do: another file makes other answers."""
    keyed = named_files(["x", "-m", "/m.gguf", "--chat-template-file", "/t", "--log-file", "/l"])
    assert keyed == {"model.path": "/m.gguf", "model.chat_template_file": "/t"}
    for words, *files in (
        ("--lora /a.gguf,/b.gguf --grammar-file /a,b.gbnf", "/a.gguf", "/b.gguf", "/a,b.gbnf"),
        ("--lora_scaled /a.gguf:0.5,/b:1.gguf:-1", "/a.gguf", "/b:1.gguf"),
        ("--control-vector-scaled /a.gguf 0.5 -jf /s.json", "/a.gguf", "/s.json"),
    ):
        assert named_files(["x", *words.split()]) == {name: name for name in files}
