"""Names of engines in profiles: families always mean something, other words only what is here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fake_gpu import a_card
from tests.support.local_box import Box
from tunerd.app import Context
from tunerd.engine.choice import PlanRequest, choose, named_by_plan
from tunerd.errors import EngineError
from tunerd.machine.host import read_host
from tunerd.production.profiles import check_profile
from tunerd.tryout.designed import SHAPES, design, write

PROFILE = """
engine.prefer = [{prefer}]
[model]
path = "/no/such.gguf"
[engines.{table}.memory]
fit_mib = 100
"""


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    box = Box(tmp_path)
    box.configure('[engines.tuesday]\npath = "/no/such/llama-server"\n')
    return box.context


def warned(ctx: Context, *, prefer: str = '"mainline"', table: str = "mainline") -> list[str]:
    """What `profiles check` and `plan` warn of alike."""
    path = ctx.paths.site_profiles / "mine.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(PROFILE.format(prefer=prefer, table=table))
    checked = check_profile(ctx, "mine")
    assert checked.exit_code == 0
    planned = named_by_plan(ctx, PlanRequest("mine", {}))
    assert [m.text for m in checked.messages] == [m.text for m in planned]
    assert len(check_profile(ctx, str(path)).messages) == len(planned)
    return [m.text for m in planned]


@pytest.mark.parametrize("name", ["mainline", "ik", "bee", "embedded", "tuesday"])
def test_families_and_engines_of_the_settings_are_known(ctx: Context, name: str) -> None:
    assert warned(ctx, prefer=f'"{name}", "/opt/x/llama-server"', table=name) == []


@pytest.mark.parametrize(
    ("name", "nearest"), [("mianline", "mainline"), ("embeded", "embedded"), ("tusday", "tuesday")]
)
def test_a_misspelt_name_is_warned_about_with_the_nearest(
    ctx: Context, name: str, nearest: str
) -> None:
    (table,) = warned(ctx, table=name)
    assert f"engines.{name}: found `{name}`" in table
    assert f"did you mean `{nearest}`?" in table
    (preferred,) = warned(ctx, prefer=f'"{name}"')
    assert "engine.prefer" in preferred
    assert f"did you mean `{nearest}`?" in preferred


@pytest.mark.engine
def test_a_program_that_only_the_profile_names_is_an_engine(
    ctx: Context, engines: dict[str, Path], tmp_path: Path
) -> None:
    program = next(iter(engines.values()))
    model = write(design(SHAPES["tiny"]), tmp_path / "tiny.gguf")
    wanted = {
        "engine.prefer": ["/no/such/program", str(program)],
        "model.path": str(model),
        "speculation.type": "off",
    }

    choice = choose(ctx, PlanRequest("cpu-embedded", wanted), read_host(ctx.gpu))

    assert choice.engine.program == program
    assert choice.engine.found_by == "engine.prefer"
    assert choice.passed_over == (("/no/such/program", "there is no such program"),)


@pytest.mark.engine
def test_a_build_for_the_processor_does_not_serve_a_profile_of_the_card_that_is_here(
    ctx: Context, engines: dict[str, Path], tmp_path: Path
) -> None:
    """It was deployed, with a note, and the card stayed idle."""
    mainline = str(next(path for name, path in engines.items() if "mainline" in name))
    model = write(design(SHAPES["tiny"]), tmp_path / "tiny.gguf")
    path = ctx.paths.site_profiles / "mine.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text('extends = "cpu-embedded"\nmatch.gpu = "*4070*"\nspeculation.type = "off"\n')
    request = PlanRequest("mine", {"engine.prefer": [mainline], "model.path": str(model)})
    here = replace(read_host(ctx.gpu), gpus=(a_card(),))

    with pytest.raises(EngineError, match="no engine here can serve profile `mine`") as caught:
        choose(ctx, request, here)
    assert caught.value.cause is not None
    assert "it sees no device to offload to, but NVIDIA GeForce RTX 4070" in caught.value.cause
    assert not choose(ctx, request, replace(here, gpus=())).has_gpu
    assert not choose(ctx, request, replace(here, awaits_reboot="why")).has_gpu, (
        "which the plan tells of"
    )
