"""Which file a profile's model is, in folders with real header bytes, and which build its words for an engine mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fake_gpu import a_card
from tests.support.gguf_bytes import text
from tests.support.local_box import Box
from tests.support.model_headers import small
from tests.support.profiles import profile_of
from tunerd.app import Context
from tunerd.engine.choice import (
    PlanRequest,
    choose,
    find_weights,
    found_by_metadata,
    locate,
    named_by_plan,
)
from tunerd.errors import ConfigError, EngineError, ModelFileError
from tunerd.machine.host import read_host
from tunerd.production.profiles import check_profile
from tunerd.tryout.designed import SHAPES, design, write


def made(path: Path, name: str) -> Path:
    tensors = [("blk.0.attn_q.weight", (8, 2))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(small("llama", {"block_count": 1}, tensors, [text("general.name", name)]))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def ctx(tmp_path: Path, folder: Path) -> Context:
    return Box(tmp_path, {"TUNERD_MODELS__DIRS": json.dumps([str(folder)])}).context


def test_a_file_of_the_name_is_taken_whatever_its_metadata_says(ctx: Context, folder: Path) -> None:
    wanted = made(folder / "a.gguf", "Other")
    made(folder / "b.gguf", "Qwen3.6 27B")
    profile = profile_of({"model": {"path": "a.gguf", "name": "Qwen3.6*"}})

    path = find_weights(ctx, profile)

    assert path == wanted
    assert found_by_metadata(profile, path) == []


def test_without_a_file_of_the_name_the_one_whose_metadata_fits_is_taken_and_said(
    ctx: Context, folder: Path
) -> None:
    made(folder / "a.gguf", "Other")
    fitting = made(folder / "sub" / "b.gguf", "Qwen3.6 27B")
    profile = profile_of({"model": {"path": "gone.gguf", "name": "qwen3.6*27b"}})

    path = find_weights(ctx, profile)
    (said,) = found_by_metadata(profile, path)

    assert path == fitting
    assert said.code == "model-by-name"
    assert str(fitting) in said.text
    assert "gone.gguf" in said.text


def test_a_draft_model_that_is_missing_is_not_the_model_that_it_drafts_for(
    ctx: Context, folder: Path
) -> None:
    """The model itself drafted, as the only file of its name."""
    made(folder / "a.gguf", "Qwen3.6 27B")
    named = {"type": "mtp", "draft_model": "gone.gguf"}
    resolved = profile_of({"model": {"path": "a.gguf", "name": "Qwen3.6*"}, "speculation": named})
    with pytest.raises(ModelFileError, match=r"the file `gone\.gguf`") as raised:
        locate(ctx, "gone.gguf", resolved)
    assert "--set speculation.draft_model=FILE" in (raised.value.hint or "")


def test_two_files_whose_metadata_fit_are_not_guessed_between(ctx: Context, folder: Path) -> None:
    made(folder / "a.gguf", "Qwen3.6 27B")
    made(folder / "b.gguf", "Qwen3.6 27B")
    profile = profile_of({"model": {"path": "gone.gguf", "name": "Qwen3.6*"}})

    with pytest.raises(ModelFileError, match=r"gone\.gguf") as caught:
        find_weights(ctx, profile)

    assert "a.gguf" in str(caught.value.cause)
    assert "b.gguf" in str(caught.value.cause)


def test_metadata_alone_can_name_the_model_and_nothing_cannot(ctx: Context, folder: Path) -> None:
    fitting = made(folder / "b.gguf", "Qwen3.6 27B")
    profile = profile_of({"model": {"path": None, "name": "Qwen3.6*"}})

    assert find_weights(ctx, profile) == fitting
    assert found_by_metadata(profile, fitting) == []
    with pytest.raises(ConfigError, match="names no model"):
        find_weights(ctx, profile_of({"model": {"path": None}}))


def test_a_missing_file_says_how_to_fetch_it(ctx: Context, folder: Path) -> None:
    profile = profile_of({"model": {"path": "gone.gguf", "hf_repo": "someone/some-GGUF"}})

    with pytest.raises(ModelFileError) as caught:
        find_weights(ctx, profile)

    assert f"hf download someone/some-GGUF gone.gguf --local-dir {folder}" in str(caught.value.hint)


PROFILE = """
engine.prefer = [{prefer}]
[model]
path = "/no/such.gguf"
[engines.{table}.memory]
fit_mib = 100
"""


@pytest.fixture
def named(tmp_path: Path) -> Context:
    """Where the settings name an engine."""
    box = Box(tmp_path)
    box.configure('[engines.tuesday]\npath = "/no/such/llama-server"\n')
    return box.context


def warned(named: Context, *, prefer: str = '"mainline"', table: str = "mainline") -> list[str]:
    """What `profiles check` and `plan` warn of alike."""
    path = named.paths.site_profiles / "mine.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(PROFILE.format(prefer=prefer, table=table))
    checked = check_profile(named, "mine")
    assert checked.exit_code == 0
    planned = named_by_plan(named, PlanRequest("mine", {}))
    assert [m.text for m in checked.messages] == [m.text for m in planned]
    assert len(check_profile(named, str(path)).messages) == len(planned)
    return [m.text for m in planned]


@pytest.mark.parametrize("name", ["mainline", "ik", "bee", "embedded", "tuesday"])
def test_families_and_engines_of_the_settings_are_known(named: Context, name: str) -> None:
    assert warned(named, prefer=f'"{name}", "/opt/x/llama-server"', table=name) == []


@pytest.mark.parametrize(
    ("name", "nearest"), [("mianline", "mainline"), ("embeded", "embedded"), ("tusday", "tuesday")]
)
def test_a_misspelt_name_is_warned_about_with_the_nearest(
    named: Context, name: str, nearest: str
) -> None:
    (table,) = warned(named, table=name)
    assert f"engines.{name}: found `{name}`" in table
    assert f"did you mean `{nearest}`?" in table
    (preferred,) = warned(named, prefer=f'"{name}"')
    assert "engine.prefer" in preferred
    assert f"did you mean `{nearest}`?" in preferred


@pytest.mark.engine
def test_a_program_that_only_the_profile_names_is_an_engine(
    named: Context, engines: dict[str, Path], tmp_path: Path
) -> None:
    program = next(iter(engines.values()))
    model = write(design(SHAPES["tiny"]), tmp_path / "tiny.gguf")
    wanted = {
        "engine.prefer": ["/no/such/program", str(program)],
        "model.path": str(model),
        "speculation.type": "off",
    }

    choice = choose(named, PlanRequest("cpu-embedded", wanted), read_host(named.gpu))

    assert choice.engine.program == program
    assert choice.engine.found_by == "engine.prefer"
    assert choice.passed_over == (("/no/such/program", "there is no such program"),)


@pytest.mark.engine
def test_a_build_for_the_processor_does_not_serve_a_profile_of_the_card_that_is_here(
    named: Context, engines: dict[str, Path], tmp_path: Path
) -> None:
    """It was deployed, with a note, and the card stayed idle."""
    mainline = str(next(path for name, path in engines.items() if "mainline" in name))
    model = write(design(SHAPES["tiny"]), tmp_path / "tiny.gguf")
    path = named.paths.site_profiles / "mine.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text('extends = "cpu-embedded"\nmatch.gpu = "*4070*"\nspeculation.type = "off"\n')
    request = PlanRequest("mine", {"engine.prefer": [mainline], "model.path": str(model)})
    here = replace(read_host(named.gpu), gpus=(a_card(),))

    with pytest.raises(EngineError, match="no engine here can serve profile `mine`") as caught:
        choose(named, request, here)
    assert caught.value.cause is not None
    assert "it sees no device to offload to, but NVIDIA GeForce RTX 4070" in caught.value.cause
    assert not choose(named, request, replace(here, gpus=())).has_gpu
    assert not choose(named, request, replace(here, awaits_reboot="why")).has_gpu, (
        "which the plan tells of"
    )
