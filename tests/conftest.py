"""What the marks ask of a machine: tests that cannot run here say so, and fail where required."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import needs
from tests.support.browser import needs_browser
from tests.support.postgres import Postgres, postgres_server
from tunerd.cli.main import cli
from tunerd.operations import entered_by

entered_by(cli)  # as every process is that asks for an operation

_E2E_PROGRAMS = {
    "mkfs.ext4": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "systemd-nspawn": "systemd-container",
}
# What the copy-on-write view of this host needs to boot with logins and user managers.
_E2E_FILES = {
    "/lib/systemd/systemd": "systemd",
    "/usr/bin/dbus-daemon": "dbus",
    "/usr/lib/systemd/user/dbus.socket": "dbus-user-session",
    "/usr/lib/python3/dist-packages": "python3",
}


def pytest_configure() -> None:
    """What differs between machines and shells is the same for every test."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # On a busy machine an example takes as long as it takes; a deadline would fail at random.
    if importlib.util.find_spec("hypothesis") is not None:  # machines for e2e have none
        import hypothesis  # noqa: PLC0415

        hypothesis.settings.register_profile("tunerd", deadline=None)
        hypothesis.settings.load_profile("tunerd")


@functools.cache
def _is_shared(path: Path) -> bool:
    """Whether tests of this file share something that is made once: by a fixture, or kept by a function."""
    text = path.read_text(encoding="utf-8")
    return (
        'scope="module"' in text
        or re.search(r"^@(functools\.)?cache$", text, re.MULTILINE) is not None
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: the collector of garbage is not to look through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What may take longest begins first, so that no worker ends with it alone."""

    def most_s(item: pytest.Item) -> tuple[float, bool]:
        mark = item.get_closest_marker("timeout")
        return float(mark.args[0]) if mark and mark.args else 0.0, _is_shared(item.path)

    items.sort(key=most_s, reverse=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share something for their module, or class, run in one process: it is made once.

    xdist's own groups come to nothing with pytest 9.2 (its issue 1386).
    """
    # Machines for e2e have none, and it tells no types.
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped] # noqa: PLC0415

    class ByWhatIsShared(LoadScopeScheduling):  # type: ignore[misc] # it tells no types
        def _split_scope(self, nodeid: str) -> str:
            path, *classes, _ = nodeid.partition("[")[0].split("::")
            if _is_shared(config.rootpath / path):
                return path
            return "::".join([path, *classes]) if classes else nodeid

    config.option.loadscopereorder = False  # it would begin with the files of most tests
    return ByWhatIsShared(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, check in _CHECKS.items():
        if item.get_closest_marker(name) is not None:
            check()


@pytest.fixture(scope="session")
def engines() -> dict[str, Path]:
    """Real engine programs by file name, from the folder in TUNERD_TEST_ENGINES."""
    _needs_engine()
    return {path.name: path for path in needs.engines()}


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A real PostgreSQL that runs, from Debian's packages."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["file", "database"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a store may be, for `open_store`: what is true of one is true of both."""
    if request.param == "file":
        return str(tmp_path / "state" / "evidence.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.database()


def _needs_engine() -> None:
    folder = os.environ.get(needs.ENGINES_VARIABLE, "")
    if not needs.engines():
        needs.missing(
            "engine",
            f"no engines in {folder}" if folder else "no folder of engines",
            f"set {needs.ENGINES_VARIABLE} to a folder of llama-server builds",
        )


def _needs_llama() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        needs.missing(
            "llama", "no embedded engine", "pip install 'tunerd[embedded]' brings xllamacpp"
        )


def _needs_gpu() -> None:
    if not Path("/dev/nvidiactl").exists():
        needs.missing("gpu", "no NVIDIA GPU", "run this test on a machine with a card and driver")


def _needs_e2e() -> None:
    if os.environ.get("TUNERD_TEST_INSIDE"):
        return
    if os.geteuid() != 0:
        needs.missing("e2e", "not root", "run `sudo ./tests/run e2e`")
    packages = {package for name, package in _E2E_PROGRAMS.items() if not shutil.which(name)}
    packages |= {package for path, package in _E2E_FILES.items() if not Path(path).exists()}
    if packages:
        missing = " ".join(sorted(packages))
        needs.missing("e2e", "programs are missing", f"`apt-get install {missing}` brings them")
    if "\toverlay\n" not in Path("/proc/filesystems").read_text():
        needs.missing("e2e", "no overlay file system", "run on a kernel that has overlayfs")
    if " cgroup2 " not in Path("/proc/self/mounts").read_text():
        needs.missing("e2e", "no cgroup v2 hierarchy", "mount cgroup2 on /sys/fs/cgroup")


def _needs_to_be_alone() -> None:
    if not os.environ.get("TUNERD_TEST_ALONE"):
        pytest.skip("it needs the machine to itself; `tests/run alone` runs it")


def _needs_the_whole() -> None:
    if not {"TUNERD_TEST_FAULTS", "TUNERD_TEST_WHOLE"} & os.environ.keys():
        pytest.skip("too long for every change; TUNERD_TEST_WHOLE=1 runs it")


_CHECKS: dict[str, Callable[[], None]] = {
    "alone": _needs_to_be_alone,
    "browser": needs_browser,
    "e2e": _needs_e2e,
    "engine": _needs_engine,
    "gpu": _needs_gpu,
    "llama": _needs_llama,
    "whole": _needs_the_whole,
}
