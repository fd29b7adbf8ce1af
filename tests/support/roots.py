"""File systems that test machines boot from: this host's own root, and a Debian sid root.

Each root is a stack of read-only folders (layers) under a machine's writable top:

    the base          this host's `/`, or Debian sid made by mmdebstrap
    the dependencies  a virtual environment in /opt/tunerd with what tunerd and its tests need
    the code          tunerd's wheel in that environment, and its sources

and a seed that is copied into the top: two users, and units that would only disturb. Layers are
built once, under a lock, in a cache outside the repository, and found again by a hash of what
went into them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from typing import IO

from tests.support import layers
from tests.support.overlay import Root
from tests.support.programs import program

SOURCES = Path(__file__).parents[2]
PREFIX = Path("/opt/tunerd")
"""Where tunerd is installed in a root."""
SOURCES_INSIDE = Path("/usr/local/src/tunerd")
"""Where a root has tunerd's sources and tests."""
WHEELS_INSIDE = Path("/opt/wheels-for-tests")
OFFLINE_PIP = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(WHEELS_INSIDE)}
"""Environment in which pip finds everything that tunerd needs without a network."""
NOT_COMPILED = {"PIP_NO_COMPILE": "0"}
"""Environment in which pip leaves bytecode out, which takes it longer than all else; it reads this as `compile`."""
EARLIER_INSIDE = Path("/usr/local/src/tunerd-earlier")
EARLIER_WHEELS_INSIDE = Path("/opt/wheels-of-earlier")
EARLIER_PIP = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{EARLIER_WHEELS_INSIDE} {WHEELS_INSIDE}"}

_FORMAT = "2"  # change it when the building of layers changes
_KEEP = 4  # of each kind, beside those in use or new
_KEEP_S = 1800
_kept: dict[Path, IO[str]] = {}
_SID_PACKAGES = (
    "ca-certificates", "curl", "dbus", "dbus-user-session", "iproute2", "libggml0-backend-vulkan",
    "libpam-systemd", "llama.cpp-tools", "llama.cpp-tools-extra", "mesa-vulkan-drivers", "polkitd", "procps",
    "python3", "python3-venv", "systemd", "systemd-sysv",
)  # fmt: skip
_SOURCE_NAMES = ("LICENSE", "README.md", "docs/reference/tunerd.1", "install.sh", "profiles",
                 "pyproject.toml", "tests", "tunerd", "units")  # fmt: skip
_TRIXIE_PACKAGES = (
    *(name for name in _SID_PACKAGES if not re.match("llama|mesa|libggml", name)),
    "libgomp1",  # of the embedded engine; elsewhere llama.cpp brings it
)
_NOT_INSIDE = re.compile(r"(hypothesis|mypy|pytest-xdist|ruff|schemathesis|types-)")
# Of the host's own root: what its owner enabled, keeps at home or has running is not to be seen.
_HIDDEN_OF_HOST = (
    "boot", *(f"etc/rc{level}.d" for level in "0123456S"), "etc/systemd/system", "etc/systemd/user",
    "etc/tunerd", "home", "media", "mnt", "root", "srv", "tmp", "var/cache/tunerd-e2e", "var/lib/systemd",
    "var/lib/tunerd", "var/log/journal", "var/tmp",
)  # fmt: skip


def cache_folder() -> Path:
    """Where roots and running machines are kept; TUNERD_TEST_CACHE moves it."""
    folder = Path(os.environ.get("TUNERD_TEST_CACHE") or "/var/cache/tunerd-e2e")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Tunerd(Enum):
    """How tunerd is there in a root."""

    BARE = auto()
    """Its sources and what installing it downloads; not installed."""
    FOR_TESTS = auto()
    """In /opt/tunerd and on the path, with what its tests need; nothing else was set up."""
    INSTALLED = auto()
    """As `install.sh` installs it for the whole machine."""


