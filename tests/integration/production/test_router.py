"""A server without a model is a router: it is told as one, and nothing that tunerd does is the worse for it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.world import a_generation
from tests.integration.conftest import started_by_hand
from tests.support import needs
from tests.support.local_box import Box, codes
from tests.support.ports import free_port
from tests.support.waiting import until
from tunerd.engine.health import Expectation
from tunerd.errors import RolledBack
from tunerd.production.status import status
from tunerd.production.swap import SwapRequest, swap
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.watch.watcher import Watcher
from tunerd.words import sha256

UNIT = "llama-server.service"


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A router of a real build, by a unit that somebody wrote."""
    made = Box(tmp_path)
    (tmp_path / "models.ini").write_text(f"[tiny]\nmodel = {tmp_path}/tiny.gguf\n")
    words = (str(needs.engine("mainline-2026-08-18")), "--models-preset", f"{tmp_path}/models.ini",
             "--port", str(free_port()), "-t", "1")  # fmt: skip
    with started_by_hand(made, shlex.join(words)):
        yield made


@pytest.mark.engine
def test_a_router_that_stood_before_serves_again_after_a_swap_that_failed(box: Box) -> None:
    """Its answer that no model was named was taken for garbage: it was stranded, and restarted by each recovery."""
    until(lambda: status(box.context).payload["healthy"], lambda: str(status(box.context).payload))
    text = b"[Service]\nType=exec\nExecStart=/bin/false\n"
    request = SwapRequest(
        text=text,
        old_sha256=sha256(box.unit.read_bytes()),
        generation=a_generation(sha256(text)),
        address=None,
        expected=Expectation(None, None, expects_draft=False),
        drain=False,
    )

    with pytest.raises(RolledBack) as failed:
        swap(box.context, request)

    assert "serves again" in str(failed.value.state)


@pytest.mark.engine
def test_a_router_is_named_and_left_alone(box: Box) -> None:
    until(lambda: status(box.context).payload["healthy"], lambda: str(status(box.context).payload))

    assert "a router that starts a server for each model" in box.call("status").stdout
    (unit,) = box.json("detect")["units"]
    assert unit["router"] is True
    seen = Watcher(box.context).look().engine
    assert (seen.is_ready, seen.is_busy) == (True, None), "it has no slots of its own"
    refused = box.json("profiles", "new", "mine", "--from-unit", "llama-server", code=None)
    assert "is a router" in refused["error"]["message"]
    unknown = box.json("doctor", code=None)["not_checked"]
    assert any("it is a router" in json.dumps(one) for one in unknown)


@pytest.mark.engine
def test_what_would_take_a_routers_place_is_told_what_it_takes_away_and_no_figure_is_taken_of_it(
    box: Box,
) -> None:
    """A bench asked the first model that it lists, and kept that as figures of the router; a plan had its name change."""
    write(design(SHAPES["tiny"]), box.model)
    until(lambda: status(box.context).payload["healthy"], lambda: str(status(box.context).payload))

    box.json("profiles", "new", "mine", "--model", str(box.model))
    found = codes(box.json("plan", "mine"))
    refused = box.json("bench", code=1)["error"]

    assert "router" in found
    assert "alias-changes" not in found
    assert "is a router" in refused["message"]
    assert "#MODEL" in refused["hint"]
