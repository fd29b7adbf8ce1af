"""Swaps to be cut short: what stands before, and what is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.fault.world import BROKEN, ENGINE, UNIT, World
from tunerd.app import Context
from tunerd.machine.files import lock
from tunerd.production.rollback import rollback
from tunerd.production.swap import SwapRequest, swap
from tunerd.profile.arm import Arm
from tunerd.profile.files import TunedRecord
from tunerd.records import plain

ARM = Arm("mine", "off", 0, 0.0, 0, "f16", 512, 2048, 2)
TUNED = TunedRecord(
    profile="night", values={}, sweep=7, promoted_s=0.0, sentence="", engine="mine", engine_sha256=None,
    model_sha256=None, driver_version=None, arm=plain(ARM),
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """`prepare` makes the world, `act` is the swap in it; `fails` says that it leads back."""

    name: str
    prepare: Callable[[World], None]
    act: Callable[[Context, World], object]
    fails: bool = False

    def __str__(self) -> str:
        return self.name


def deploy(
    ctx: Context, world: World, *aliases: str, program: str = ENGINE, profile: str | None = None
) -> None:
    """What `apply` does once its plan is made, one after the other."""
    for alias in aliases:
        request = world.request(world.text(alias, program=program), alias=alias)
        locked_swap(ctx, replace(request, generation=replace(request.generation, profile=profile)))


def locked_swap(ctx: Context, request: SwapRequest) -> None:
    """A swap by a process of its own."""
    with lock(ctx.paths.lock, purpose=request.generation.reason, since=ctx.now_text()):
        swap(ctx, request)


def go_back(ctx: Context) -> None:
    """What `rollback` does."""
    rollback(ctx, to=None, drain=False, confirm=lambda _: None)


def _nothing(_world: World) -> None:
    """A machine without a server."""


def _deployed(world: World) -> None:
    deploy(world.context(), world, "old")


def _deployed_twice(world: World) -> None:
    _deployed(world)
    deploy(world.context(), world, "older")


def _by_hand(world: World) -> None:
    world.put(world.text("by-hand"), mode=0o640)


def _by_hand_and_stopped(world: World) -> None:
    world.put(world.text("by-hand"), mode=0o600, starts=False, enables=False)


def _by_hand_and_replaced(world: World) -> None:
    """By one that starts at boot, which the other cannot."""
    text, _, _ = world.text("by-hand").partition(b"[Install]")
    world.put(text, enables=False)
    deploy(world.context(), world, "old")


def _packaged(world: World) -> None:
    (world.paths.runtime_unit_dir / UNIT).write_bytes(world.text("packaged"))
    world.manager.reload()
    world.manager.enable(UNIT)
    world.manager.start(UNIT)


def _packaged_and_replaced(world: World) -> None:
    _packaged(world)
    deploy(world.context(), world, "old")


def _apply(ctx: Context, world: World) -> None:
    deploy(ctx, world, "new")


def _apply_broken(ctx: Context, world: World) -> None:
    deploy(ctx, world, "new", program=BROKEN)


def _rollback(ctx: Context, world: World) -> None:
    del world
    go_back(ctx)


SCENARIOS = (
    Scenario("apply over a deployed unit", _deployed, _apply),
    Scenario("first apply", _nothing, _apply),
    Scenario("apply over a unit made by hand", _by_hand, _apply),
    Scenario("apply over a stopped unit", _by_hand_and_stopped, _apply),
    Scenario("apply over a packaged unit", _packaged, _apply),
    Scenario("rollback", _deployed_twice, _rollback),
    Scenario("rollback to no unit", _deployed, _rollback),
    Scenario("rollback to a packaged unit", _packaged_and_replaced, _rollback),
    Scenario("rollback to a unit that starts at no boot", _by_hand_and_replaced, _rollback),
    Scenario("apply that fails", _deployed, _apply_broken, fails=True),
    Scenario("first apply that fails", _nothing, _apply_broken, fails=True),
)