def host_root(tunerd: Tunerd = Tunerd.FOR_TESTS) -> Root:
    """This host's own root."""
    top_level = {path.name for path in Path("/").iterdir() if not path.is_symlink()}
    system = {"bin", "dev", "etc", "lib", "opt", "proc", "run", "sbin", "sys", "usr", "var"}
    foreign = sorted(
        name for name in top_level - system if not re.fullmatch(r"lib.*|lost\+found", name)
    )
    hidden = dict.fromkeys((*_HIDDEN_OF_HOST, *foreign))
    version = program("/usr/bin/python3", "--version").stdout.decode()
    base = Root(
        "host", (Path("/"),), hidden=tuple(one for one in hidden if Path("/", one).is_dir())
    )
    accounts = [Path("/etc", name).read_text() for name in ("os-release", "passwd", "group")]
    return _furnished(base, key=_key("host", version, *accounts), tunerd=tunerd)


def sid_root(tunerd: Tunerd = Tunerd.FOR_TESTS, *, packages: Sequence[str] = ()) -> Root:
    """Debian sid with its own llama-server, and with these packages on top.

    `llama.cpp-services` brings the packaged unit, which Debian does not enable.
    """
    key = _key("sid", *_SID_PACKAGES)
    what = f"Debian sid ({len(_SID_PACKAGES)} packages)"
    base = Root("sid", (_cached("base", key, what, _debian("sid", _SID_PACKAGES)),))
    if packages:
        named = ", ".join(packages)
        build = _by_script(base, _INSTALL_PACKAGES, *packages)
        layer = _cached("packages", _key(key, *packages), f"{named} in sid", build)
        base = replace(base, lowers=(layer, *base.lowers))
    return _furnished(base, key=key, variant=packages, tunerd=tunerd)


def trixie_root(tunerd: Tunerd = Tunerd.FOR_TESTS) -> Root:
    """Debian 13, which has no llama-server of its own."""
    key = _key("trixie", *_TRIXIE_PACKAGES)
    layer = _cached("base", key, "Debian 13", _debian("trixie", _TRIXIE_PACKAGES))
    return _furnished(Root("trixie", (layer,)), key=key, tunerd=tunerd)


def with_earlier(bare: Root, revision: str) -> Root:
    """A bare root with the sources of an earlier revision too, and what installing those downloads beyond its own.

    `EARLIER_PIP` is the environment in which pip finds that.
    """
    names = [name for name in _SOURCE_NAMES if name != "tests"]
    listed = program("git", "-C", str(SOURCES), "ls-tree", "--name-only", revision, *names)

    def unpack(folder: Path) -> None:
        target = folder / EARLIER_INSIDE.relative_to("/")
        target.mkdir(parents=True)
        packed = program(
            "git", "-C", str(SOURCES), "archive", revision, *listed.stdout.decode().split()
        )
        program("tar", "--extract", "--directory", target, stdin=packed.stdout)

    key = _key(revision, *listed.stdout.decode().split())
    sources = _cached("earlier", key, f"the sources of {revision}", unpack)
    wanted = _requirements(sources / EARLIER_INSIDE.relative_to("/"))
    requirements = [one for one in wanted if one not in _requirements()]
    wheels_key = _key(*map(str, bare.lowers[1:]), *requirements)
    build = _wheels_for(bare, requirements)
    wheels = _cached("wheels", wheels_key, f"wheels of {revision} for {bare.name}", build)
    binds = {**bare.binds, str(EARLIER_WHEELS_INSIDE): wheels}
    return replace(bare, lowers=(sources, *bare.lowers), binds=binds)


def _furnished(base: Root, *, key: str, tunerd: Tunerd, variant: Sequence[str] = ()) -> Root:
    """The root with users, wheels, sources, and tunerd.

    Roots that differ only by `variant` share what does not depend on it.
    """
    name = base.name
    requirements = _requirements()
    wheels_key = _key(key, *requirements)
    seed = _cached("seed", _key(key, *variant), f"users of {name}", _by_script(base, _SEED))
    wheels = _cached("wheels", wheels_key, f"wheels for {name}", _wheels_for(base, requirements))
    sources = _sources()
    binds = {str(WHEELS_INSIDE): wheels}
    plain = replace(base, lowers=(sources, *base.lowers), seed=seed, binds=binds)
    code_key = _key(wheels_key, sources.name)
    if tunerd is Tunerd.BARE:
        return plain
    if tunerd is Tunerd.INSTALLED:
        key = _key(code_key, *variant)
        build = _by_script(plain, _INSTALL)
        layer = _cached("installed", key, f"tunerd in {name} by install.sh", build)
        # The seed is in that layer, as install.sh has changed it: accounts, enabled units.
        return replace(plain, lowers=(layer, *plain.lowers), seed=None)
    build = _by_script(plain, _INSTALL_DEPENDENCIES, *requirements)
    deps = _cached("deps", wheels_key, f"dependencies in {name}", build)
    furnished = replace(plain, lowers=(sources, deps, *base.lowers))
    build = _by_script(furnished, _INSTALL_CODE)
    code = _cached("code", code_key, f"tunerd in {name}", build)
    return replace(furnished, lowers=(code, *furnished.lowers))


