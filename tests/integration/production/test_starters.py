"""Units that start their server by another program or a script: nothing wrong is said of them."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.world import a_world
from tests.integration.conftest import started_by_hand
from tests.support import needs
from tests.support.local_box import Box, settings
from tests.support.ports import free_port
from tests.support.waiting import until
from tunerd.engine.choice import PlanRequest, choose
from tunerd.machine.host import read_host
from tunerd.production.status import status
from tunerd.tryout.designed import SHAPES, design, write

UNIT = "llama-server.service"
pytestmark = pytest.mark.engine


@contextmanager
def served(folder: Path, command: str, script: str | None = None) -> Iterator[Box]:
    """A unit by hand serves by this command; `ENGINE`, `WORDS` and `START` in it are filled in."""
    box = Box(folder, {"TUNERD_SERVICE__SETTLE_S": "0.2"})
    write(design(SHAPES["tiny"]), box.model)
    words = f"-m {box.model} -t 1 -np 1 -c 2048 --alias mine --port {free_port()} --metrics"
    filled = {"ENGINE": str(needs.engine("mainline-2026-08-18")), "WORDS": words, "START": f"{folder}/start.sh"}  # fmt: skip
    for name, value in filled.items():
        command, script = command.replace(name, value), (script or "").replace(name, value)
    (folder / "start.sh").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "start.sh").chmod(0o755)
    with started_by_hand(box, command):
        until(
            lambda: status(box.context).payload["healthy"], lambda: str(status(box.context).payload)
        )
        yield box


def test_a_server_behind_taskset_and_env_is_adopted_with_what_env_sets(folder: Path) -> None:
    env, taskset = shutil.which("env"), shutil.which("taskset")
    with served(folder, f"{taskset} -c 0 {env} FOO=bar ENGINE WORDS") as box:
        made = box.json("profiles", "new", "mine", "--from-unit", UNIT)

        profile = tomllib.loads((box.context.paths.site_profiles / "mine.toml").read_text())
        assert profile["engine"]["prefer"] == [str(needs.engine("mainline-2026-08-18"))]
        assert profile["environment"] == {"FOO": "bar"}
        (lost,) = [one for one in made["messages"] if one["code"] == "foreign-directives"]
        assert "taskset -c 0" in lost["text"]
        assert box.json("bench", "--repeats", "1")["messages"] is not None
        assert "edited" not in {one["code"] for one in box.json("doctor")["messages"]}


@pytest.mark.parametrize(
    "runs", ["exec ENGINE WORDS", "ENGINE WORDS &\nwait", "exec timeout 1000 ENGINE WORDS"]
)
def test_a_script_is_adopted_by_the_words_of_the_server_that_it_has_started(
    folder: Path, runs: str
) -> None:
    """They stand in no unit, and were asked of whoever had written the script."""
    exports = "FOO=bar LLAMA_ARG_N_PREDICT=77 GGML_NO_BACKTRACE=1 HF_HOME=/srv/hf HF_TOKEN=secret7"
    script = f'log() {{ echo "$1" "$@"; }}\nexport {exports}\n{runs}'
    with served(folder, "START", script) as box:
        (unit,) = box.json("detect")["units"]
        unknown = json.dumps(box.json("doctor")["not_checked"])
        engines = box.call("engines").stdout
        made = box.json("profiles", "new", "mine", "--from-unit", UNIT)
        profile = tomllib.loads((box.context.paths.site_profiles / "mine.toml").read_text())

    assert "could start a second server" in engines, engines
    assert unit["router"] is False
    assert "start.sh" not in unknown, "doctor looks at the flags of the server"
    assert profile["engine"]["prefer"] == [str(needs.engine("mainline-2026-08-18"))]
    assert (profile["model"]["path"], profile["serving"]["alias"]) == (str(box.model), "mine")
    assert "77" in json.dumps(profile), "an option of the script's own environment"
    # Where `-hf` looks for the model counts as well.
    assert profile["environment"] == {"GGML_NO_BACKTRACE": "1", "HF_HOME": "/srv/hf"}
    assert "secret7" not in json.dumps((made, profile))
    (told,) = [one for one in made["messages"] if one["code"] == "script"]
    assert "start.sh" in told["text"]


def test_doctor_looks_at_the_model_of_a_script_that_is_told_which_and_goes_to_its_folder(
    folder: Path,
) -> None:
    """Its own words were taken for other flags than the server's, and a name in its folder for no file."""
    script = f"cd {folder}\ncp tiny.gguf $1.gguf\nexec ENGINE WORDS -m $1.gguf"
    with served(folder, "START llama", script) as box:
        found = box.json("doctor")

    assert "edited" not in {one["code"] for one in found["messages"]}
    assert "header" not in json.dumps(found["not_checked"])


