"""What is measured in production's place, on real processes: it comes back whatever happens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.forked import Forked
from tests.support.local_box import Box, deployed
from tests.support.ports import free_port
from tests.support.supervised import is_alive, supervisor_pid
from tests.support.waiting import until
from tunerd.app import Context, build_context
from tunerd.engine.choice import PlanRequest
from tunerd.engine.server import LlamaServer
from tunerd.errors import LeaseEnded
from tunerd.production.lease import Held, hold
from tunerd.production.plan import Plan, make_plan
from tunerd.production.recover import recover
from tunerd.production.status import status, verify
from tunerd.units.manager import is_candidate

pytestmark = pytest.mark.llama
BUDGET_S = 300.0


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Box]:
    with deployed(tmp_path_factory.mktemp("box"), port) as box:
        yield box


@pytest.fixture
def ctx(box: Box) -> Iterator[Context]:
    made = build_context(environment=box.environment, start_supervisor=True)
    yield made
    until(lambda: made.services.state(made.unit).is_active, "production is back")
    wait_until_ready(made)
    until(lambda: as_before(made), "production is as it was")


def a_plan(ctx: Context, port: int, **changes: object) -> Plan:
    """The deployed server with another context size."""
    options = {
        "model.path": str(ctx.paths.config_dir.parent / "tiny.gguf"),
        "serving.threads": 1,
        "serving.threads_batch": 1,
        "serving.port": port,
        "serving.ctx_size": 512,
        "serving.alias": "measured",
        "speculation.type": "off",
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return make_plan(ctx, PlanRequest("cpu-embedded", options))


def as_before(ctx: Context) -> bool:
    """Production serves as deployed, and nothing of a measurement is left."""
    left = [unit for unit in ctx.services.service_units() if is_candidate(unit)]
    return verify(ctx).exit_code == 0 and not left and not ctx.paths.measurement.exists()


def wait_until_ready(ctx: Context) -> None:
    until(lambda: bool(status(ctx).payload["healthy"]), "production answers")


@contextmanager
def held(ctx: Context) -> Iterator[Held]:
    with hold(ctx, purpose="a test", budget_s=BUDGET_S) as found:
        yield found


def test_a_candidate_is_what_would_be_deployed_and_production_comes_back(
    ctx: Context, port: int
) -> None:
    plan = a_plan(ctx, port)
    with held(ctx) as lease, lease.serve(plan) as candidate:
        assert candidate.fault is None
        assert candidate.vram_free_mib is None
        assert any("model" in line for line in candidate.lines)
        server = LlamaServer(candidate.address, ctx.clock)
        assert server.alias() == "measured"
        pid = ctx.services.state(candidate.unit).main_pid
        assert pid is not None
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        words = tuple(command_line.strip("\0").split("\0"))
        assert words[-len(plan.command.argv) + 1 :] == plan.command.argv[1:]
        text = (ctx.paths.runtime_unit_dir / candidate.unit).read_text()
        command = text[text.index("ExecStart=") : text.index("Restart=")]
        assert command in plan.unit_text
        assert not ctx.services.state(ctx.unit).is_active
    assert lease.without_service_s is not None
    assert 0 < lease.without_service_s < BUDGET_S
    assert not is_alive(pid)


def test_while_something_is_measured_status_and_verify_say_so_and_see_no_drift(
    ctx: Context, port: int
) -> None:
    with held(ctx) as lease, lease.serve(a_plan(ctx, port)):
        seen, checked = status(ctx), verify(ctx)
        assert not a_plan(ctx, port).errors  # the port is taken by the candidate
    assert seen.payload["measurement"]["purpose"] == "a test"
    assert seen.payload["drift"] == []
    assert checked.exit_code == 0
    for found in (seen, checked):
        (message,) = [m for m in found.messages if m.code == "measuring"]
        assert "serves again" in message.text
    assert status(ctx).payload["measurement"] is None


def test_a_killed_supervisor_is_named_though_the_next_one_has_started_production(
    ctx: Context, port: int
) -> None:
    with hold(ctx, purpose="a test", budget_s=BUDGET_S) as held, held.serve(a_plan(ctx, port)):
        pid = supervisor_pid(ctx.paths)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_alive(pid), "the supervisor is gone")
        recover(ctx)
        ctx.services.start(ctx.unit)
        assert ctx.services.state(ctx.unit).is_active
        with pytest.raises(LeaseEnded) as learned:
            held.check()
    assert learned.value.cause == "tunerd's supervisor ended"


@pytest.mark.parametrize("victims", ["command", "supervisor", "both"])
def test_production_comes_back_whoever_is_killed(
    box: Box, ctx: Context, port: int, victims: str
) -> None:
    def measure(tell: Callable[[object], None]) -> None:
        own = build_context(environment=box.environment, start_supervisor=True)
        with held(own) as lease, lease.serve(a_plan(own, port)) as candidate:
            tell("serving" if candidate.fault is None else candidate.fault)
            time.sleep(BUDGET_S)

    command = Forked(measure)
    assert command.told.readline() == "serving\n"
    if victims != "command":
        pid = supervisor_pid(ctx.paths)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    if victims == "supervisor":
        os.kill(command.pid, signal.SIGINT)  # its sleep; in use it notices between requests
        command.end()
    else:
        command.kill()
    if victims == "both":  # nobody is left who could: the next call of tunerd is
        assert not ctx.services.state(ctx.unit).is_active
    recover(ctx)
    wait_until_ready(ctx)
    assert status(ctx).payload["alias"] != "measured"
