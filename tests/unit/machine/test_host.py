"""Odd machines, as trees of /proc and /sys files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.fake_gpu import FakeGpuReader, rtx_4070_super
from tests.support.folders import plant
from tunerd.machine.facts import Cpu, HostMemory
from tunerd.machine.host import has_memory_groups, memory_of, read_cpu, read_host, read_memory
from tunerd.machine.process import boot_id, unit_of

MEMINFO = """\
MemTotal:       32768000 kB
MemFree:         1024000 kB
MemAvailable:   20480000 kB
SwapTotal:       8192000 kB
SwapFree:        8000000 kB
"""
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         8388608              unlimited            bytes
Max file locks            unlimited            unlimited            locks
"""


def cpuinfo(n_cpus: int) -> str:
    block = "processor\t: {}\nmodel name\t: {}\nphysical id\t: 0\ncore id\t: {}\n\n"
    return "".join(block.format(cpu, "Ryzen", cpu // 2) for cpu in range(n_cpus))


def topology(siblings: list[str]) -> dict[str, str]:
    """`siblings[n]`: the list file of CPU n."""
    folder = "sys/devices/system/cpu/cpu{}/topology/core_cpus_list"
    return {folder.format(cpu): f"{text}\n" for cpu, text in enumerate(siblings)}


def test_an_empty_tree_is_all_unknown(tmp_path: Path) -> None:
    host = read_host(FakeGpuReader(rtx_4070_super()), root=tmp_path)

    assert host.gpus == (rtx_4070_super(),)
    assert host.cpu == Cpu(None, None, len(os.sched_getaffinity(0)))
    assert host.memory == HostMemory(None, None, None, None, None, None)
    assert (host.kernel, host.hostname) == (None, None)


def test_a_plain_machine_is_read(tmp_path: Path) -> None:
    kernel = {
        "osrelease": "6.12.48-amd64",
        "hostname": "workstation",
        "random/boot_id": "65ccfcbd-efe7-4ebe-a1b3-21185810d531",
    }
    plant(tmp_path, {f"proc/sys/kernel/{name}": f"{value}\n" for name, value in kernel.items()})
    plant(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/limits": LIMITS})

    host = read_host(FakeGpuReader(), root=tmp_path)

    memory = host.memory
    assert (memory.total_mib, memory.available_mib) == (32000, 20000)
    assert (memory.swap_total_mib, memory.swap_used_mib) == (8000, 188)
    assert (memory.memlock_mib, memory.memlock_unlimited) == (8, False)
    assert [host.kernel, host.hostname, boot_id(tmp_path)] == list(kernel.values())


def test_the_soft_memlock_limit_is_what_counts(tmp_path: Path) -> None:
    limits = {"unlimited": (None, True), "65536": (0, False), "0": (0, False), "?": (None, None)}
    for soft, expected in limits.items():
        plant(tmp_path, {"proc/self/limits": LIMITS.replace("8388608 ", f"{soft} ")})
        memory = read_memory(tmp_path)
        assert (memory.memlock_mib, memory.memlock_unlimited) == expected, soft


@pytest.mark.parametrize(
    ("siblings", "usable", "n_cores"),
    [
        (["0,4", "1,5", "2,6", "3,7"] * 2, range(8), 4),
        (["0,4", "1,5", "2,6", "3,7"] * 2, (0, 1, 4), 2),
        # Performance and efficiency cores are all cores.
        (["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"], range(8), 6),
        # A hidden topology is unknown, and not a guess.
        ([], range(8), None),
    ],
)
def test_threads_of_one_core_count_once(
    tmp_path: Path, siblings: list[str], usable: Sequence[int], n_cores: int | None
) -> None:
    plant(tmp_path, {"proc/cpuinfo": cpuinfo(8), **topology(siblings)})

    cpu = read_cpu(tmp_path, usable=usable)

    assert (cpu.model, cpu.physical_cores, cpu.logical_cores) == ("Ryzen", n_cores, len(usable))


def test_an_arm_board_is_read(tmp_path: Path) -> None:
    block = "processor\t: {}\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd asimdhp asimddp i8mm\n\n"
    model = "Raspberry Pi 5 Model B Rev 1.0"
    end = f"Revision\t: c04170\nModel\t\t: {model}\n"
    plant(tmp_path, {"proc/cpuinfo": "".join(block.format(cpu) for cpu in range(4)) + end})

    assert read_cpu(tmp_path).model == model


UNITS = {
    "0::/system.slice/llama-server.service\n": "llama-server.service",
    "0::/system.slice/system-foo.slice/foo@1.service/sub\n": "foo@1.service",
    "0::/user.slice/user-1000.slice/user@1000.service/app.slice/llama.service\n": "llama.service",
    "0::/user.slice/user-1000.slice/session-2.scope\n": "session-2.scope",
    "4:memory:/x.service\n1:name=systemd:/system.slice/a.service\n0::/\n": "a.service",
    "0::/docker/0123\n": None,
    "0::/\n": None,
    "0::/x/bad name.service\n": None,
    "0::/" + "a" * 300 + ".service\n": None,
    "": None,
    "garbage": None,
}


def test_the_unit_of_a_process_is_the_innermost_service(tmp_path: Path) -> None:
    for cgroup, unit in UNITS.items():
        plant(tmp_path, {"proc/77/cgroup": cgroup})
        assert unit_of(77, root=tmp_path) == unit, cgroup


def test_memory_of_a_process_tells_locked_from_mapped(tmp_path: Path) -> None:
    status = (
        "Name:\tllama-server\nVmLck:\t  411648 kB\nVmRSS:\t  500001 kB\nRssAnon:\t   88353 kB\n"
        "RssFile:\t  411648 kB\nVmSwap:\t       1 kB\n"
    )
    plant(tmp_path, {"proc/77/status": status})

    memory = memory_of(77, root=tmp_path)

    assert memory is not None
    found = (memory.rss_mib, memory.anonymous_mib, memory.locked_mib, memory.swapped_mib)
    assert found == (489, 87, 402, 1)


GIB = 1 << 30
OWN = "/user.slice/user-1000.slice/user@1000.service"


# Group, limits of folders (most, used, old file pages), and what is there and left of it [MiB].
GROUPS: list[tuple[str, dict[str, tuple[int | str, int | None, int]], tuple[int, int | None]]] = [
    # Of a container; old file pages are given back.
    ("/", {"": (8 * GIB, 5 * GIB, GIB)}, (8 << 10, 4 << 10)),
    ("/", {"": (1 << 50, 0, 0)}, (32000, 20000)),
    # What our own service may use says nothing of the server's.
    ("/system.slice/tunerd.service/worker",
     {"system.slice": (16 * GIB, 2 * GIB, 0), "system.slice/tunerd.service": (10**8, 7 * 10**7, 0),
      "system.slice/tunerd.service/worker": (5 * 10**7, None, 0)}, (16 << 10, 14 << 10)),
    # The tightest of nested groups counts, each by what is left of it.
    (f"{OWN}/app.slice/tunerd.service",
     {"user.slice": (20 * GIB, 18 * GIB, 0), OWN[1:]: (8 * GIB, GIB, 0),
      f"{OWN[1:]}/app.slice": ("max", None, 0)}, (8 << 10, 2 << 10)),
    # Where the usage of one is hidden nobody knows what is left.
    ("/inner", {"inner": (8 * GIB, None, 0)}, (8192, None)),
    ("/inner", {"": (16 * GIB, 0, 0), "inner": (8 * GIB, None, 0)}, (8192, None)),
]  # fmt: skip


@pytest.mark.parametrize(("group", "limits", "expected_mib"), GROUPS)
def test_memory_is_what_the_groups_around_a_server_leave_to_it(
    tmp_path: Path,
    group: str,
    limits: dict[str, tuple[int | str, int | None, int]],
    expected_mib: tuple[int, int | None],
) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": f"0::{group}\n"}
    for folder, (most, used, old) in limits.items():
        files[f"sys/fs/cgroup/{folder}/memory.max"] = f"{most}\n"
        if used is not None:
            files[f"sys/fs/cgroup/{folder}/memory.current"] = f"{used}\n"
        files[f"sys/fs/cgroup/{folder}/memory.stat"] = f"anon 1\ninactive_file {old}\n"
    plant(tmp_path, files)

    memory = read_memory(tmp_path)

    assert (memory.total_mib, memory.available_mib) == expected_mib


def test_whether_memory_is_counted_by_group(tmp_path: Path) -> None:
    """Some boards are started without it, and a container may get none of its own."""
    assert not has_memory_groups(tmp_path)
    for groups, is_counted in (("cpuset cpu io memory pids", True), ("cpuset cpu io pids", False)):
        plant(tmp_path, {"sys/fs/cgroup/cgroup.controllers": f"{groups}\n"})
        assert has_memory_groups(tmp_path) is is_counted
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").unlink()
    plant(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "1\n"})
    assert has_memory_groups(tmp_path)