@pytest.mark.parametrize("runs", ["", "ENGINE WORDS &\nENGINE WORDS --port PORT &\nwait"])
def test_a_script_with_no_server_or_two_is_not_adopted(folder: Path, runs: str) -> None:
    box = Box(folder)
    write(design(SHAPES["tiny"]), box.model)
    words = f"-m {box.model} -t 1 -np 1 -c 512"
    for name, value in {"ENGINE": str(needs.engine("mainline-2026-08-18")), "WORDS": words}.items():
        runs = runs.replace(name, value)
    runs = runs.replace("PORT", str(free_port()))
    (folder / "start.sh").write_text(f"#!/bin/sh\nexport LLAMA_ARG_PORT={free_port()}\n{runs}\n")
    (folder / "start.sh").chmod(0o755)
    with started_by_hand(box, f"{folder}/start.sh"):
        refused = box.json("profiles", "new", "mine", "--from-unit", UNIT, code=None)["error"]

    assert "does not say what it serves" in refused["message"]
    assert "start it" in refused["hint"]


def test_whoever_adopts_a_unit_whose_program_is_gone_is_told_what_there_is(folder: Path) -> None:
    box = Box(folder)
    box.unit.parent.mkdir(parents=True)
    box.unit.write_text(f"[Service]\nExecStart={folder}/gone -m /m.gguf\n")

    refused = box.json("profiles", "new", "mine", "--from-unit", UNIT, code=None)["error"]

    assert "No such file" in refused["cause"]
    assert "`tunerd engines`" in refused["hint"]


def test_a_script_that_answers_no_probe_is_replaced(folder: Path) -> None:
    with served(folder, "START", "test $# = 0 && exec ENGINE WORDS") as box:
        done = box.json("apply", "cpu-embedded", "--yes", *settings(box, serving__port=free_port()))

    assert done["generation"] == 1


def test_a_script_that_has_the_last_word_is_told_as_that_and_not_as_an_edit(folder: Path) -> None:
    with served(folder, "START WORDS", 'exec ENGINE "$@" -c 1024') as box:
        refused = box.json("bench", code=None)["error"]
        box.json("profiles", "new", "mine", "--from-unit", UNIT)
        box.json("apply", "mine", "--yes")
        (drift,) = box.json("verify", code=6)["drift"]

    assert "is a script that gives its server others" in refused["cause"]
    assert "edited" not in json.dumps(refused)
    assert drift["code"] == "other-arguments"


