"""The rules that keep the parts apart, read from the sources themselves."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tunerd"

# Who may be imported by whom: a module may import its own layer and every layer below it.
LAYERS = {"core": 0, "system": 1, "actions": 2, "cli": 3, "web": 3, "daemon": 3}
# Single files at the top of the package. Settings are built by entry points and handed to actions.
TOP = {"errors": -1, "__init__": -1, "settings": 1, "settings_sources": 1, "log": 3, "embedded": 3,
       "__main__": 4}  # fmt: skip

# One owner per effect; the store is one seam in three files.
OWNERS = {
    "subprocess": {"system/process.py"},
    "pynvml": {"system/nvml.py"},
    "psutil": {"system/host.py"},
    "httpx": {"system/llama.py", "system/webhook.py"},
    "time": {"system/clock.py"},
    "sqlalchemy": {
        "system/store.py",
        "system/store_checked.py",
        "system/store_file.py",
        "system/store_schema.py",
    },
    "sqlite3": {"system/store_file.py", "system/telemetry_store.py"},
    "xllamacpp": {"embedded.py"},
    "gguf": {"system/designed_file.py"},
    "pydantic_settings": {"settings.py", "settings_sources.py"},
    "resource": {"system/launch.py"},
    "multiprocessing": set(),
    "asyncio": set(),
}

# Modules whose use is an effect: files, clock, network, environment, logger, processes.
NOT_IN_CORE = {
    "asyncio", "click", "ctypes", "fcntl", "grp", "httpx", "logging", "multiprocessing", "os",
    "psutil", "pwd", "pynvml", "resource", "rich", "select", "shutil", "socket", "sqlite3",
    "structlog", "subprocess", "sys", "tempfile", "threading", "time", "urllib",
}  # fmt: skip
EFFECTFUL_CALLS = {
    "chmod", "exists", "expanduser", "glob", "is_dir", "is_file", "iterdir", "mkdir", "now", "open",
    "read_bytes", "read_text", "rename", "rglob", "samefile", "stat", "today", "touch",
    "unlink", "utcnow", "write_bytes", "write_text",
}  # fmt: skip

PLAIN_MODULES = {
    "asyncio",
    "gguf",
    "jinja2",
    "numpy",
    "optuna",
    "plotly",
    "scipy",
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "xllamacpp",
}
NOT_IN_HELP = {"httpx", "psutil", "pydantic", "pydantic_settings", "pynvml", "rich", "structlog",
               "tomlkit", *PLAIN_MODULES}  # fmt: skip
# pydantic-settings itself imports asyncio.
NOT_IN_STATUS = {"httpx", "psutil", "rich", "structlog", "tomlkit", *(PLAIN_MODULES - {"asyncio"})}


@dataclass(frozen=True)
class Import:
    """One imported module, with where it is imported."""

    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"tunerd/{self.file}:{self.line} imports {self.module}"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "_data" not in path.parts)


def imports() -> Iterator[Import]:
    """Every import of the package, also those inside functions and `if TYPE_CHECKING`."""
    for path in sources():
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(file, node.lineno, alias.name)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"tunerd/{file}:{node.lineno} imports relatively"
                for alias in node.names:
                    yield Import(file, node.lineno, f"{node.module}.{alias.name}")


def layer_of(parts: list[str]) -> int | None:
    """The layer of `tunerd/PART/...`; None for a part that no rule knows."""
    name = parts[0].removesuffix(".py")
    return LAYERS.get(name, TOP.get(name))


def own_modules(found: Import) -> list[str]:
    """The parts of a module of this package, as `["core", "engine", "Engine"]`; empty for others."""
    parts = found.module.split(".")
    return parts[1:] if parts[0] == "tunerd" else []


def test_every_file_has_a_layer() -> None:
    unknown = [
        path.relative_to(PACKAGE).as_posix()
        for path in sources()
        if layer_of(list(path.relative_to(PACKAGE).parts)) is None
    ]
    assert unknown == [], "say in LAYERS or TOP where these belong"


def test_imports_point_one_way() -> None:
    wrong = []
    for found in imports():
        parts = own_modules(found)
        if not parts or not parts[0]:
            continue
        importer = layer_of(found.file.split("/"))
        imported = layer_of(parts) if parts[0] in {*LAYERS, *TOP} else TOP["__init__"]
        if importer is None or imported is None or imported > importer:
            wrong.append(str(found))
    assert wrong == []


def test_core_and_system_know_no_settings() -> None:
    """They take values, so that a test or another caller needs no settings file."""
    wrong = [
        str(found)
        for found in imports()
        if found.module.startswith("tunerd.settings")
        and found.file.startswith(("core/", "system/"))
    ]
    assert wrong == []


def test_only_entry_points_configure_the_log() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.module.startswith("tunerd.log") and not found.file.startswith(("cli/", "web/"))
    ]
    assert wrong == []


@pytest.mark.parametrize("module", OWNERS)
def test_one_file_owns_each_effect(module: str) -> None:
    users = {found.file for found in imports() if found.module.split(".")[0] == module}
    assert users <= OWNERS[module], f"{module} belongs to {OWNERS[module] or 'nobody'}"


def test_core_imports_nothing_that_acts() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.file.startswith("core/") and found.module.split(".")[0] in NOT_IN_CORE
    ]
    assert wrong == []


def nodes() -> Iterator[tuple[str, str, ast.AST]]:
    """Every node of the package, with its file and `tunerd/FILE:LINE`."""
    for path in sources():
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(tree(path)):
            yield file, f"tunerd/{file}:{getattr(node, 'lineno', 0)}", node


def called(node: ast.AST) -> str | None:
    """The last name of what is called: `open` of `open(...)`, `read_text` of `x.read_text()`."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None


