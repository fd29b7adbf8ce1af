"""Units by hand that start their server by another program or a script, or start a router: nothing wrong is said of them."""

from __future__ import annotations

import json
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.world import a_generation, a_world
from tests.integration.conftest import started_by_hand
from tests.support import needs
from tests.support.local_box import Box, codes, settings
from tests.support.ports import free_port
from tests.support.server_process import CLIENT
from tests.support.transcripts import answered
from tests.support.waiting import until
from tunerd.engine.choice import PlanRequest, choose
from tunerd.engine.health import Expectation
from tunerd.errors import EngineError, RolledBack
from tunerd.machine.host import read_host
from tunerd.machine.net import is_listened_on
from tunerd.production.profiles import new_profile
from tunerd.production.status import status
from tunerd.production.swap import SwapRequest, swap
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.watch.watcher import Watcher
from tunerd.words import Mode, sha256

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
    "starts",
    [
        "ENGINE WORDS --spec-type draft-mtp",
        "/usr/bin/env LLAMA_ARG_SPEC_TYPE=draft-mtp ENGINE WORDS",
    ],
)
def test_mtp_from_a_file_of_its_own_is_adopted_and_drafts(folder: Path, starts: str) -> None:
    """Its file was left out, and the model alone, which has no MTP block, could not be served so."""
    model, drafter = folder / "nomtp.gguf", folder / "mtp.gguf"
    write(design(SHAPES["tiny-nomtp"]), model)
    write(design(SHAPES["tiny-mtp"]), drafter)
    words = f"-m {model} -md {drafter} --spec-draft-n-max 2"
    with served(folder, f"{starts} {words}") as box:
        found = {one["code"] for one in box.json("doctor", code=None)["findings"]}
        made = box.json("profiles", "new", "mine", "--from-unit", UNIT)
        profile = tomllib.loads((box.context.paths.site_profiles / "mine.toml").read_text())
        box.json("apply", "mine", "--yes")
        body = {"prompt": "a", "n_predict": 20}
        answer = CLIENT.post(f"{box.json('status')['address']}/completion", json=body).json()

    assert made["unplaced"] == []
    assert profile["speculation"] == {
        "type": "mtp", "draft_model": str(drafter), "n_max": 2, "p_min": "default",
    }  # fmt: skip
    assert not {"model-without-mtp", "draft-idle"} & found
    assert answer["timings"]["draft_n"] > 0


@pytest.mark.parametrize("runs", ["ENGINE WORDS &\nwait", "exec timeout 1000 ENGINE WORDS"])
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
    with served(folder, "START llama", f'test "$1" = llama || exit 1\n{script}') as box:
        found = box.json("doctor")
        done = box.json("apply", "cpu-embedded", "--yes", *settings(box, serving__port=free_port()))

    assert "edited" not in {one["code"] for one in found["messages"]}
    assert "header" not in json.dumps(found["not_checked"])
    assert done["generation"] == 1, "a script that answers no probe is replaced"


@pytest.mark.parametrize("n_servers", [0, 2])
def test_a_script_with_no_server_or_two_is_not_adopted(folder: Path, n_servers: int) -> None:
    box, ports = Box(folder), [free_port() for _ in range(n_servers)]
    write(design(SHAPES["tiny"]), box.model)
    words = f"{needs.engine('mainline-2026-08-18')} -m {box.model} -t 1 -np 1 -c 512"
    runs = "".join(f"{words} --port {port} &\n" for port in ports)
    (folder / "start.sh").write_text(f"#!/bin/sh\n{runs}wait\n")
    (folder / "start.sh").chmod(0o755)
    with started_by_hand(box, f"{folder}/start.sh"):
        until(lambda: all(map(is_listened_on, ports)), "they listen")  # one alone is adopted
        refused = box.json("profiles", "new", "mine", "--from-unit", UNIT, code=None)["error"]

    assert "does not say what it serves" in refused["message"]
    assert "start it" in refused["hint"]


def test_what_becomes_no_profile_though_it_is_a_unit_is_refused_as_in_the_golden_text(
    folder: Path,
) -> None:
    """A line is what `ExecStart=` says, by hand; nothing of it runs."""
    box = Box(folder)
    shutil.copy("/bin/sleep", folder / "llama-swap")
    places = {"ENGINE": str(needs.engine("mainline-2026-08-18")), "FOLDER": str(folder)}

    def refused(line: str) -> list[str]:
        for name, value in places.items():
            line = line.replace(name, value)
        box.put_unit(f"[Service]\nExecStart={line}\n")
        said = box.call("profiles", "new", "mine", "--from-unit", UNIT).stderr
        for name, value in places.items():
            said = said.replace(value, name)
        return said.splitlines()

    with box.until_all_ended():
        answered("errors/units", refused)
    assert not (box.context.paths.site_profiles / "mine.toml").exists()


