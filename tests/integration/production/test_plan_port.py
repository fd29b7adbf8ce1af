"""What a plan says of a port that the server which runs now will leave behind."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.build_box import BuildBox, build_box
from tests.support.folders import open_folder
from tests.support.ports import free_port
from tests.support.stand_in import install
from tests.support.waiting import until
from tunerd.engine.builds import find_engines
from tunerd.engine.health import Failure, FailureKind
from tunerd.engine.server import Address
from tunerd.engine.serving import read_live_unit
from tunerd.machine.net import is_listened_on
from tunerd.production.gate import NotServing, port_will_be_free
from tunerd.production.lease import outlook
from tunerd.production.plan import check_port
from tunerd.production.rollback import preview


@pytest.fixture(scope="module")
def box() -> Iterator[BuildBox]:
    """ik's stand-in serves; `other` is one of mainline, `twin` another of ik."""
    with open_folder() as folder, contextlib.ExitStack() as running:
        dialects = {"build": "ik-now", "other": "main-0x", "twin": "ik-may"}
        engines = {name: install(folder / name, dialect=said) for name, said in dialects.items()}
        made = running.enter_context(build_box(engines["build"].program, shape="tiny"))
        settings = made.box.folder / "config/tunerd.toml"
        with settings.open("a") as file:
            for name in ("other", "twin"):
                file.write(f'[engines.{name}]\npath = "{engines[name].program}"\n')
        for name in engines:
            made.profile(name, engine__prefer=[name])
        for name in ("other", "build"):
            made.apply(name)
        yield made


def warnings(box: BuildBox, profile: str, *words: str) -> dict[str, Any]:
    plan = box.json("plan", profile, *words)
    return {one["code"]: one for one in plan["warnings"]}


def test_a_port_that_what_serves_leaves_to_another_family_only_later_is_told_of(
    box: BuildBox,
) -> None:
    elsewhere = f"serving.port={free_port()}"
    told = warnings(box, "other")["port-kept"]
    assert "a minute longer than it takes to load" in told["text"]
    assert f"keep port {box.port}" in told["text"]
    assert "retries the start for 65 s" in told["hint"]
    assert "port-kept" not in warnings(box, "build")
    assert "port-kept" not in warnings(box, "twin")
    assert "port-kept" not in warnings(box, "other", "--set", elsewhere)
    services = box.box.context.services
    services.stop("llama-server.service")
    assert "port-kept" not in warnings(box, "other"), "who does not run keeps no port"

    box.apply("other")

    assert "port-kept" not in warnings(box, "build"), "tunerd itself leaves no connection"
    with socket.create_connection(("127.0.0.1", box.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1)
        assert f"keep port {box.port}" in warnings(box, "build")["port-kept"]["text"]
        assert "port-kept" not in warnings(box, "other")
        assert "port-kept" not in warnings(box, "build", "--set", elsewhere)
        back = preview(box.box.context, None)
        assert "port-kept" in {one.code for one in back.messages}


def test_only_a_measurement_of_another_family_is_said_to_keep_the_port(box: BuildBox) -> None:
    ctx = box.box.context
    engines = {one.name: one for one in find_engines(ctx)}
    box.apply("build")
    kept = {name: outlook(ctx, measuring_s=1.0, engines=[engines[name]]).port_wait_s > 0
            for name in ("build", "twin", "other")}  # fmt: skip
    box.apply("other")
    assert kept == {"build": False, "twin": False, "other": True}


def test_a_port_that_somebody_else_took_is_told_before_a_rollback_too(box: BuildBox) -> None:
    ctx = box.box.context
    ctx.services.stop("llama-server.service")
    with socket.create_server(("127.0.0.1", box.port)):
        found = {one.code: one for one in preview(ctx, None).messages}
    assert "already listens on port" in found["port-taken"].text


def test_a_server_that_came_up_after_its_unit_was_read_is_no_stranger_on_its_port(
    box: BuildBox,
) -> None:
    """A plan is made for seconds: a restart in them refused the guard's larger margin, which then gave up."""
    ctx = box.box.context
    ctx.services.stop("llama-server.service")
    between = ctx.services.state("llama-server.service")
    ctx.services.start("llama-server.service")
    until(lambda: is_listened_on(box.port), "it listens")

    assert check_port(ctx, read_live_unit(ctx).serving, between) == []


def test_an_address_that_this_machine_has_not_is_refused_before_anything_stops(
    box: BuildBox,
) -> None:
    before = box.box.context.services.state("llama-server.service").invocation_id
    for host in ("no-such-box.invalid", "127.0.0.1,192.0.2.1"):
        words = ("build", "--set", f"serving.host={json.dumps(host)}")
        planned = box.box.call("plan", *words)
        assert planned.returncode == 1
        assert "not an address of this machine" in planned.stdout + planned.stderr
        assert host.rsplit(",", maxsplit=1)[-1] in planned.stdout + planned.stderr
    done = box.box.call("apply", *words, "--yes")
    assert done.returncode == 1
    assert "nothing was touched" in done.stderr
    assert box.box.context.services.state("llama-server.service").invocation_id == before
    for ours in ("0.0.0.0", "localhost"):  # noqa: S104
        assert "no-such-host" not in warnings(box, "build", "--set", f'serving.host="{ours}"')


def test_a_start_is_not_repeated_for_an_address_that_this_machine_has_not() -> None:
    words = "couldn't bind HTTP server socket"
    found = NotServing(
        "it ended", False, True, lambda: Failure(FailureKind.PORT_TAKEN, words, None)
    )
    assert port_will_be_free(found, Address("127.0.0.1", free_port()))
    assert not port_will_be_free(found, Address("192.0.2.1", free_port()))


def test_a_key_file_that_is_not_there_is_told_before_anything_stops(box: BuildBox) -> None:
    """systemd found the credential missing when it started the new server, and the old one was down by then."""
    missing = "serving.api_key_file=/nowhere/key"

    said = box.json("plan", "build", "--set", missing, expect=1)

    assert "no-key-file" in {one["code"] for one in said["messages"]}
