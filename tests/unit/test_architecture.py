"""The rules that keep the parts apart, read from the sources themselves."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tunerd"

# From the bottom to the top: what is named later may import what is named before, and nothing else.
ORDER = (
    "errors", "words", "paths", "calendar", "settings", "result", "records", "log", "machine", "units", "model", "app",
    "tryout", "profile", "operations", "engine", "production", "measure", "sweep", "watch", "doctor", "fleet", "jobs",
    "web", "cli", "__main__",
)  # fmt: skip

# Imports that point up all the same. Each is a debt: none may come to them.
UPWARD = {
    ("app", "tryout/local"),
    ("production/plan", "measure/conditions"),
    ("production/rollback", "sweep/record"),
    ("sweep/run", "jobs"),
}

# What others may import of each package; the rest of its modules are its own business.
FACES = {
    "machine": {
        "clock",
        "facts",
        "files",
        "gpu",
        "host",
        "http",
        "net",
        "peers",
        "proc",
        "process",
    },
    "units": {"generations", "live", "manager", "sandbox", "systemd", "text"},
    "model": {"facts", "files", "gguf", "memory", "report", "verdict"},
    "tryout": {"designed", "local", "local_state", "supervisor"},
    "profile": {"arm", "files", "layers", "schema", "workload"},
    "engine": {
        "builds",
        "emit",
        "flags",
        "health",
        "help",
        "importer",
        "log",
        "probe",
        "prove",
        "server",
        "serving",
    },
    "production": {
        "apply",
        "checks",
        "emit",
        "gate",
        "journal",
        "lease",
        "measurement",
        "own",
        "plan",
        "power",
        "probation",
        "profiles",
        "recover",
        "rollback",
        "status",
        "unattended",
    },
    "measure": {
        "answer",
        "bench",
        "compare",
        "conditions",
        "evidence",
        "findings",
        "learn",
        "life",
        "pairs",
        "request",
        "results",
        "store",
        "trust",
    },
    "sweep": {"known", "laws", "plan", "promote", "record", "run", "schedule"},
    "watch": {
        "daemon",
        "figures",
        "findings",
        "guarding",
        "history",
        "notices",
        "probation",
    },
    "doctor": {"doctor"},
    "fleet": {"boxes", "rollout", "shared", "steps", "study"},
    "web": {"charts", "page", "part", "report", "view"},
}

# Decisions: values in, values out. These import pure modules alone, so they cannot act at all.
PURE = {
    "calendar",
    "doctor/facts",
    "doctor/rules",
    "engine/emit",
    "engine/flags",
    "engine/health",
    "engine/help",
    "engine/importer",
    "engine/log",
    "errors",
    "fleet/steps",
    "machine/facts",
    "measure/answer",
    "measure/evidence",
    "measure/findings",
    "measure/pairs",
    "measure/request",
    "measure/trust",
    "model/facts",
    "model/gguf",
    "model/memory",
    "model/report",
    "model/verdict",
    "paths",
    "production/checks",
    "profile/arm",
    "profile/layers",
    "profile/schema",
    "profile/workload",
    "records",
    "result",
    "sweep/challenge",
    "sweep/context",
    "sweep/costs",
    "sweep/known",
    "sweep/laws",
    "sweep/learner",
    "sweep/limits",
    "sweep/night",
    "sweep/observations",
    "sweep/search",
    "sweep/space",
    "sweep/tuner",
    "tryout/local_service",
    "units/live",
    "units/manager",
    "units/text",
    "watch/drift",
    "watch/figures",
    "watch/guards",
    "web/charts",
    "web/metrics",
    "web/view",
    "words",
}

# One owner per effect.
OWNERS = {
    "subprocess": {"machine/process"},
    "pynvml": {"machine/gpu"},
    "psutil": {"machine/host"},
    "httpx": {"watch/notices"},
    "time": {"machine/clock"},
    "sqlalchemy": {"fleet/database", "fleet/shared", "fleet/study", "measure/store"},
    "psycopg": {"fleet/database"},
    "sqlite3": {"measure/store", "watch/history"},
    "xllamacpp": {"tryout/embedded"},
    "gguf": {"tryout/designed"},
    "pydantic_settings": {"settings"},
    "resource": {"machine/keeper", "machine/process"},
    "multiprocessing": set(),
    "asyncio": {"tryout/supervisor"},
}

# Modules and calls whose use is an effect: files, clock, network, environment, logger, processes.
EFFECTS = {
    "asyncio", "click", "ctypes", "fcntl", "grp", "httpx", "logging", "multiprocessing", "os",
    "psutil", "pwd", "pynvml", "resource", "select", "shutil", "socket", "sqlite3",
    "structlog", "subprocess", "sys", "tempfile", "threading", "time", "urllib",
}  # fmt: skip
EFFECTFUL_CALLS = {
    "chmod", "exists", "expanduser", "glob", "is_dir", "is_file", "iterdir", "mkdir", "now", "open",
    "read_bytes", "read_text", "rename", "rglob", "samefile", "stat", "today", "touch",
    "unlink", "utcnow", "write_bytes", "write_text",
}  # fmt: skip

FILES_IN_A_PACKAGE = 20
STILL_LARGER: dict[str, int] = {}

PLAIN_MODULES = {
    "asyncio",
    "gguf",
    "jinja2",
    "numpy",
    "optuna",
    "psycopg",
    "scipy",
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "xllamacpp",
}
# pydantic-settings itself imports asyncio.
NOT_IN_STATUS = {"httpx", "psutil", "structlog", "tomlkit", *(PLAIN_MODULES - {"asyncio"})}
NOT_IN_HELP = {"asyncio", "pydantic", "pydantic_settings", "pynvml", *NOT_IN_STATUS}
# What would stay in its memory: that is for units of its own.
NOT_IN_DAEMON = {"httpx", *(PLAIN_MODULES - {"asyncio"})}
NOT_IN_WEB = NOT_IN_DAEMON - {"jinja2", "starlette", "uvicorn"}


@dataclass(frozen=True)
class Import:
    """One imported name, with where it is imported; `file` has no suffix."""

    file: str
    line: int
    module: str
    is_late: bool

    def __str__(self) -> str:
        return f"tunerd/{self.file}.py:{self.line} imports {self.module}"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def sources() -> Mapping[str, Path]:
    """Every module of the package by its name, as `production/swap`."""
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
        if "_data" not in path.parts
    }


@cache
def imports() -> tuple[Import, ...]:
    """Every import of the package, also those inside functions and `if TYPE_CHECKING`."""
    found = []
    for file, path in sources().items():
        top = set(tree(path).body)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                found += [
                    Import(file, node.lineno, alias.name, node not in top) for alias in node.names
                ]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"tunerd/{file}.py:{node.lineno} imports relatively"
                found += [
                    Import(file, node.lineno, f"{node.module}.{alias.name}", node not in top)
                    for alias in node.names
                ]
    return tuple(found)


def own_module(name: str) -> str | None:
    """The module of ours behind `tunerd.production.swap.swap`: `production/swap`; None for others."""
    parts = name.split(".")
    if parts[0] != "tunerd":
        return None
    for count in range(len(parts), 1, -1):
        if "/".join(parts[1:count]) in sources():
            return "/".join(parts[1:count])
    return "__init__"


def rank(module: str) -> int:
    """How high a module stands; the package's own version is below all."""
    first = module.partition("/")[0]
    return -1 if first in {"__init__", "."} else ORDER.index(first)