def test_a_build_that_others_may_change_is_refused_with_nothing_but_what_allows_it(
    folder: Path,
) -> None:
    """Whoever runs a build of their own home was told what to do if it only starts a server."""
    box, program = Box(folder), folder / "llama-server"
    program.touch()
    program.chmod(0o777)
    box.put_unit(f"[Service]\nExecStart={program} -m /m.gguf\n")

    with pytest.raises(EngineError) as refused:
        new_profile(replace(box.context, mode=Mode.SYSTEM), "mine", from_unit=UNIT)

    assert "allow_writable true` allow it" in (refused.value.cause or "")
    assert refused.value.hint is None


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
    ("words", "siblings", "served"),
    [
        ("-hff x-Q4_K_M.gguf", ("mmproj-F16.gguf",), "mmproj-F16.gguf"),
        ("--no-mmproj", ("mmproj-F16.gguf",), None),
        ("", ("mmproj-F16.gguf", "mmproj-BF16.gguf"), None),
        ("--spec-type draft-mtp", ("mtp-x-Q8_0.gguf",), "mtp-x-Q8_0.gguf"),
        ("--spec-type draft-mtp", ("mtp-x-Q8_0.gguf", "mtp-x-Q4_0.gguf"), None),
        ("--spec-type draft-mtp -md /mtp.gguf", ("mtp-x-Q8_0.gguf",), "mtp.gguf"),
        ("", ("mtp-x-Q8_0.gguf",), None),
    ],
)
def test_what_a_repository_brings_along_is_served_too(
    folder: Path, words: str, siblings: tuple[str, ...], served: str | None
) -> None:
    """An adopted `-hf` served the model by its path: it saw no images any more, and had no MTP block.

    The build of August 2026 takes both from the cache, with `-hff` too.
    """
    box, hub = Box(folder), folder / "hub/models--maker--usual"
    write(design(SHAPES["tiny"]), box.model)
    (hub / "refs").mkdir(parents=True)
    (hub / "refs/main").write_text("0" * 40)
    (hub / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for name in ("x-Q4_K_M.gguf", *siblings):
        (hub / "snapshots" / ("0" * 40) / name).symlink_to(box.model)
    engine = needs.engine("mainline-2026-08-18")
    box.put_unit(
        f"[Service]\nEnvironment=HF_HUB_CACHE={folder}/hub\nExecStart={engine} -hf maker/usual {words}\n"
    )

    with box.until_all_ended():
        made = box.json("profiles", "new", "mine", "--from-unit", UNIT)

    profile = tomllib.loads((box.context.paths.site_profiles / "mine.toml").read_text())
    found = profile["model"].get("mmproj") or profile["speculation"].get("draft_model")
    assert (found and Path(found).name) == served
    assert (" to one of them" in json.dumps(made["messages"])) is (len(siblings) > 1)


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


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A router of a real build, by a unit that somebody wrote."""
    made = Box(tmp_path)
    (tmp_path / "models.ini").write_text(f"[tiny]\nmodel = {tmp_path}/tiny.gguf\n")
    words = (str(needs.engine("mainline-2026-08-18")), "--models-preset", f"{tmp_path}/models.ini",
             "--port", str(free_port()), "-t", "1")  # fmt: skip
    with started_by_hand(made, shlex.join(words)):
        yield made


def test_a_router_that_stood_before_serves_again_after_a_swap_that_failed(box: Box) -> None:
    """Its answer that no model was named was taken for garbage: it was stranded, and restarted by each recovery."""
    until(lambda: status(box.context).payload["healthy"], lambda: str(status(box.context).payload))
    text = b"[Service]\nType=exec\nExecStart=/bin/false\n"
    request = SwapRequest(
        text=text,
        old_sha256=sha256(box.unit.read_bytes()),
        generation=a_generation(sha256(text)),
        address=None,
        expected=Expectation(None, None, expects_draft=False),
        drain=False,
    )

    with pytest.raises(RolledBack) as failed:
        swap(box.context, request)

    assert "serves again" in str(failed.value.state)


def test_a_router_is_named_and_left_alone(box: Box) -> None:
    until(lambda: status(box.context).payload["healthy"], lambda: str(status(box.context).payload))

    assert "a router that starts a server for each model" in box.call("status").stdout
    (unit,) = box.json("detect")["units"]
    assert unit["router"] is True
    seen = Watcher(box.context).look().engine
    assert (seen.is_ready, seen.is_busy) == (True, None), "it has no slots of its own"
    refused = box.json("profiles", "new", "mine", "--from-unit", "llama-server", code=None)
    assert "is a router" in refused["error"]["message"]
    unknown = box.json("doctor", code=None)["not_checked"]
    assert any("it is a router" in json.dumps(one) for one in unknown)


def test_what_would_take_a_routers_place_is_told_what_it_takes_away_and_no_figure_is_taken_of_it(
    box: Box,
) -> None:
    """A bench asked the first model that it lists, and kept that as figures of the router; a plan had its name change."""
    write(design(SHAPES["tiny"]), box.model)
    until(lambda: status(box.context).payload["healthy"], lambda: str(status(box.context).payload))

    box.json("profiles", "new", "mine", "--model", str(box.model))
    found = codes(box.json("plan", "mine"))
    refused = box.json("bench", code=1)["error"]

    assert "router" in found
    assert "alias-changes" not in found
    assert "is a router" in refused["message"]
    assert "#MODEL" in refused["hint"]
