"""The embedded server as a program: what it prints, how it starts, serves and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.folders import ROOT
from tests.support.server_process import ended, start
from tests.support.waiting import LIMIT_S
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.tryout.embedded import OPTIONS, Option, apply_setting, parse_command

pytestmark = pytest.mark.llama

PROGRAM = (sys.executable, "-m", "tunerd.tryout.embedded")

# A value for each option that has an argument, other than its default.
VALUES = {
    "--flash-attn": "off",
    "--cache-type-k": "q8_0",
    "--cache-type-v": "q4_0",
    "--load-mode": "mlock",
    "--gpu-layers": "all",
    "--fit": "off",
    "--fit-target": "2048",
    "--cache-type-k-draft": "q8_0",
    "--cache-type-v-draft": "q8_0",
    "--temp": "0.25",
    "--top-p": "0.5",
    "--min-p": "0.25",
    "--repeat-penalty": "1.5",
    "--presence-penalty": "0.5",
    "--spec-type": "draft-mtp",
    "--spec-draft-p-min": "0.75",
    "--host": "127.0.0.2",
    "--alias": "one,two",
    "--chat-template-kwargs": '{"a": [1]}',
    "--reasoning-format": "none",
    "--reasoning": "off",
}
NUMBER, TEXT = "7", "some text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedded")


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={"PYTHONPATH": str(Path.cwd()), **environment} if environment else None,
    )


def _argv(model: Path, *options: str) -> list[str]:
    words = ("-m", str(model), "-t", "1", "-c", "1024", "-np", "1", "--no-warmup")
    return [*PROGRAM, *words, *options]


def test_what_it_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('not here')\n")
    for done, said in (
        (
            _run("-m", "x.gguf", PYTHONPATH=f"{tmp_path}:{Path.cwd()}"),
            "pip install 'tunerd[embedded]'",
        ),
        (_run("--port", "1"), "no model to serve"),  # and it does not become a router
    ):
        assert done.returncode == 1
        assert said in done.stderr


def test_speculation_that_the_model_cannot_do_ends_the_start(tmp_path: Path) -> None:
    bare = write(design(SHAPES["tiny-nomtp"]), tmp_path / "bare.gguf")

    argv, environment = _argv(bare, "--spec-type", "draft-mtp"), {"PYTHONPATH": str(ROOT)}
    words = "failed to create MTP context"
    assert ended(argv, tmp_path / "log", words, environment=environment)[0] == 1


def test_it_says_that_it_loads_and_a_signal_then_ends_it(folder: Path) -> None:
    big = write(design(SHAPES["medium"]), folder / "medium.gguf")
    environment = {"PYTHONPATH": str(ROOT)}
    # It loads for half a second: no faster than it is asked where others take the processors.
    argv = ["nice", "-n", "19", *_argv(big, "-lm", "none")]
    with start(argv, folder / "log", environment=environment) as server:
        answers: list[httpx.Response] = []
        give_up = time.monotonic() + LIMIT_S
        while not answers and time.monotonic() < give_up:
            try:
                answers.append(server.reply("/health", timeout_s=1))
            except httpx.HTTPError:
                time.sleep(0.005)

        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["message"] == "Loading model"
        server.terminate()
        assert server.wait_ended() == -signal.SIGTERM


@pytest.mark.parametrize("option", OPTIONS[2:], ids=lambda option: option.spellings[-1])
def test_every_option_changes_a_field_of_the_engines_parameters(
    option: Option, tmp_path: Path
) -> None:
    import xllamacpp  # noqa: PLC0415 (only where it is installed)

    (tmp_path / "file").write_text("read from a file")
    places = {"FNAME": "file", "JINJA_TEMPLATE_FILE": "file", "PATH": "."}
    flag = next((flag for flag in option.spellings if flag in VALUES), option.spellings[0])
    value = VALUES.get(flag, NUMBER if option.argument in {"N", "SEED", "<0...100>"} else TEXT)
    if option.argument in places:
        value = str(tmp_path / places[option.argument])
    given = [[flag] if option.argument is None else [flag, value]]
    given += [[negation] for negation in option.negations[:1]]
    changed = False
    for arguments in given:
        params = xllamacpp.CommonParams()
        for field, wanted in parse_command(arguments).settings:
            before = _field(params, field)
            apply_setting(params, field, wanted, xllamacpp)
            changed = changed or _field(params, field) != before

    assert changed, option.spellings


def _field(params: Any, field: str) -> Any:
    for name in field.removeprefix("+").split("."):
        params = getattr(params, name)
    return params
