"""One measurement at a time on a card, whoever measures: two processes with a STATE each."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.world import a_world
from tests.support.fake_gpu import FakeGpuReader, a_card
from tests.support.folders import ROOT
from tunerd.errors import Busy
from tunerd.production.lease import hold

HOLD = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.fault.world import a_world
from tests.support.fake_gpu import FakeGpuReader, a_card
from tunerd.production.lease import hold
with a_world(Path(sys.argv[1])) as world:
    world.put(world.text("one"))
    gpu = FakeGpuReader(replace(a_card(), uuid=sys.argv[2]))
    with hold(replace(world.context(), gpu=gpu), purpose="sweep", budget_s=60):
        print("held", flush=True)
        sys.stdin.read()
"""


def test_a_second_state_waits_for_the_card_and_has_it_once_it_is_free(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    card = a_card()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "one"), str(card.uuid)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    with other, a_world(tmp_path / "two") as world:
        assert other.stdin is not None
        assert other.stdout is not None
        world.put(world.text("one"))
        ctx = replace(world.context(), gpu=FakeGpuReader(card))
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Busy, match=card.name) as raised, hold(ctx, purpose="x", budget_s=60):
            pass
        assert raised.value.cause is not None
        assert f"process {other.pid} " in raised.value.cause
        assert world.serving_alias() == "one"
        elsewhere = replace(ctx, gpu=FakeGpuReader(replace(card, uuid=f"{card.uuid}-x")))
        with hold(elsewhere, purpose="another card", budget_s=60):
            pass
        other.kill()
        other.wait(30)
        with hold(ctx, purpose="x", budget_s=60):
            pass
