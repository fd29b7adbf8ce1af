"""The embedded server as a program: what it prints, how it starts, serves and ends."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.folders import ROOT
from tests.support.server_process import Server, ended, serving, start
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


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write(design(SHAPES["tiny"]), folder / "tiny.gguf")


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


def _server(
    model: Path, folder: Path, *options: str, **keywords: Any
) -> AbstractContextManager[Server]:
    return serving(_argv(model, *options), folder / "log", **keywords)


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
    with start(_argv(big, "-lm", "none"), folder / "log", environment=environment) as server:
        answers: list[httpx.Response] = []
        give_up = time.monotonic() + 20
        while not answers and time.monotonic() < give_up:
            try:
                answers.append(server.reply("/health", timeout_s=1))
            except httpx.HTTPError:
                time.sleep(0.005)

        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["message"] == "Loading model"
        server.terminate()
        assert server.wait_ended() == -signal.SIGTERM


MANY_OPTIONS = """
-np 2 --no-kv-unified -c 1500 -n 21 --temp 0.25 --top-k 7 --top-p 0.5 --min-p 0.25
--repeat-penalty 1.5 --presence-penalty 0.5 --seed 5 --props --no-slots --no-cache-prompt
--reasoning-format none -lv 5 -b 256 -ub 128 -fa on -ctk q8_0 -ctv q8_0 -lm none -ctxcp 5 -cms 64
-cram 10 --threads-http 3 -tb 2 -fitt 2048 --spec-type draft-mtp --spec-draft-n-max 4
--spec-draft-n-min 2 --spec-draft-p-min 0.5 --no-spec-draft-backend-sampling -ctkd q4_0 -ctvd q4_0
"""


def test_settings_show_in_what_the_server_says_of_itself(model: Path, folder: Path) -> None:
    keys = folder / "keys"
    keys.write_text("# ours\nsecret\n")
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    with _server(
        model, folder,
        *shlex.split(MANY_OPTIONS),
        *("--api-key-file", str(keys), "--slot-save-path", str(saved)),
        headers={"Authorization": "Bearer secret"},
    ) as server:  # fmt: skip
        props = server.get("/props")
        answers = [server.post("/completion", {"prompt": "x code"}) for _ in range(2)]
        refused = server.reply("/props", headers={"Authorization": "Bearer wrong"})
        slots = server.reply("/slots")
        kept = server.post("/slots/0?action=save", {"filename": "slot"})

    params = props["default_generation_settings"]["params"]
    sampling = {
        key: pytest.approx(value)
        for key, value in {
            "temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "seed": 5,
            "repeat_penalty": 1.5, "presence_penalty": 0.5,
        }.items()
    }  # fmt: skip
    assert {key: params[key] for key in sampling} == sampling
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 768  # half of it, in steps of 256
    assert props["endpoint_props"]
    assert params["reasoning_format"] == "none"
    assert (refused.status_code, slots.status_code) == (401, 501)
    assert answers[1]["timings"]["cache_n"] == 0
    assert answers[1]["tokens_predicted"] == 21
    assert (saved / "slot").exists()
    assert kept["filename"] == "slot"
    for line in (
        "n_batch               = 256",
        "n_ubatch              = 128",
        "flash_attn            = enabled",
        "K (q8_0)",
        "V (q8_0)",
        "K (q4_0)",
        "load_mode = none",
        "context checkpoints enabled, max = 5, min spacing = 64",
        "prompt cache is enabled, size limit: 10 MiB",
        "using 3 threads for HTTP server",
        "n_threads = 1 (n_threads_batch = 2)",
        ">= 2048 MiB of system memory",
        "n_max=4, n_min=2, p_min=0.50, n_embd=1056, backend_sampling=0",
    ):
        assert line in server.log_text(), line


def test_what_was_not_given_is_as_in_llama_server(model: Path, folder: Path) -> None:
    """Four slots over one KV buffer, batch threads like threads, context of the model."""
    environment = {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_API_KEY": "secret", "LLAMA_ARG_TOP_K": "3"}
    argv = [*PROGRAM, "-m", str(model), "-t", "1", "-lv", "4"]
    with serving(argv, folder / "log", environment=environment) as server:
        props = server.get("/props")

    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == SHAPES["tiny"].context_length
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert "kv_unified = 'true'" in server.log_text()
    assert "n_threads = 1 (n_threads_batch = 1)" in server.log_text()
    assert "warming up the model" in server.log_text()


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
