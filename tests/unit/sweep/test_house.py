"""What a sweep waits for, gives way to and stops at: disk, heat, other programs on the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fake_gpu import a_card
from tunerd.machine.facts import POWER_CAP, Gpu, GpuProcess
from tunerd.sweep.box import crowd, disk, heat, neighbours
from tunerd.words import MiB

SERVER, TRAINING, DESKTOP = 100, 200, 300


def process(pid: int, name: str | None = "python3", mib: int | None = 4000, kind: str = "compute") -> GpuProcess:  # fmt: skip
    return GpuProcess(pid, None if mib is None else MiB(mib), kind, name, None)


def card(*processes: GpuProcess, throttled: tuple[str, ...] = ()) -> Gpu:
    return replace(a_card(processes=processes), throttle_reasons=throttled, temperature_c=88)


def test_a_program_that_computes_beside_the_server_is_told_by_name() -> None:
    gpu = card(process(SERVER, "llama-server"), process(TRAINING))
    assert crowd([gpu], {SERVER}, ()) == "python3 (200, 4000 MiB) on GPU 0 computes there too"


def test_the_server_itself_is_nobody_else() -> None:
    assert crowd([card(process(SERVER, "llama-server"))], {SERVER}, ()) is None


def test_a_desktop_does_not_count() -> None:
    desktop = process(DESKTOP, "gnome-shell", kind="compute+graphics")
    browser = process(301, "firefox", kind="graphics")
    assert list(neighbours([card(desktop, browser)], {SERVER})) == []


def test_who_was_there_when_it_began_may_stay_and_who_comes_later_may_not() -> None:
    gpu = card(process(TRAINING), process(400, "ffmpeg"))
    assert "ffmpeg" in (crowd([gpu], (), {TRAINING}) or "")
    assert crowd([gpu], (), {TRAINING, 400}) is None


def test_a_little_memory_of_somebody_is_no_reason() -> None:
    assert crowd([card(process(TRAINING, mib=40))], (), ()) is None
    assert crowd([card(process(TRAINING, mib=None))], (), ()) is not None


def test_a_process_that_cannot_be_seen_may_be_the_server() -> None:
    assert crowd([card(process(TRAINING, name=None))], (), ()) is None


@pytest.mark.parametrize(
    "reason", ["software thermal slowdown", "hardware thermal slowdown", "power brake"]
)
def test_a_gpu_that_is_held_back_is_told_with_its_temperature(reason: str) -> None:
    assert heat([card(throttled=(POWER_CAP, reason))]) == f"GPU 0 is held back at 88 C: {reason}"


def test_the_owners_power_limit_is_no_heat() -> None:
    assert heat([card(throttled=(POWER_CAP,))]) is None


def test_what_cannot_be_read_is_no_trouble() -> None:
    assert heat([replace(card(), throttle_reasons=None)]) is None
    assert crowd([replace(card(), processes=None)], (), ()) is None
    assert (heat(None), crowd(None, (), ())) == (None, None)


def test_a_disk_with_little_room_is_told() -> None:
    assert disk(31, 32, "/var/lib/tunerd") == "31 MiB are free where /var/lib/tunerd is, and 32 are needed"  # fmt: skip
    assert disk(32, 32, "/x") is None
    assert disk(None, 32, "/x") is None