def inside() -> Iterator[tuple[Import, str]]:
    """Imports of our own modules."""
    for found in imports():
        module = own_module(found.module)
        if module is not None and module != found.file:
            yield found, module


def test_every_module_has_its_place_in_the_order() -> None:
    firsts = {file.partition("/")[0] for file in sources()} - {"__init__", "."}
    assert firsts == set(ORDER), "say in ORDER where these belong"


def test_imports_point_down() -> None:
    upward = {(found.file, module) for found, module in inside() if rank(module) > rank(found.file)}
    assert upward - UPWARD == set()
    assert UPWARD - upward == set(), "these debts are paid: take them out of UPWARD"


def test_no_modules_need_each_other() -> None:
    edges: dict[str, set[str]] = {}
    for found, module in inside():
        if not found.is_late:
            edges.setdefault(found.file, set()).add(module)
    assert list(circles(edges)) == []


def circles(edges: Mapping[str, Iterable[str]]) -> Iterator[set[str]]:
    """Groups of modules each of which is reached from each other."""
    reached = {start: reach(start, edges) for start in edges}
    for start in sorted(edges):
        group = {other for other in reached[start] if start in reached.get(other, ())}
        if group and min(group) == start:
            yield group


def reach(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    """Everything that is imported from a module on."""
    found: set[str] = set()
    waiting = [*edges.get(start, ())]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += edges.get(module, ())
    return found


def test_packages_are_entered_by_their_face() -> None:
    wrong = [
        str(found)
        for found, module in inside()
        if (package := module.partition("/")[0]) in FACES
        and found.file.partition("/")[0] != package
        and "/" in module
        and module.partition("/")[2] not in FACES[package]
    ]
    assert wrong == []


def test_faces_show_nothing_that_nobody_looks_at() -> None:
    seen: dict[str, set[str]] = {package: set() for package in FACES}
    for found, module in inside():
        package, _, name = module.partition("/")
        if package in FACES and name and found.file.partition("/")[0] != package:
            seen[package].add(name)
    assert {package: set(names) - seen[package] for package, names in FACES.items()} == {
        package: set() for package in FACES
    }


def test_packages_are_small_enough_to_be_looked_over() -> None:
    counts: dict[str, int] = {}
    for path in sources().values():
        if path.name != "__init__.py":
            folder = path.parent.relative_to(PACKAGE).as_posix()
            counts[folder] = counts.get(folder, 0) + 1
    assert {
        folder: count
        for folder, count in counts.items()
        if count > STILL_LARGER.get(folder, FILES_IN_A_PACKAGE)
    } == {}


def test_pure_modules_import_pure_modules_alone() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.file in PURE
        and (
            found.module.split(".")[0] in EFFECTS
            or own_module(found.module) not in {*PURE, "__init__", None}
        )
    ]
    assert wrong == []


