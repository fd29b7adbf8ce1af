"""What a plan says of a port that the server which runs now will leave behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.build_box import BuildBox, build_box
from tests.support.stand_in import install
from tests.support.sweep_box import for_everybody
from tunerd.system.ports import free_port


@pytest.fixture(scope="module")
def box() -> Iterator[BuildBox]:
    """ik's stand-in serves; `other` is one of mainline, `twin` another of ik."""
    folder = Path(tempfile.mkdtemp(prefix="tunerd-test-"))
    folder.chmod(0o755)
    dialects = {"build": "ik-now", "other": "main-0x", "twin": "ik-may"}
    engines = {name: install(folder / name, dialect=said) for name, said in dialects.items()}
    for engine in engines.values():
        for_everybody(engine)
    with build_box(engines["build"].program, shape="tiny") as made:
        settings = made.box.folder / "config/tunerd.toml"
        with settings.open("a") as file:
            for name in ("other", "twin"):
                file.write(f'[engines.{name}]\npath = "{engines[name].program}"\n')
        for name in engines:
            made.profile(name, engine__prefer=[name])
        made.apply("build")
        yield made
    shutil.rmtree(folder, ignore_errors=True)


def warnings(box: BuildBox, profile: str, *words: str) -> dict[str, Any]:
    plan = box.json("plan", profile, *words)
    return {one["code"]: one for one in plan["warnings"]}


def test_going_from_ik_to_another_family_says_that_its_port_may_be_kept(box: BuildBox) -> None:
    told = warnings(box, "other")["port-kept"]
    assert "a minute longer than it loads" in told["text"]
    assert f"port {box.port}" in told["text"]
    assert "repeated for 65 s" in told["hint"]


def test_what_can_have_the_port_at_once_is_not_warned_of(box: BuildBox) -> None:
    assert "port-kept" not in warnings(box, "build")
    assert "port-kept" not in warnings(box, "twin")
    elsewhere = f"serving.port={free_port()}"
    assert "port-kept" not in warnings(box, "other", "--set", elsewhere)


def test_a_server_that_does_not_run_keeps_no_port(box: BuildBox) -> None:
    services = box.box.context.services
    services.stop("llama-server.service")
    try:
        assert "port-kept" not in warnings(box, "other")
    finally:
        services.start("llama-server.service")
