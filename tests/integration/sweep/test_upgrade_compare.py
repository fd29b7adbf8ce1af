"""An engine that is upgraded in place: the build before is compared with the one after in the next night."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.fake_gpu import FakeGpuReader, rtx_4070_super
from tests.support.faked import set_to
from tests.support.sweep_box import SweepBox, swept, upgrade
from tests.support.waiting import until
from tunerd.app import Context
from tunerd.errors import UsageError
from tunerd.sweep.run import due_comparison, run_night

SETTINGS = """
[sweep]
patience_s = 1.0
quiet_s = 1.0
budget_s = 30.0
[guards]
upgrade = "{upgrade}"
"""


def settings(box: SweepBox, upgrade: str) -> None:
    path = box.box.folder / "config" / "tunerd.toml"
    text = path.read_text().partition("[sweep]")[0]
    path.write_text(
        text + SETTINGS.format(upgrade=upgrade) + "[service]\nsettle_s = 0.1\ndrain_s = 0.0\n"
    )


def closed_by_day(ctx: Context) -> None:
    """Nobody waits for a hot card, and tries builds, to be told that the window is closed."""
    hot = FakeGpuReader(replace(rtx_4070_super(), throttle_reasons=("software thermal slowdown",)))
    hour = int(ctx.clock.now_s()) // 3600
    window = f"{(hour + 6) % 24:02d}:00-{(hour + 8) % 24:02d}:00"
    by_day = replace(set_to(ctx, sweep__timezone="UTC", sweep__window=window), gpu=hot)
    with pytest.raises(UsageError, match="is closed"):
        run_night(by_day, confirm=lambda _: None)


@pytest.fixture
def box() -> Iterator[SweepBox]:
    with swept() as found:
        yield found


def test_a_night_after_an_upgrade_compares_a_kept_build_with_the_new_one_once(
    box: SweepBox,
) -> None:
    settings(box, "act")
    assert due_comparison(box.box.context) is None, "nothing was upgraded"
    before = box.engine.program.read_bytes()
    upgrade(box)
    found = box.json("guard", "check")["replanned"]
    assert (found["identity_changed"], found["kept"]) == (True, None)
    assert due_comparison(box.box.context) is None, "no copy of the build before is there"
    assert "no copy of it was kept" in box.call("guard", "check").stdout

    box.engine.program.write_bytes(before)
    box.call("engines", "keep", "fake")
    upgrade(box)
    found = box.json("guard", "check")["replanned"]
    assert found["kept"].startswith("kept-")
    assert (found["compared"], found["refusals"]) == (None, [])
    settings(box, "advise")
    assert due_comparison(box.box.context) is None, "only told"
    settings(box, "act")
    refused = box.json("sweep", "night", "--yes", code=1)
    assert "was replaced after the server started" in refused["error"]["cause"]
    assert box.serves
    box.box.context.services.restart(box.box.context.unit)
    until(lambda: box.serves, "it serves on the build that stands")
    closed_by_day(box.box.context)

    night = box.json("sweep", "night", "--yes")

    assert (night["command"], night["a"], night["b"]) == ("compare", found["kept"], "fake")
    assert night["sentence"]
    assert box.serves
    assert box.leftovers() == []
    after = box.json("guard", "check")["replanned"]
    assert (after["compared"], after["run"]) == (night["sentence"], night["run"])
    assert due_comparison(box.box.context) is None, "the next night sweeps"
