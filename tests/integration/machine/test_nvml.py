"""The real pynvml over the C stub of NVIDIA's library."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contracts.gpu import GpuReaderContract, assert_plausible
from tests.support import nvml_stub
from tests.support.fake_gpu import a_card, rtx_3090_ti, rtx_4070_super
from tests.support.folders import SUPPORT
from tests.support.nvml_world import StubWorld, add_pci_device, loading
from tests.support.waiting import until
from tunerd.machine.facts import Gpu, GpuProcess
from tunerd.machine.gpu import NvmlReader
from tunerd.measure.trust import GpuLook, energy_of, look_at


@pytest.fixture
def load() -> Iterator[Callable[[Path], None]]:
    """Makes pynvml use this library file."""
    with loading() as use:
        yield use


@pytest.fixture
def world(tmp_path: Path, nvml_library: Path, load: Callable[[Path], None]) -> StubWorld:
    return StubWorld(tmp_path, nvml_library, load)


class TestNvmlReader(GpuReaderContract):
    """The contract, over the fixture `world` above."""


def only(world: StubWorld) -> Gpu:
    """The card as it is read."""
    (gpu,) = world.reader.read().gpus or ()
    return gpu


def processes_of(world: StubWorld) -> tuple[GpuProcess, ...]:
    return only(world).processes or ()


@pytest.mark.parametrize("has_bus", [False, True])
def test_without_a_library_there_is_no_card_or_nothing_is_known(
    world: StubWorld, tmp_path: Path, has_bus: bool
) -> None:
    world.nvml.fail("nvmlInitWithFlags", nvml_stub.LIBRARY_NOT_FOUND)
    if has_bus:
        add_pci_device(tmp_path, "0000:00:02.0", "0x8086")
        add_pci_device(tmp_path, "0000:00:03.0", "0x10de", pci_class="0x0c0330")

    found = NvmlReader(root=tmp_path).read()

    words = "the NVIDIA driver's library libnvidia-ml.so.1 was not found"
    assert (found.gpu_problem, found.gpus) == ((None, ()) if has_bus else (words, None))


def test_a_card_on_the_bus_without_a_driver_is_named(world: StubWorld) -> None:
    world.hide()

    reading = world.reader.read()

    assert reading.gpus is None
    assert reading.gpu_problem == (
        "the NVIDIA kernel driver is not loaded, "
        "but an NVIDIA GPU is on the PCI bus at 0000:01:00.0"
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (nvml_stub.LIB_RM_VERSION_MISMATCH, "have different versions"),
        (nvml_stub.NO_PERMISSION, "no permission"),
        (nvml_stub.UNKNOWN, "error 999"),
        (12345, "error 12345"),
    ],
)
@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_a_driver_that_refuses_is_explained(
    world: StubWorld, function: str, code: int, words: str
) -> None:
    world.show(rtx_4070_super())
    world.nvml.fail(function, code)

    reading = world.reader.read()

    assert reading.gpus is None
    assert words in (reading.gpu_problem or "")


def test_a_driver_that_was_updated_under_who_reads_it_awaits_a_reboot(world: StubWorld) -> None:
    world.show(rtx_4070_super())
    loaded, folder = world.root / "proc/driver/nvidia", world.root / "usr/lib64"
    loaded.mkdir(parents=True)
    (loaded / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  x")
    folder.mkdir(parents=True)
    for version in ("580.95.05", "581.1"):
        (folder / f"libnvidia-ml.so.{version}").touch()
        (folder / "libnvidia-ml.so.1").unlink(missing_ok=True)
        (folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")
        reading = world.reader.read()
        assert reading.gpus == (rtx_4070_super(),)
        is_updated = version == "581.1"
        why = "the loaded kernel module is 580.95.05, the driver's library 581.1"
        assert reading.awaits_reboot == reading.gpu_problem == (why if is_updated else None)

    world.nvml.fail("nvmlInitWithFlags", nvml_stub.LIB_RM_VERSION_MISMATCH)
    assert NvmlReader(root=world.root).read().awaits_reboot == why
    (loaded / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  581.1  x")
    late = NvmlReader(root=world.root).read()
    assert late.awaits_reboot is None, "of a process that has loaded the library before the module"
    assert "have different versions" in str(late.gpu_problem)
    (loaded / "version").unlink()
    blind = NvmlReader(root=world.root).read()
    assert (blind.gpus, blind.awaits_reboot) == (None, blind.gpu_problem)


def test_a_card_that_is_lost_between_two_questions_is_not_half_read(world: StubWorld) -> None:
    world.show(rtx_4070_super(index=0), rtx_3090_ti(index=1))
    world.nvml.fail("nvmlDeviceGetPowerManagementDefaultLimit", nvml_stub.GPU_IS_LOST, 1)

    reading = world.reader.read()

    assert reading.gpus == (rtx_4070_super(index=0),)
    assert reading.gpu_problem == "GPU 1: the GPU is lost: it has fallen off the bus"


ALL_FUNCTIONS = sorted(
    set(re.findall(r"\bnvml(?:Device|System)(?:Get|Is)\w+", (SUPPORT / "nvml_stub.c").read_text()))
)


@pytest.mark.parametrize("function", ALL_FUNCTIONS)
def test_no_failure_of_any_function_raises(world: StubWorld, function: str) -> None:
    for code in (1, 3, 15, 424242):
        world.show(rtx_4070_super())
        world.nvml.fail(function, code)
        assert_plausible(world.reader.read())


def test_one_function_that_fails_costs_one_value(world: StubWorld) -> None:
    for code in (3, 4, 13, 999):
        world.show(rtx_4070_super())
        world.nvml.fail("nvmlDeviceGetPowerManagementDefaultLimit", code)
        assert world.reader.read().gpus == (replace(rtx_4070_super(), power_default_w=None),)


def test_what_is_there_rounds_down_and_what_is_taken_rounds_up(world: StubWorld) -> None:
    world.show(a_card(), extra=("memory 10485759 1 1",))

    gpu = only(world)
    assert (gpu.total_mib, gpu.reserved_mib, gpu.used_mib, gpu.free_mib) == (9, 1, 1, 9)


@pytest.mark.parametrize("number", ["0", "4294967295"])
def test_impossible_numbers_are_unknown(world: StubWorld, number: str) -> None:
    world.show(
        a_card(),
        extra=(f"power {number} {number} {number} {number}", f"pcie {number} 4 {number} 16"),
    )

    gpu = only(world)
    assert (gpu.power_limit_w, gpu.power_default_w, gpu.power_max_w) == (None, None, None)
    assert (gpu.pcie_generation, gpu.pcie_width, gpu.pcie_width_max) == (None, None, 16)


@pytest.mark.parametrize(
    ("rows", "sizes", "left_mib"),
    [
        # In both lists, each of which gives the memory of the whole process.
        ([("compute", 77, 600, 0), ("graphics", 77, 600, 0)], [600], 300),
        ([("compute", 77, None, 0), ("graphics", 77, 600, 0)], [600], 300),
        # In two MIG instances.
        ([("compute", 77, 100, 1), ("compute", 77, 200, 2)], [300], 600),
        ([("compute", 78, 100, 1), ("compute", 78, None, 2)], [None], None),
        ([("compute", 77, 0, 0)], [None], None),
    ],
)
def test_a_process_is_there_once_with_all_its_memory(
    world: StubWorld,
    rows: list[tuple[str, int, int | None, int]],
    sizes: list[int | None],
    left_mib: int | None,
) -> None:
    extra = (
        nvml_stub.process_line(kind, pid, mib and mib << 20, instance=instance)
        for kind, pid, mib, instance in rows
    )
    world.show(a_card(used_mib=900), extra=tuple(extra))

    gpu = only(world)

    assert [process.used_mib for process in gpu.processes or ()] == sizes
    assert [process.kind for process in gpu.processes or ()] == [
        "+".join(dict.fromkeys(row[0] for row in rows))
    ]
    assert [process.name for process in gpu.processes or ()] == [None]
    assert gpu.unattributed_mib == left_mib


@pytest.mark.parametrize("namespace", ["pid:[4026532211]", None])
def test_in_another_pid_namespace_names_are_not_trusted(
    world: StubWorld, namespace: str | None
) -> None:
    world.add_process(77, comm=b"Xorg", cgroup="0::/system.slice/display-manager.service")
    world.show(a_card(used_mib=900), extra=(nvml_stub.process_line("graphics", 77, 600 << 20),))
    if namespace is None:
        (world.root / "proc/self/ns/pid").unlink()
    else:
        world.set_pid_namespace(namespace)

    (process,) = processes_of(world)
    assert (process.pid, process.used_mib) == (77, 600)
    assert (process.name, process.unit, process.is_display_server) == (None, None, False)


def test_a_hostile_process_name_cannot_steer_a_terminal(world: StubWorld) -> None:
    world.add_process(77, comm=b"\x1b[2Jevil\xff\x07", cgroup="0::/x/\x1b[2J.service\n")
    world.show(a_card(used_mib=900), extra=(nvml_stub.process_line("compute", 77, 600 << 20),))

    (process,) = processes_of(world)
    assert process.name is not None
    assert process.name.isprintable()
    assert "evil" in process.name
    assert process.unit is None


def test_a_mig_device_is_not_a_card(world: StubWorld) -> None:
    world.show(rtx_4070_super(index=0), rtx_3090_ti(index=1), extra=("mig_device",))

    assert world.reader.read().gpus == (rtx_4070_super(index=0),)


def test_a_request_takes_what_the_card_counts_while_the_server_works(
    world: StubWorld, tmp_path: Path
) -> None:
    server, idle_w, limit_w = tmp_path / "spins", 30.0, 220.0
    server.write_text("#!/bin/sh\nwhile :; do :; done\n")
    server.chmod(0o755)
    card = replace(rtx_4070_super(used_mib=2000), energy_j=1000.0)
    world.show(card, extra=(f"servers {server} {1 << 30} {idle_w * 1000:.0f} 100",))

    with subprocess.Popen([server]) as busy:
        try:
            until(lambda: processes_of(world), "it computes there")
            looks = [look(world, busy.pid)]
            while looks[-1].at_s - looks[0].at_s < 1.0:
                time.sleep(0.05)
                looks.append(look(world, busy.pid))
        finally:
            busy.kill()

    taken, span_s = energy_of(looks), looks[-1].at_s - looks[0].at_s
    assert taken is not None
    assert idle_w * (span_s - 0.1) < taken <= limit_w * (span_s + 0.1)
    world.nvml.extra += ["energy -"]
    world.nvml.write()
    until(lambda: only(world).power_w == idle_w, "it rests")
    assert only(world).energy_j is None, "an older card"


def look(world: StubWorld, pid: int) -> GpuLook:
    return look_at(world.reader.read().gpus, [pid], at_s=time.monotonic())


@pytest.mark.gpu
def test_a_real_card_reads_plausibly() -> None:
    reader = NvmlReader()

    first, second = reader.read(), reader.read()

    assert first.gpus, first.gpu_problem
    assert_plausible(first)
    assert [gpu.uuid for gpu in first.gpus] == [gpu.uuid for gpu in second.gpus or ()]
    assert all(gpu.total_mib and gpu.compute_capability for gpu in first.gpus)
    assert first.driver_version
    assert first.cuda_version