def test_pure_modules_call_nothing_that_acts() -> None:
    """`Path` is welcome there as a name for a place, not as a way to look there."""
    assert [
        f"{where} calls {called(node)}()"
        for file, where, node in nodes()
        if file in PURE and called(node) in EFFECTFUL_CALLS
    ] == []


def test_what_decides_is_told_apart_from_what_acts() -> None:
    """Every name in PURE is a module."""
    assert PURE - set(sources()) == set()


@pytest.mark.parametrize("module", OWNERS)
def test_one_file_owns_each_effect(module: str) -> None:
    users = {found.file for found in imports() if found.module.split(".")[0] == module}
    assert users <= OWNERS[module], f"{module} belongs to {OWNERS[module] or 'nobody'}"


def test_what_is_below_the_context_knows_no_settings() -> None:
    """It takes values, so that a test or another caller needs no settings file."""
    wrong = [
        str(found)
        for found, module in inside()
        if module == "settings" and found.file.partition("/")[0] in {"machine", "units", "model"}
    ]
    assert wrong == []


def test_only_entry_points_configure_the_log() -> None:
    wrong = [
        str(found)
        for found, module in inside()
        if module == "log" and not found.file.startswith(("cli/", "web/"))
    ]
    assert wrong == []


def nodes() -> Iterator[tuple[str, str, ast.AST]]:
    """Every node of the package, with its module and `tunerd/FILE:LINE`."""
    for file, path in sources().items():
        for node in ast.walk(tree(path)):
            yield file, f"tunerd/{file}.py:{getattr(node, 'lineno', 0)}", node


