"""Machines for end-to-end tests.

`host_machine` and `sid_machine` are booted machines with tunerd installed; `machines` makes others.
All have a designed model in /srv/models and, where TUNERD_TEST_ENGINES names some, engines in
/srv/engines. Everything under this folder is marked `e2e`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import needs, roots, run_folder
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.places import VARIABLE, places
from tests.support.roots import Tunerd
from tunerd.tryout.designed import SHAPES, design, write

# Tests in this folder run inside a machine, by `Machine.pytest`.
collect_ignore_glob = [] if os.environ.get("TUNERD_TEST_INSIDE") else ["inside/*"]

_MADE = pytest.StashKey[list[Machine]]()


Machines = Callable[..., Machine]
"""Makes a booted machine of a root, which ends with the test; see `Machine` for the options."""
KeptMachine = Callable[[str], Machine]
"""Makes a booted machine of the root of this name, which ends with the file."""

ROOTS = {"host": roots.host_root, "sid": roots.sid_root, "trixie": roots.trixie_root}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark them, and take one root of two: where no places are asked for, there is time for one.

    Each test has its own, always the same; `both_roots` marks those that depend on what differs.
    """
    here = Path(__file__).parent
    left_out = []
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        item.add_marker(pytest.mark.e2e)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        roots_asked = {"bare_root", "installed_root", "any_root"} & set(params)
        if VARIABLE in os.environ or not roots_asked or item.get_closest_marker("both_roots"):
            continue
        name, _, _ = item.nodeid.partition("[")
        taken = ("host", "sid")[zlib.crc32(name.encode()) % 2]
        if params[roots_asked.pop()] != taken:
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session")
def _clean_host() -> None:
    """Nothing of a dead test run is left."""
    run_folder.sweep(roots.cache_folder())


@pytest.fixture(scope="session")
def build_root(_clean_host: None, pytestconfig: pytest.Config) -> Callable[..., Root]:
    """Builds a root while its progress can be seen."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def build(root: Callable[..., Root], **options: object) -> Root:
        if capture is None:
            return root(**options)
        with capture.global_and_fixture_disabled():
            return root(**options)

    return build


@pytest.fixture(scope="session")
def host_root(build_root: Callable[..., Root]) -> Root:
    """This host's own root, with tunerd."""
    return build_root(roots.host_root)


@pytest.fixture(scope="session")
def sid_root(build_root: Callable[..., Root]) -> Root:
    """Debian sid with its llama-server, and with tunerd."""
    return build_root(roots.sid_root)


@pytest.fixture(scope="session")
def trixie_root(build_root: Callable[..., Root]) -> Root:
    """Debian 13, with tunerd."""
    return build_root(roots.trixie_root)


@pytest.fixture(scope="session", params=["host", "sid"])
def bare_root(request: pytest.FixtureRequest, build_root: Callable[..., Root]) -> Root:
    """Each root in turn, with tunerd's sources and what installing it downloads, not installed."""
    return build_root(ROOTS[request.param], tunerd=Tunerd.BARE)


@pytest.fixture(scope="session", params=["host", "sid"])
def installed_root(request: pytest.FixtureRequest, build_root: Callable[..., Root]) -> Root:
    """Each root in turn, with tunerd as `install.sh` leaves it."""
    return build_root(ROOTS[request.param], tunerd=Tunerd.INSTALLED)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `tiny.gguf`, a designed model; machines see it as /srv/models."""
    folder = tmp_path_factory.mktemp("models")
    folder.chmod(0o755)
    written = write(design(SHAPES["tiny"]), folder / "tiny.gguf")
    written.chmod(0o644)
    return folder


@pytest.fixture(scope="module")
def kept_machine(build_root: Callable[..., Root], model_folder: Path) -> Iterator[KeptMachine]:
    """Makes machines with tunerd that live for the whole file."""
    with ExitStack() as stack:

        def make(root: str) -> Machine:
            made = Machine(build_root(ROOTS[root]), binds={"/srv/models": model_folder})
            return stack.enter_context(made)

        yield make


@pytest.fixture
def machines(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Machines]:
    """Makes machines that end with the test; a failed test shows their journals."""
    made: list[Machine] = []
    shared = {"/srv/models": model_folder}
    if engines := os.environ.get(needs.ENGINES_VARIABLE):
        shared["/srv/engines"] = Path(engines)
    request.node.stash[_MADE] = made

    def make(root: Root, **options: Any) -> Machine:
        made.append(Machine(root, binds=shared, **options))
        return made[-1].boot()

    yield make
    for machine in made:
        machine.close()


@pytest.fixture
def host_machine(machines: Machines, host_root: Root) -> Machine:
    """A booted copy of this host, with tunerd."""
    return machines(host_root)


@pytest.fixture
def sid_machine(machines: Machines, sid_root: Root) -> Machine:
    """A booted Debian sid with its llama-server, and with tunerd."""
    return machines(sid_root)


@pytest.fixture(params=["host", "sid"])
def any_root(request: pytest.FixtureRequest) -> Root:
    """Each root in turn, with tunerd."""
    root: Root = request.getfixturevalue(f"{request.param}_root")
    return root


@pytest.fixture
def machine(machines: Machines, any_root: Root) -> Machine:
    """A booted machine of each root in turn, with tunerd."""
    return machines(any_root)


@pytest.fixture
def bare_machine(machines: Machines, bare_root: Root) -> Machine:
    """A booted machine of each root in turn, where tunerd is not installed."""
    return machines(bare_root)


@pytest.fixture
def installed_machine(machines: Machines, installed_root: Root) -> Machine:
    """A booted machine of each root in turn, where `install.sh` has installed tunerd."""
    return machines(installed_root)


@pytest.fixture(params=places(of="system"), ids=str)
def member_machine(
    request: pytest.FixtureRequest, machines: Machines, build_root: Callable[..., Root]
) -> Machine:
    """A booted machine of each place where tunerd is root's, as `install.sh` leaves it; alice is an operator."""
    made = machines(build_root(ROOTS[request.param.root], tunerd=Tunerd.INSTALLED))
    made.run("usermod", "--append", "--groups", "tunerd", "alice")
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]  # what pluggy sends
    if call.when == "call" and report.failed:
        for machine in item.stash.get(_MADE, []):
            if machine.is_on:
                with suppress(AssertionError):
                    lines = machine.journal("--boot", "--lines=60", "--output=short-monotonic")
                    report.sections.append((f"journal of {machine.name}", "\n".join(lines)))
    return report  # type: ignore[return-value]  # what pluggy wants back
