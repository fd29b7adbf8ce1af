"""The stand-in plays what its settings say."""

from __future__ import annotations

import itertools
import json
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
from tests.support.server_process import Server, start
from tests.support.stand_in import StandIn, install
from tunerd.engine.health import FailureKind, classify


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
