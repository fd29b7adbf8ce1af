"""What loads by `rollback` and `recover` show of memory is kept as that of `apply` is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.build_box import BuildBox, build_box
from tunerd.machine.proc import boot_id
from tunerd.production.journal import SCHEMA, SwapRecord
from tunerd.records import plain

pytestmark = pytest.mark.llama
UNIT = "llama-server.service"


@pytest.fixture(scope="module")
def box() -> Iterator[BuildBox]:
    with build_box(None, shape="tiny") as made:
        made.profile("one")
        made.profile("two", serving__ctx_size=512)
        yield made


def memory(box: BuildBox, profile: str) -> dict[str, Any]:
    found: dict[str, Any] = box.json("plan", profile)["memory"]
    return found


def totals(box: BuildBox, profile: str) -> list[tuple[str, int, int]]:
    """By device: what is planned with, and what was calculated."""
    devices = memory(box, profile)["devices"]
    return [(one["name"], one["total_mib"], one["calculated_mib"]) for one in devices]


def forget(box: BuildBox) -> None:
    """Nothing is known of any load."""
    for path in box.box.folder.glob("state/cache/load-*.json"):
        path.unlink()


def test_the_load_of_a_rollback_is_used_by_the_next_plan(box: BuildBox) -> None:
    box.apply("one")
    wanted = totals(box, "one")
    box.apply("two")
    forget(box)
    assert memory(box, "one")["loads"] is None

    box.json("rollback")

    assert memory(box, "one")["loads"] == 1
    assert totals(box, "one") == wanted, "as the load of the apply showed"


def test_the_load_of_a_server_that_recovery_saw_serve_is_kept(box: BuildBox) -> None:
    generation = box.apply("two")["generation"]
    forget(box)
    folder = box.box.folder / "state"
    kept = folder / f"generations/{generation:06d}"
    told = json.loads((kept / "generation.json").read_text())
    (kept / "outcome.json").unlink()
    record = SwapRecord(
        unit=UNIT, unit_path=str(box.box.unit), generation=generation, reason="apply",
        old_sha256="0" * 64, new_sha256=told["unit_sha256"], backup=f"{UNIT}.pre-x", boot_id=boot_id() or "",
        started_s=1.0, was_active=True, was_healthy=True, was_enabled=True, old_invocation="0" * 32,
    )  # fmt: skip
    (folder / f"journal/{UNIT}.json").write_text(json.dumps(plain(record, schema=SCHEMA)))

    assert box.json("recover")["found"] == "judge"

    assert memory(box, "two")["loads"] == 1
    box.json("recover")
    assert memory(box, "two")["loads"] == 1, "nothing was recovered, and nothing loaded"