def test_core_calls_nothing_that_acts() -> None:
    """`Path` is welcome in core as a name for a place, not as a way to look there."""
    assert [
        f"{where} calls {called(node)}()"
        for file, where, node in nodes()
        if file.startswith("core/") and called(node) in EFFECTFUL_CALLS
    ] == []


def test_nothing_reads_the_environment_but_its_owners() -> None:
    """Entry points read it once and pass it on; the supervisor's process has one of its own."""
    allowed = {"actions/context.py", "actions/supervise.py", "settings_sources.py", "embedded.py",
               "cli/output.py", "cli/main.py", "cli/commands/daemon.py", "cli/remote.py",
               "system/local.py", "system/notify.py", "system/supervisor_start.py",
               "system/systemd.py"}  # fmt: skip
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
    allowed = {"cli/main.py", "actions/swap.py"}
    assert [
        where for file, where, node in nodes() if file not in allowed and catches_everything(node)
    ] == []


def test_only_the_command_line_prints() -> None:
    assert [
        where
        for file, where, node in nodes()
        if called(node) == "print" and not file.startswith("cli/") and file != "embedded.py"
    ] == []


def test_no_shell_is_ever_asked() -> None:
    assert [
        where
        for _, where, node in nodes()
        if (isinstance(node, ast.keyword) and node.arg == "shell")
        or (called(node) in {"system", "popen"} and "'os'" in ast.dump(node))
    ] == []


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


def test_no_test_runs_a_fake_without_a_contract() -> None:
    """The fakes are named in one place each, and a contract runs over every one of them."""
    contracts = {path.stem for path in (ROOT / "tests" / "contracts").glob("*.py")}
    assert {"clock", "gpu", "service_manager", "llama_server"} <= contracts


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


def test_asking_a_server_for_its_health_does_not_import_httpx() -> None:
    script = (
        "import sys\n"
        "from tunerd.system.clock import SystemClock\n"
        "from tunerd.system.llama import Address, LlamaServer\n"
        "print(LlamaServer(Address('127.0.0.1', 1), SystemClock()).health(timeout_s=5))\n"
        "print('httpx' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == ["refused", "False"]
