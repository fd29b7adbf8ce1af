"""What a plan says of a port that the server which runs now will leave behind."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.build_box import BuildBox, build_box
from tests.support.stand_in import install
from tests.support.sweep_box import for_everybody
from tunerd.engine.builds import PlanRequest
from tunerd.errors import DeployError
from tunerd.machine.files import is_locked
from tunerd.machine.net import free_port
from tunerd.production.apply import apply
from tunerd.production.plan import Plan
from tunerd.production.rollback import preview


@pytest.fixture(scope="module")
def box() -> Iterator[BuildBox]:
    """ik's stand-in serves; `other` is one of mainline, `twin` another of ik."""
    with a_box("build") as made:
        yield made


@pytest.fixture(scope="module")
def mainline() -> Iterator[BuildBox]:
    """The same box, with the one of mainline serving in the place of ik's."""
    with a_box("build", "other") as made:
        yield made


@contextlib.contextmanager
def a_box(*deployed: str) -> Iterator[BuildBox]:
    """A box with three stand-ins, of which these were deployed one after the other."""
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
        for name in deployed:
            made.apply(name)
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


def test_nothing_is_locked_while_a_person_reads_a_plan_and_an_edit_meanwhile_is_told(
    box: BuildBox,
) -> None:
    ctx = box.box.context
    seen: list[bool] = []

    def edit(_plan: Plan) -> None:
        seen.append(is_locked(ctx.paths.lock))
        box.box.unit.write_text(f"{before}# mine\n")

    before = box.box.unit.read_text()
    with pytest.raises(DeployError, match="no longer what was shown"):
        apply(ctx, PlanRequest("twin", {}), drain=False, ask=edit)

    assert seen == [False]
    assert box.box.unit.read_text() == f"{before}# mine\n"
    box.box.unit.write_text(before)


# To ik, whose sockets share no port with what another family's connections left.


def test_a_connection_that_will_keep_the_port_from_ik_is_told_before_anything_stops(
    mainline: BuildBox,
) -> None:
    assert "port-kept" not in warnings(mainline, "build"), "tunerd itself leaves none"
    with socket.create_connection(("127.0.0.1", mainline.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1)
        told = warnings(mainline, "build")["port-kept"]
        assert f"keep port {mainline.port}" in told["text"]
        assert "port-kept" not in warnings(mainline, "other")
        elsewhere = f"serving.port={free_port()}"
        assert "port-kept" not in warnings(mainline, "build", "--set", elsewhere)
        back = preview(mainline.box.context, None)
        assert "port-kept" in {one.code for one in back.messages}


def test_a_port_that_somebody_else_took_is_told_before_a_rollback_too(mainline: BuildBox) -> None:
    ctx = mainline.box.context
    ctx.services.stop("llama-server.service")
    try:
        with socket.create_server(("127.0.0.1", mainline.port)):
            found = {one.code: one for one in preview(ctx, None).messages}
            assert "listens on port" in found["port-taken"].text
    finally:
        ctx.services.start("llama-server.service")