@pytest.mark.parametrize(
    ("words", "projectors", "served"),
    [
        ("", ("mmproj-F16.gguf",), "mmproj-F16.gguf"),
        ("-hff x-Q4_K_M.gguf", ("mmproj-F16.gguf",), "mmproj-F16.gguf"),
        ("--no-mmproj", ("mmproj-F16.gguf",), None),
        ("", ("mmproj-F16.gguf", "mmproj-BF16.gguf"), None),
        ("", (), None),
    ],
)
def test_the_projector_that_a_repository_brings_along_is_served_too(
    folder: Path, words: str, projectors: tuple[str, ...], served: str | None
) -> None:
    """An adopted `-hf` served the model by its path, and saw no images any more.

    The build of August 2026 takes it from the cache, with `-hff` too.
    """
    box, hub = Box(folder), folder / "hub/models--maker--usual"
    write(design(SHAPES["tiny"]), box.model)
    (hub / "refs").mkdir(parents=True)
    (hub / "refs/main").write_text("0" * 40)
    (hub / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for name in ("x-Q4_K_M.gguf", *projectors):
        (hub / "snapshots" / ("0" * 40) / name).symlink_to(box.model)
    engine = needs.engine("mainline-2026-08-18")
    box.unit.parent.mkdir(parents=True)
    box.unit.write_text(
        f"[Service]\nEnvironment=HF_HUB_CACHE={folder}/hub\nExecStart={engine} -hf maker/usual {words}\n"
    )

    with box.until_all_ended():
        made = box.json("profiles", "new", "mine", "--from-unit", UNIT)

    profile = tomllib.loads((box.context.paths.site_profiles / "mine.toml").read_text())
    found = profile["model"].get("mmproj")
    assert (found and Path(found).name) == served
    assert ("model.mmproj" in json.dumps(made["messages"])) is (len(projectors) > 1)


@pytest.mark.parametrize(
    "words", ["-mu http://127.0.0.1/x.gguf", "-dr ai/x", "--fim-qwen-3b-default"]
)
def test_a_unit_that_fetches_its_model_from_elsewhere_becomes_no_profile(
    folder: Path, words: str
) -> None:
    """It ended in a traceback."""
    box, engine = Box(folder), needs.engine("mainline-2026-08-18")
    box.unit.parent.mkdir(parents=True)
    box.unit.write_text(f"[Service]\nExecStart={engine} {words}\n")

    with box.until_all_ended():
        refused = box.json("profiles", "new", "mine", "--from-unit", UNIT, code=None)["error"]

    assert "names neither a file of its model nor a repository" in refused["message"]
    assert not (box.context.paths.site_profiles / "mine.toml").exists()


_TWO_CARDS = """#!/bin/sh
if [ "$*" = --list-devices ]; then
    echo "Available devices:"
    [ "$CUDA_VISIBLE_DEVICES" = 1 ] || echo "  CUDA0: the large one (8000 MiB, 7000 MiB free)"
    echo "  CUDA1: the small one (4000 MiB, 3000 MiB free)"
    exit
fi
exec ENGINE "$@"
"""


def test_a_card_that_a_drop_in_hides_is_none_of_a_plan(folder: Path) -> None:
    """A drop-in stays in force for what is deployed, and the build was asked for its devices without it."""
    box, program = Box(folder), folder / "llama-server"
    write(design(SHAPES["tiny"]), box.model)
    program.write_text(_TWO_CARDS.replace("ENGINE", str(needs.engine("mainline-2026-08-18"))))
    program.chmod(0o755)
    wanted = {"model.path": str(box.model), "engine.prefer": [str(program)], "match.gpu": "default"}
    request = PlanRequest("cpu-embedded", wanted)

    with a_world(folder / "world") as world:
        drop_in = world.paths.unit_dir / f"{UNIT}.d/card.conf"
        drop_in.parent.mkdir(parents=True)
        world.put(world.text("old"), starts=False)
        ctx = replace(box.context, services=world.manager)
        before = choose(ctx, request, read_host(ctx.gpu)).devices
        drop_in.write_text("[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=1\n")
        world.manager.reload()
        hidden = choose(ctx, request, read_host(ctx.gpu)).devices

    assert [one.name for one in before] == ["CUDA0", "CUDA1"]
    assert hidden == before[1:]


def test_a_script_of_which_no_copy_can_be_kept_keeps_no_swap_from_going_on(folder: Path) -> None:
    """With `swap.keep_engine` nothing could be deployed over it: no apply, no winner of a night, no larger margin."""
    with served(folder, "START WORDS", 'exec ENGINE "$@"') as box:
        box.call("settings", "set", "swap.keep_engine", "true")
        box.call("profiles", "new", "mine", "--from-unit", UNIT)
        done = box.json("apply", "mine", "--set", "serving.ctx_size=1024", "--yes")

    (told,) = [one for one in done["messages"] if one["code"] == "not-kept"]
    assert "start.sh` would not keep the build: it is a script that starts" in told["text"]
    assert done["generation"] == 1
