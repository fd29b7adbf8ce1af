"""The daemon's looks at cards through the real NVML calls: what is kept, told and shown of each state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from tests.support.api_box import serving
from tests.support.fake_gpu import rtx_4070_super
from tests.support.faked import UNIT, FakedBox
from tests.support.nvml_world import StubWorld, loading
from tunerd.doctor.doctor import examine
from tunerd.machine.facts import Gpu, GpuProcess
from tunerd.watch.daemon import Daemon
from tunerd.watch.figures import GpuNow, Reading
from tunerd.watch.history import History, history
from tunerd.words import MiB

BEGIN_S = 1_790_000_040.0  # a whole minute
LOOK_S = 10.0
MINUTE = 6  # looks
SERVER_MIB, DESKTOP_MIB = 8000, 900


class CardBox(FakedBox):
    """A daemon over a server, on a clock that a test advances, with cards that only the stub knows."""

    def __init__(self, folder: Path, cards: StubWorld) -> None:
        super().__init__(folder, now_s=BEGIN_S)
        self.cards = cards
        self.ctx = replace(self.ctx, gpu=cards.reader)
        self.daemon = Daemon(self.ctx)

    def card(self, **changes: object) -> Gpu:
        """A card at work: the server holds some of it, a desktop some more."""
        pid = self.manager.state(UNIT).main_pid
        assert pid is not None
        mine = GpuProcess(pid, MiB(SERVER_MIB), "compute", "llama-server", UNIT)
        desktop = GpuProcess(77, MiB(DESKTOP_MIB), "graphics", "Xorg", "display-manager.service")
        at_work = replace(
            rtx_4070_super(used_mib=SERVER_MIB + DESKTOP_MIB),
            processes=(mine, desktop), utilisation_percent=97, power_w=218.4, sm_clock_mhz=2610,
            temperature_c=71,
        )  # fmt: skip
        return replace(at_work, **changes)  # type: ignore[arg-type]

    def look(self, n: int) -> None:
        for _ in range(n):
            self.daemon.look()
            self.clock.advance(LOOK_S)

    @property
    def latest(self) -> Reading:
        return self.daemon.telemetry.readings()[-1]

    @property
    def only(self) -> GpuNow:
        assert self.latest.gpus is not None
        (gpu,) = self.latest.gpus
        return gpu

    @property
    def kept(self) -> History:
        """Every whole minute so far, and all that was told, newest first."""
        found = history(self.ctx, 0.0, self.clock.now_s() + 60)
        assert found.problem is None
        return found

    @property
    def told(self) -> list[str]:
        return [event.kind for event in reversed(self.kept.events)]


def findings(box: CardBox) -> dict[str, str]:
    """What doctor found, by its codes."""
    return {one["code"]: one["seen"] for one in examine(box.ctx).payload["findings"]}


@pytest.fixture
def box(tmp_path: Path, nvml_library: Path) -> Iterator[CardBox]:
    with loading() as load:
        yield CardBox(tmp_path, StubWorld(tmp_path, nvml_library, load))


def test_power_heat_and_whose_memory_it_is_are_kept_and_shown(box: CardBox) -> None:
    box.cards.show(box.card())
    box.look(MINUTE + 1)

    (row,) = box.kept.gpus
    assert (row.n, row.used_mib, row.server_mib, row.others_mib) == (6, 8900, 8000, 900)
    assert row.free_mib == 12282 - 380 - 8900
    assert (row.utilisation_percent, row.power_w, row.sm_clock_mhz) == (97.0, 218.4, 2610.0)
    assert (row.temperature_c, row.n_throttled) == (71.0, 0)
    assert box.told == []
    assert findings(box)["display-vram"] == "GPU 0: Xorg holds 900 MiB of VRAM"
    with serving(box=box.box, context=box.ctx, telemetry=box.daemon.telemetry) as api:
        told, shown = (
            api.ask("/metrics").text,
            " ".join(unescape(api.ask("/?hours=1").text).split()),
        )
    found = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    for name, mib in (("server", SERVER_MIB), ("others", DESKTOP_MIB)):
        assert float(found[f'tunerd_gpu_memory_{name}_bytes{{gpu="0"}}']) == mib << 20
    for words in ("8.7 of 12.0", ">0.9<", "218 of 220", ">97 %<", ">71<", ">nothing<"):
        assert words in shown
    assert "held by others" in shown, "the chart has a line of what others hold"


def test_a_card_that_goes_is_told_once_and_read_again_when_it_is_back(box: CardBox) -> None:
    words = "GPU 0: the GPU is lost: it has fallen off the bus"
    box.cards.show(box.card())
    box.look(MINUTE)
    box.cards.lose(0)
    box.look(2 * MINUTE)

    assert box.latest.gpus is None
    assert box.told == ["gpu"]
    assert words in box.kept.events[0].text
    assert words in findings(box)["gpu-unreadable"]

    box.cards.nvml.reload_driver()  # as whoever mends it does: open sessions are dead
    box.cards.show(box.card())
    box.look(MINUTE + 1)
    assert (box.only.used_mib, box.latest.gpu_problem) == (SERVER_MIB + DESKTOP_MIB, None)
    assert box.told == ["gpu", "gpu-back"]
    kept = box.kept
    assert [point.n for point in kept.points] == [6, 6, 6, 6], "the daemon looked all the time"
    assert [row.begin_s - BEGIN_S for row in kept.gpus] == [0, 180], "and nothing was made up"