def called(node: ast.AST) -> str | None:
    """The last name of what is called: `open` of `open(...)`, `read_text` of `x.read_text()`."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None


def test_nothing_reads_the_environment_but_its_owners() -> None:
    """Entry points read it once and pass it on; the supervisor's process has one of its own."""
    allowed = {
        "app",
        "cli/output",
        "cli/terminal",
        "cli/watch",
        "machine/keeper",
        "settings",
        "tryout/local",
        "tryout/supervisor",
        "units/systemd",
    }
    assert [
        f"{where} reads os.{node.attr}"
        for file, where, node in nodes()
        if isinstance(node, ast.Attribute)
        and node.attr in {"environ", "getenv"}
        and file not in allowed
    ] == []


def catches_everything(node: ast.AST) -> bool:
    """Whether this handler swallows any exception."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    names = ast.walk(node.type) if node.type is not None else [ast.Name("BaseException")]
    caught = {part.id for part in names if isinstance(part, ast.Name)}
    raises = any(isinstance(part, ast.Raise) and part.exc is None for part in ast.walk(node))
    return bool(caught & {"Exception", "BaseException"}) and not raises


def test_nothing_catches_every_exception_but_the_outermost_handler() -> None:
    # A swap that fails in any way, a bug included, must still go back.
    # A question of the web part that meets one is answered, as every other is; a job of the daemon is
    # told of, and the others go on.
    allowed = {"cli/main", "production/swap", "watch/daemon", "web/part"}
    assert [
        where for file, where, node in nodes() if file not in allowed and catches_everything(node)
    ] == []


def test_no_owner_is_changed_through_a_link() -> None:
    """Whoever may put a link into the folder would choose the file."""
    followed = [
        where
        for _, where, node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "chown"
        and not any(word.arg == "follow_symlinks" for word in node.keywords)
    ]
    assert followed == []


def test_no_test_replaces_parts_of_the_program() -> None:
    """Four fakes that pass the contracts of the real things; nothing is patched."""
    patching = ("unittest." + "mock", "Magic" + "Mock", "monkeypatch." + "setattr",
                "mocker" + ".", "mock" + ".patch", "monkeypatch." + "setitem")  # fmt: skip
    wrong = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for word in patching
        if word in path.read_text(encoding="utf-8")
    ]
    assert wrong == []


def modules_of(tmp_path: Path, *arguments: str) -> set[str]:
    """Top-level names of the modules that a call of tunerd imports, in a process of its own."""
    script = (
        "import sys\n"
        "from tunerd.cli.main import main\n"
        f"sys.argv = ['tunerd', *{arguments!r}]\n"
        "status = 0\n"
        "try:\n    main()\nexcept SystemExit as end:\n    status = end.code\n"
        "print(status, *sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    folders = {
        f"TUNERD_{name}_DIR": str(tmp_path / name.lower())
        for name in ("CONFIG", "STATE", "RUNTIME", "UNIT")
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TUNERD_MODE": "local", **folders},
    )
    status, *modules = done.stderr.splitlines()[-1].split()
    assert status in {"0", "None"}, done.stderr
    return set(modules)


def test_help_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    modules = modules_of(tmp_path, "--help")
    assert modules & NOT_IN_HELP == set()
    assert "click" in modules  # the check looks at the right process


def test_status_does_not_pay_for_the_sweep(tmp_path: Path) -> None:
    modules = modules_of(tmp_path, "status")
    assert modules & NOT_IN_STATUS == set()
    assert "pydantic_settings" in modules


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("tunerd.watch.daemon, tunerd.web.part", NOT_IN_DAEMON),
        ("tunerd.web.page", NOT_IN_WEB),
    ],
)
def test_what_runs_all_day_holds_nothing_that_it_does_not_need(
    modules: str, unwanted: set[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert {name.partition(".")[0] for name in done.stdout.split()} & unwanted == set()