# --- the cache ---


def _key(*parts: str) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, *parts]).encode()).hexdigest()[:16]


def _cached(kind: str, key: str, what: str, build: Callable[[Path], None]) -> Path:
    """The folder of this key, built if it is not there; `build` gets an empty folder to fill.

    It is kept for as long as this process runs.
    """
    shelf = cache_folder() / kind
    shelf.mkdir(exist_ok=True)
    target = shelf / key
    if target in _kept:
        return target
    lock = _kept[target] = (shelf / f".{key}.lock").open("w")
    while not _locked(lock, fcntl.LOCK_SH) or not target.exists():
        fcntl.flock(lock, fcntl.LOCK_UN)
        if not _locked(lock, fcntl.LOCK_EX):
            time.sleep(0.2)  # somebody builds it, or has just done so
        elif not target.exists():
            started_s = time.monotonic()
            say(f"building {what} ...")
            unfinished = shelf / f".{key}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                build(unfinished)
            except BaseException:
                _kept.pop(target).close()
                raise
            unfinished.rename(target)
            say(f"built {what} in {time.monotonic() - started_s:.0f} s")
    os.utime(target)
    _forget_old(shelf)
    return target


@atexit.register
def _let_go() -> None:
    for lock in _kept.values():
        lock.close()


def _locked(lock: IO[str], how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forget_old(shelf: Path) -> None:
    """Remove all but the layers that were asked for last, and those that somebody uses."""
    asked_for = []
    for folder in shelf.glob("[0-9a-f]*"):
        with contextlib.suppress(FileNotFoundError):  # another run removes it as well
            asked_for.append((folder.stat().st_mtime, folder))
    for asked_at_s, folder in sorted(asked_for)[:-_KEEP]:
        if time.time() - asked_at_s < _KEEP_S:
            continue
        with (shelf / f".{folder.name}.lock").open("w") as lock:
            if _locked(lock, fcntl.LOCK_EX) and folder.exists():
                gone = folder.rename(shelf / f".{folder.name}.unfinished")
                shutil.rmtree(gone, ignore_errors=True)


def say(text: str) -> None:
    """Tell how building goes on."""
    sys.stderr.write(f"test roots: {text}\n")
    sys.stderr.flush()


# --- the base and its users ---


def _debian(suite: str, packages: Sequence[str]) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        options = [f"--aptopt={line}" for line in _apt_options()]
        # The mirror may be a frozen one, whose signatures have expired.
        options += [
            '--aptopt=Acquire::Check-Valid-Until "false"',
            '--aptopt=Acquire::Check-Date "false"',
        ]
        include = f"--include={','.join(packages)}"
        program(
            *("mmdebstrap", "--quiet", "--variant=minbase", *options, include),
            *(suite, str(folder), *_debian_mirror()),
            timeout_s=900,
        )

    return build


def _debian_mirror() -> tuple[str, ...]:
    """The Debian mirror that this host's apt is set up with; none to leave it to mmdebstrap."""
    done = program("apt-get", "indextargets", "--format", "$(REPO_URI)|$(SUITE)|$(COMPONENT)")
    for line in done.stdout.decode().splitlines():
        uri, _, rest = line.partition("|")
        if rest.endswith("|main") and "security" not in uri and uri.rstrip("/").endswith("debian"):
            return (uri,)
    return ()


def _apt_options() -> list[str]:
    """This host's settings for reaching mirrors: proxies, certificates, patience."""
    wanted = re.compile(
        r'(Acquire::(https?::(.*::)?(Proxy|CaInfo|CaPath|Verify-\w+|Timeout)|Retries) ".+");'
    )
    dump = program("apt-config", "dump").stdout.decode()
    return [match[1] for match in map(wanted.fullmatch, dump.splitlines()) if match]


_INSTALL_PACKAGES = """
set -eu
apt-get --quiet=2 update
apt-get --quiet=2 --yes --no-install-recommends install "$@" > /dev/null
apt-get clean
rm -rf /var/lib/apt/lists/*
"""
_SEED = """
set -eu
for user in alice bob; do
    useradd --create-home --shell /bin/bash "$user"
done
mkdir -p /var/lib/systemd/linger /var/log/journal /etc/systemd/system
touch /var/lib/systemd/linger/alice  # so her service manager runs from boot on
echo 0123456789abcdef0123456789abcdef > /etc/machine-id  # else systemd takes it for a first boot
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer \\
    systemd-timesyncd.service systemd-firstboot.service console-getty.service \\
    postgresql.service prometheus.service; do
    ln -sf /dev/null "/etc/systemd/system/$unit"
done
"""


def _by_script(root: Root, script: str, *arguments: str) -> Callable[[Path], None]:
    """Builds what a script changes in the root."""
    return lambda folder: layers.build(cache_folder(), folder, root, script, *arguments)


# --- tunerd ---


def _requirements(sources: Path = SOURCES) -> tuple[str, ...]:
    """What tunerd, its embedded engine, its tests and its building need, as pip spells it."""
    project = tomllib.loads((sources / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *extras["embedded"],
        *(line for line in extras["test"] if not _NOT_INSIDE.match(line)),
    ]
    return tuple(sorted(wanted))


def _wheels_for(base: Root, requirements: Sequence[str]) -> Callable[[Path], None]:
    script = """
set -eu
/usr/bin/python3 -m venv /tmp/venv
/tmp/venv/bin/python -m pip wheel --quiet --wheel-dir /out "$@"
"""

    def build(folder: Path) -> None:
        scratch = folder.with_name(f"{folder.name}.scratch")
        scratch.mkdir()
        try:
            out = {"/out": folder}
            layers.build(cache_folder(), scratch, base, script, *requirements, writable=out)
        finally:
            shutil.rmtree(scratch)

    return build


@functools.cache  # the same working tree for all roots of a test run
def _sources() -> Path:
    """A layer with tunerd's working tree, named after its content."""
    files = sorted(
        path.relative_to(SOURCES).as_posix()
        for name in _SOURCE_NAMES
        for path in [SOURCES / name, *(SOURCES / name).rglob("*")]
        if path.is_file() and "__pycache__" not in path.parts
    )
    digest = hashlib.sha256(_FORMAT.encode())
    for name in files:
        path = SOURCES / name
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name}\0{path.stat().st_mode:o}\0{content}\n".encode())

    def build(folder: Path) -> None:
        target = folder / SOURCES_INSIDE.relative_to("/")
        for name in files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(SOURCES / name, target / name)

    return _cached("sources", digest.hexdigest()[:16], "a copy of the sources", build)


_INSTALL_DEPENDENCIES = f"""
set -eu
/usr/bin/python3 -m venv {PREFIX}
{PREFIX}/bin/python -m pip install --quiet --no-index --find-links {WHEELS_INSIDE} "$@"
"""
# Accounts that run a stand-in could not keep what they compile.
_COMPILE = f"{PREFIX}/bin/python -m compileall -q {SOURCES_INSIDE}/tests/support"
# Built from a copy: building leaves files beside the sources.
_INSTALL_CODE = f"""
set -eu
cp -r {SOURCES_INSIDE} /tmp/sources
{PREFIX}/bin/python -m pip install --quiet --no-index --no-deps --no-build-isolation /tmp/sources
mkdir -p /usr/local/bin
ln -s {PREFIX}/bin/tunerd {PREFIX}/bin/tunerd-llama-server /usr/local/bin/
{_COMPILE}
"""
_INSTALL = "\n".join((
    "set -eu", "unset PIP_EXTRA_INDEX_URL", *(f"export {name}={value}" for name, value in OFFLINE_PIP.items()),
    f"{SOURCES_INSIDE}/install.sh --system", _COMPILE, "",
))  # fmt: skip


def main() -> int:
    """Build roots ahead of the tests, so that somebody sees how it goes; `host` or `sid` where one is named."""
    made = {"host": host_root, "sid": sid_root}
    try:
        for tunerd in (Tunerd.FOR_TESTS, Tunerd.INSTALLED):
            for name in sys.argv[1:] or made:
                made[name](tunerd)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        say(f"failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
