"""What is kept of a sweep: what its page says, and what follows a rollback by hand."""

from __future__ import annotations

from dataclasses import replace

from tests.fault.world import World
from tunerd.machine.files import lock
from tunerd.production.rollback import rollback
from tunerd.production.swap import swap
from tunerd.profile.arm import Arm
from tunerd.profile.files import TunedRecord, read_tuned, write_tuned
from tunerd.records import plain
from tunerd.sweep.record import after_rollback, page_of


def _deploy(world: World, alias: str) -> None:
    ctx, text = world.context(), world.text(alias)
    request = world.request(text, alias=alias)
    request = replace(request, generation=replace(request.generation, profile="night"))
    with lock(ctx.paths.lock, purpose="apply", since=ctx.now_text()):
        swap(ctx, request)


def test_a_rollback_is_done_though_nothing_can_be_kept_of_it(world: World) -> None:
    _deploy(world, "old")
    _deploy(world, "tuned")
    ctx = world.context()
    number = next(iter(ctx.generations.entries())).generation.number
    tuned = TunedRecord(
        profile="night", values={}, sweep=1, promoted_s=0.0, sentence="", engine="mine",
        engine_sha256=None, model_sha256=None, driver_version=None, generation=number,
    )  # fmt: skip
    write_tuned(ctx, tuned)
    ctx.paths.evidence.write_bytes(b"damaged" * 1000)

    done = rollback(ctx, to=None, drain=False, settle=lambda *a: after_rollback(ctx, *a))

    assert world.serving_alias() == "old"
    assert read_tuned(ctx, "night") is None
    (told,) = (one.text for one in done.messages if one.code == "tuned")
    assert "may still be in force" in told


def test_a_fill_whose_length_was_found_by_asking_is_no_failure_of_its_arm() -> None:
    arm = plain(Arm("ik", "off", 0, 0.0, 0, "f16", 512, 2048, 2))
    told = [
        {"event": "request", "arm": arm, "purpose": purpose, "failure": failure}
        for purpose, failure in (("fill", "refused"), ("fill", "oom"), ("block", "refused"))
    ]
    page = page_of(told, {})
    assert {(one["failure"], one["n"]) for one in page["failures"]} == {("oom", 1), ("refused", 1)}
