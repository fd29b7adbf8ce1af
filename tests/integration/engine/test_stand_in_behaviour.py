"""The stand-in plays what its settings say."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contracts.llama_server import prompt, request
from tests.support.builders import HELP_OF
from tests.support.fake_llama.arguments import ArgumentError, Arguments
from tests.support.fake_llama.behaviour import Behaviour
from tests.support.fake_llama.failures import FAILURES
from tests.support.golden import golden_lines
from tests.support.server_process import Server, serving, start
from tests.support.stand_in import RTX_4070_SUPER, StandIn, install
from tunerd.engine.health import FailureKind, classify

MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3", "--spec-draft-p-min", "0.0")


@pytest.fixture
def made(tmp_path: Path) -> StandIn:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return install(tmp_path)


Serve = Callable[..., Server]


@pytest.fixture
def begin(made: StandIn, tmp_path: Path) -> Iterator[Serve]:
    """Starts it with these flags and this behaviour, without waiting."""
    running: list[Server] = []

    def begin_one(*flags: str, **behaviour: Any) -> Server:
        made.configure(**behaviour)
        model = tmp_path / "model.gguf"
        command = [str(made.program), "-m", str(model), "-a", "name", "-np", "1", *flags]
        running.append(start(command, tmp_path / f"log{len(running)}"))
        return running[-1]

    yield begin_one
    for server in running:
        with server:
            pass


def complete(server: Server, **more: Any) -> httpx.Response:
    body = request(32, prompt(20)) | more
    return httpx.post(f"{server.url}/completion", json=body, timeout=20)


def timings(server: Server, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = complete(server, **more).json()["timings"]
    return found


# Last words and ends.

KINDS = {
    "oom-weights": FailureKind.OUT_OF_VRAM,
    "oom-kv": FailureKind.OUT_OF_VRAM,
    "oom-compute": FailureKind.OUT_OF_VRAM,
    "oom-first-request": FailureKind.OUT_OF_VRAM,
    "illegal-access": FailureKind.DRIVER,
    "no-kernel-image": FailureKind.DRIVER,
    "no-mtp-block": FailureKind.NO_MTP_BLOCK,
    "too-old-for-model": FailureKind.MODEL_UNSUPPORTED,
    "unknown-architecture": FailureKind.MODEL_UNSUPPORTED,
    "bad-magic": FailureKind.MODEL_DAMAGED,
    "truncated-header": FailureKind.MODEL_DAMAGED,
    "truncated-model": FailureKind.MODEL_DAMAGED,
    "missing-model": FailureKind.MODEL_MISSING,
    "segfault": FailureKind.CRASH,
    "assert": FailureKind.CRASH,
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_each_failure_is_recognised_from_its_log_and_its_end(begin: Serve, name: str) -> None:
    server = begin(fail=name)
    if FAILURES[name].at == "request":
        server.wait_ready()
        with pytest.raises(httpx.HTTPError):
            complete(server)
    status = server.wait_ended()

    kind = "exited" if status >= 0 else "killed"
    found = classify(server.log_text().splitlines(), exit_kind=kind, exit_status=abs(status))

    assert found.kind is KINDS[name]


def test_a_failure_can_pass_with_the_loads(begin: Serve) -> None:
    assert begin(fail=["oom-weights", "oom-kv", None]).wait_ended() == 1
    assert begin("--version").wait_ended() == 0
    assert begin("-m", "/nonexistent").wait_ended() == 1
    second = begin()
    assert second.wait_ended() == 1
    assert "kv cache" in second.log_text()
    begin().wait_ready()
    begin().wait_ready()


def test_a_model_without_mtp_block_only_fails_with_speculation(begin: Serve) -> None:
    begin(has_mtp=False).wait_ready()
    server = begin(*MTP)

    assert server.wait_ended() == 1
    assert "doesn't contain MTP layers" in server.log_text()


# Loading.


def test_mainline_answers_503_on_every_route_while_it_loads(begin: Serve) -> None:
    server = begin(load_s=1.0)
    while True:
        try:
            health = httpx.get(f"{server.url}/health")
        except httpx.ConnectError:
            continue
        break
    early = complete(server)

    assert (health.status_code, early.status_code) == (503, 503)
    assert early.json()["error"]["message"] == "Loading model"
    server.wait_ready()


def test_ik_is_silent_while_it_loads(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    made = install(tmp_path, dialect="ik-now", load_s=1.0)
    command = [str(made.program), "-m", str(tmp_path / "model.gguf")]
    with start(command, tmp_path / "log") as server:
        errors = set()
        until_s = time.monotonic() + 0.7
        while time.monotonic() < until_s:
            with pytest.raises(httpx.HTTPError) as caught:
                httpx.get(f"{server.url}/health", timeout=0.1)
            errors.add(type(caught.value))

        assert httpx.ReadTimeout in errors
        assert errors <= {httpx.ReadTimeout, httpx.ConnectError}
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200


# Wrong answers.


def test_replies_can_go_wrong_one_after_the_other(begin: Serve) -> None:
    kinds = ["html", "error", "no-tokens", "garbled", "repeated", "truncated", "closed", "normal"]
    server = begin(reply=kinds).wait_ready()

    html, error, empty, garbled, repeated = (complete(server) for _ in range(5))
    assert html.headers["content-type"] == "text/html"
    assert error.status_code == 500
    assert (empty.json()["content"], empty.json()["timings"]["predicted_n"]) == ("", 0)
    assert set(garbled.json()["content"]) == {"\ufffd"}
    assert set(repeated.json()["content"]) == {"?"}
    for _ in range(2):
        with pytest.raises(httpx.RemoteProtocolError):
            complete(server)
    assert complete(server).status_code == 200


# Speed.


def test_speculation_speeds_decoding_up_and_taxes_the_prompt(begin: Serve) -> None:
    plain = timings(begin(acceptance=0.9).wait_ready())
    drafted = timings(begin(*MTP).wait_ready())

    assert drafted["predicted_ms"] < 0.7 * plain["predicted_ms"]
    assert drafted["prompt_ms"] > 1.1 * plain["prompt_ms"]


def test_a_gate_drafts_less_and_accepts_more_of_it(begin: Serve) -> None:
    def rates(p_min: str, **behaviour: Any) -> tuple[int, float]:
        server = begin(*MTP[:-1], p_min, **behaviour).wait_ready()
        found = timings(server, n_predict=600)
        return found["draft_n"], found["draft_n_accepted"] / found["draft_n"]

    drafted_open, accepted_open = rates("0.0")
    drafted_gated, accepted_gated = rates("0.85")

    assert drafted_gated < 0.7 * drafted_open
    assert accepted_gated > accepted_open + 0.05


def test_ik_takes_the_depth_of_a_request_up_to_that_of_its_start(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    made = install(tmp_path, dialect="ik-now")
    command = [str(made.program), "-m", str(tmp_path / "model.gguf")]
    with serving([*command, "--spec-type", "mtp:n_max=3,p_min=0.0"], tmp_path / "log") as server:
        off = timings(server, **{"speculative.n_max": 0})
        one = timings(server, **{"speculative.n_max": 1})
        nine = complete(server, **{"speculative.n_max": 9})

    assert "draft_n" not in off
    assert one["draft_by_depth"][-1]["depth"] == 1
    assert nine.status_code == 400


def test_rules_make_a_response_surface(begin: Serve) -> None:
    rules = [
        {"when": {"n_ubatch": 512}, "set": {"pp_tok_s": 2000.0}},
        {"when": {"n_ubatch": 512, "threads": 6}, "set": {"tg_tok_s": 80.0}},
    ]

    slow = timings(begin("-ub", "256", "-t", "6", rules=rules).wait_ready())
    fast = timings(begin("-ub", "512", "-t", "6").wait_ready())

    assert slow["prompt_per_second"] == pytest.approx(1000)
    assert fast["prompt_per_second"] == pytest.approx(2000)
    assert fast["predicted_ms"] == pytest.approx(31 / 80 * 1000)


# Records and settings.


def test_the_command_line_that_arrived_is_recorded(begin: Serve, made: StandIn) -> None:
    server = begin("--cache-ram", "0", "--alias", "a b").wait_ready()
    complete(server)

    (argv,) = made.served()
    (done,) = made.events("completion")
    assert argv[-8:-4] == ["--cache-ram", "0", "--alias", "a b"]
    assert made.events("start")[0]["pid"] == server.process.pid
    assert set(made.events("start")[0]["environment"]) <= {"PATH", "PWD", "_", "SHLVL", "LC_CTYPE"}
    assert (done["body"]["n_predict"], done["n_predicted"]) == (32, 32)


def test_a_setting_that_does_not_exist_ends_it(begin: Serve) -> None:
    server = begin(tg_toks=3)

    assert server.wait_ended() == 1
    assert "unknown fields" in server.log_text()


@pytest.mark.parametrize("dialect", HELP_OF)
def test_every_golden_command_line_is_taken_by_its_dialect(dialect: str, tmp_path: Path) -> None:
    made = install(tmp_path, dialect=dialect)
    behaviour = Behaviour(**json.loads(made.settings.read_text()))
    for name, words in golden_lines(dialect).items():
        facts = Arguments(words, behaviour).facts
        told = dict(itertools.pairwise(words))
        assert facts["model"] == told["--model"], name
        assert facts["port"] == told["--port"], name
        drafts = "baseline" not in name
        assert facts["speculative"] == ("on" if drafts else "off"), name


@pytest.mark.parametrize(
    ("dialect", "spoken", "flag"),
    [
        ("main-old", "main-0x", "--load-mode"),
        ("main-0x", "main-mid", "--no-mmap"),
        ("ik-now", "main-mid", "--log-verbosity"),
    ],
)
def test_a_golden_command_line_of_another_dialect_is_refused(
    dialect: str, spoken: str, flag: str, tmp_path: Path
) -> None:
    made = install(tmp_path, dialect=dialect)
    behaviour = Behaviour(**json.loads(made.settings.read_text()))

    with pytest.raises(ArgumentError, match=f"argument: {flag}"):
        Arguments(golden_lines(spoken)["rtx-5060-ti-16gb-baseline"], behaviour)


def test_a_device_shows_in_the_log_of_level_4_and_at_the_end(begin: Serve) -> None:
    server = begin("-lv", "4", device=RTX_4070_SUPER).wait_ready()
    server.terminate()
    server.wait_ended()

    text = server.log_text()
    assert "- CUDA0   : NVIDIA GeForce RTX 4070 SUPER (12282 MiB, 11902 MiB free)" in text
    assert "offloaded 41/41 layers to GPU" in text
    assert "CUDA0 model buffer size =  8053.00 MiB" in text
    assert "12282 = 2277 + (9625 = 8053 + 1075 + 497) + 380 |" in text
