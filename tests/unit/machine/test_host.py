"""Odd machines, as trees of /proc and /sys files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.fake_gpu import FakeGpuReader, rtx_4070_super
from tests.support.folders import plant
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
    folder = "sys/devices/system/cpu"
    return {
        f"{folder}/cpu{cpu}/topology/core_cpus_list": f"{text}\n"
        for cpu, text in enumerate(siblings)
    }


def test_an_empty_tree_is_all_unknown(tmp_path: Path) -> None:
    host = read_host(FakeGpuReader(rtx_4070_super()), root=tmp_path)

    assert host.gpus == (rtx_4070_super(),)
    cpu, memory = host.cpu, host.memory
    assert (cpu.model, cpu.physical_cores) == (None, None)
    assert cpu.logical_cores == len(os.sched_getaffinity(0))
    assert (memory.total_mib, memory.available_mib, memory.memlock_mib) == (None,) * 3
    assert (memory.swap_total_mib, memory.swap_used_mib, memory.memlock_unlimited) == (None,) * 3
    assert (host.kernel, host.hostname) == (None, None)


def test_a_plain_machine_is_read(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/limits": LIMITS,
            "proc/sys/kernel/osrelease": "6.12.48-amd64\n",
            "proc/sys/kernel/hostname": "workstation\n",
            "proc/sys/kernel/random/boot_id": "65ccfcbd-efe7-4ebe-a1b3-21185810d531\n",
        },
    )

    host = read_host(FakeGpuReader(), root=tmp_path)

    memory = host.memory
    assert (memory.total_mib, memory.available_mib) == (32000, 20000)
    assert (memory.swap_total_mib, memory.swap_used_mib) == (8000, 188)
    assert (memory.memlock_mib, memory.memlock_unlimited) == (8, False)
    assert (host.kernel, host.hostname) == ("6.12.48-amd64", "workstation")
    assert boot_id(tmp_path) == "65ccfcbd-efe7-4ebe-a1b3-21185810d531"


@pytest.mark.parametrize(
    ("soft", "mib", "unlimited"),
    [("unlimited", None, True), ("65536", 0, False), ("0", 0, False), ("?", None, None)],
)
def test_the_soft_memlock_limit_is_what_counts(
    tmp_path: Path, soft: str, mib: int | None, unlimited: bool | None
) -> None:
    plant(tmp_path, {"proc/self/limits": LIMITS.replace("8388608 ", f"{soft} ")})

    memory = read_memory(tmp_path)

    assert (memory.memlock_mib, memory.memlock_unlimited) == (mib, unlimited)


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
    plant(
        tmp_path,
        {
            "proc/cpuinfo": "".join(block.format(cpu) for cpu in range(4))
            + "Revision\t: c04170\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n"
        },
    )

    assert read_cpu(tmp_path).model == "Raspberry Pi 5 Model B Rev 1.0"


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/llama-server.service\n", "llama-server.service"),
        ("0::/system.slice/system-foo.slice/foo@1.service/sub\n", "foo@1.service"),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/llama-server.service\n",
            "llama-server.service",
        ),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", "session-2.scope"),
        ("4:memory:/x.service\n1:name=systemd:/system.slice/a.service\n0::/\n", "a.service"),
        ("0::/docker/0123\n", None),
        ("0::/\n", None),
        ("0::/x/bad name.service\n", None),
        ("0::/" + "a" * 300 + ".service\n", None),
        ("", None),
        ("garbage", None),
    ],
)
def test_the_unit_of_a_process_is_the_innermost_service(
    tmp_path: Path, cgroup: str, unit: str | None
) -> None:
    plant(tmp_path, {"proc/77/cgroup": cgroup})

    assert unit_of(77, root=tmp_path) == unit


def test_memory_of_a_process_tells_locked_from_mapped(tmp_path: Path) -> None:
    status = (
        "Name:\tllama-server\nVmLck:\t  411648 kB\nVmRSS:\t  500001 kB\nRssAnon:\t   88353 kB\n"
        "RssFile:\t  411648 kB\nVmSwap:\t       1 kB\n"
    )
    plant(tmp_path, {"proc/77/status": status})

    memory = memory_of(77, root=tmp_path)

    assert memory is not None
    assert (memory.rss_mib, memory.anonymous_mib) == (489, 87)
    assert (memory.locked_mib, memory.swapped_mib) == (402, 1)


GIB = 1 << 30
OWN = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize(
    ("group", "limits", "expected_mib"),
    [
        # Of a container; old file pages are given back.
        ("/", {"": (8 * GIB, 5 * GIB, GIB)}, (8 << 10, 4 << 10)),
        ("/", {"": (1 << 50, 0, 0)}, (32000, 20000)),
        # What our own service may use says nothing of the server's.
        (
            "/system.slice/tunerd.service/worker",
            {
                "system.slice": (16 * GIB, 2 * GIB, 0),
                "system.slice/tunerd.service": (10**8, 7 * 10**7, 0),
                "system.slice/tunerd.service/worker": (5 * 10**7, None, 0),
            },
            (16 << 10, 14 << 10),
        ),
        # The tightest of nested groups counts, each by what is left of it.
        (
            f"{OWN}/app.slice/tunerd.service",
            {
                "user.slice": (20 * GIB, 18 * GIB, 0),
                OWN[1:]: (8 * GIB, GIB, 0),
                f"{OWN[1:]}/app.slice": ("max", None, 0),
            },
            (8 << 10, 2 << 10),
        ),
        # Where the usage of one is hidden nobody knows what is left.
        ("/inner", {"inner": (8 * GIB, None, 0)}, (8192, None)),
        ("/inner", {"": (16 * GIB, 0, 0), "inner": (8 * GIB, None, 0)}, (8192, None)),
    ],
)
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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"}, True),
        # Some boards are started without it, and a container may get none of its own.
        ({"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io pids\n"}, False),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "1\n"}, True),
        ({}, False),
    ],
)
def test_whether_memory_is_counted_by_group(
    tmp_path: Path, files: dict[str, str], expected: bool
) -> None:
    plant(tmp_path, files)
    assert has_memory_groups(tmp_path) is expected
