"""The rules that keep the parts apart, read from the sources themselves: tables, each exactly what the sources say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tunerd"

# From the bottom to the top: what is named later may import what is named before, and nothing else.
ORDER = (
    "errors", "words", "paths", "calendar", "result", "records", "log", "machine", "settings", "units", "model", "tryout",
    "app", "profile", "settings_file", "operations", "engine", "production", "jobs", "measure", "sweep", "watch",
    "doctor", "fleet", "web", "cli", "__main__",
)  # fmt: skip

# What others import of each package; the rest of its modules are its own business.
FACES = {
    "machine": "clock facts files gpu host http net peers process",
    "units": "generations live manager needs sandbox systemd text",
    "model": "facts files gguf memory verdict",
    "tryout": "designed local supervisor",
    "profile": "arm files layers schema workload",
    "engine": "builds capabilities choice conditions emit fingerprint flags health importer log probe prove "
    "server serving",
    "production": "apply checks emit gate journal lease measurement own plan power probation "
    "profiles recover rollback status unattended",
    "measure": "answer bench compare evidence findings learn life pairs request "
    "results store target trust",
    "sweep": "known laws plan promote record run schedule",
    "watch": "daemon figures findings guarding history notices probation watcher",
    "doctor": "doctor",
    "fleet": "rollout shared steps study",
    "web": "page part report view",
}

# Decisions: values in, values out. These import pure modules alone and call nothing that acts, so they
# cannot act at all; every module that can keep to this is here.
PURE = {
    "": "calendar errors paths records result words",
    "machine": "facts",
    "units": "live manager needs text",
    "model": "facts gguf memory verdict",
    "tryout": "local_service",
    "profile": "arm layers schema workload",
    "engine": "capabilities emit fingerprint flags health importer log",
    "production": "checks",
    "measure": "answer evidence findings pairs request trust",
    "sweep": "challenge context costs known laws learner limits night observations search space tuner",
    "watch": "drift figures guards",
    "doctor": "facts rules",
    "fleet": "steps",
    "web": "charts metrics view",
}

# Who has an effect, by the module that brings it: one owner where that is possible. Whoever is below the
# context knows no settings, it takes values, so that a test or another caller needs no settings file; only
# entry points configure the log.
OWNERS = {
    "subprocess": "machine/process",
    "pynvml": "machine/gpu",
    "psutil": "machine/host",
    "httpx": "watch/notices",
    "time": "machine/clock",
    "sqlalchemy": "fleet/shared fleet/study measure/store",
    "psycopg": "fleet/shared",
    "sqlite3": "measure/store watch/history",
    "xllamacpp": "tryout/embedded",
    "gguf": "tryout/designed",
    "pydantic_settings": "settings",
    "ctypes": "machine/keeper tryout/supervisor",
    "fcntl": "machine/files",
    "resource": "machine/keeper machine/process",
    "select": "cli/output",
    "multiprocessing": "",
    "asyncio": "tryout/supervisor",
    "tunerd.settings": "app cli/output fleet/rollout settings_file watch/daemon watch/notices",
    "tunerd.log": "cli/watch",
}
# Entry points read it once and pass it on; the supervisor's process has one of its own.
READ_THE_ENVIRONMENT = (
    "app cli/main cli/output cli/terminal cli/watch machine/keeper settings tryout/local tryout/supervisor "
    "units/systemd"
)
# A swap that fails in any way, a bug included, must still go back; a question of the web part that meets
# one is answered, as every other is; a unit that meets one as it starts has failed, and the others go on.
CATCH_EVERYTHING = "production/swap tryout/supervisor web/part"

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

HEAVY = {"gguf", "jinja2", "numpy", "optuna", "psycopg", "scipy", "sqlalchemy", "starlette", "uvicorn",
         "xllamacpp"}  # fmt: skip
# pydantic-settings itself imports asyncio.
NOT_IN_STATUS = {"httpx", "psutil", "structlog", "tomlkit", *HEAVY}
NOT_IN_HELP = {"asyncio", "pydantic", "pydantic_settings", "pynvml", *NOT_IN_STATUS}
# What would stay in its memory: that is for units of its own.
NOT_IN_DAEMON = {"httpx", *HEAVY}
NOT_IN_WEB = NOT_IN_DAEMON - {"jinja2", "starlette", "uvicorn"}


@dataclass(frozen=True)
class Import:
    """One imported name, with where it is imported; `file` has no suffix, `own` is the module of ours behind it."""

    file: str
    line: int
    module: str

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def own(self) -> str | None:
        """Of `tunerd.production.swap.swap`: `production/swap`; None for others, and for the version of the package."""
        parts = self.module.split(".")
        names = ("/".join(parts[1:count]) for count in range(len(parts), 1, -1))
        return next((name for name in names if name in sources()), None)

    def __str__(self) -> str:
        return f"tunerd/{self.file}.py:{self.line} imports {self.module}"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def sources() -> Mapping[str, Path]:
    """Every module of the package by its name, as `production/swap`; docstrings of packages are none."""
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix(): path
        for path in sorted(PACKAGE.rglob("*.py"))
        if "_data" not in path.parts and path.name != "__init__.py"
    }


@cache
def nodes() -> tuple[tuple[str, ast.stmt | ast.expr | ast.excepthandler], ...]:
    """What the rules look at in the package, with its module: imports, calls, attributes and handlers."""
    looked_at = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute, ast.ExceptHandler)
    return tuple(
        (file, node)
        for file, path in sources().items()
        for node in ast.walk(tree(path))
        if isinstance(node, looked_at)
    )


@cache
def imports() -> tuple[Import, ...]:
    """Every import of the package, also those inside functions, by a name, and `if TYPE_CHECKING`."""
    found = []
    for file, node in nodes():
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"tunerd/{file}.py:{node.lineno} imports relatively"
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = (f"{prefix}{alias.name}" for alias in node.names)
            found += [Import(file, node.lineno, name) for name in names]
        if isinstance(node, ast.Call) and called(node) == "import_module":
            found.append(Import(file, node.lineno, ast.unparse(node.args[0]).strip("'f")))
    return tuple(found)


def inside() -> Iterator[tuple[Import, str]]:
    """Imports of our own modules."""
    for found in imports():
        if found.own is not None and found.own != found.file:
            yield found, found.own


def package_of(module: str) -> str:
    return module.partition("/")[0]


def modules(table: Mapping[str, str]) -> set[str]:
    """`sweep/laws` of the row of `sweep`."""
    return {
        f"{package}/{name}".removeprefix("/")
        for package, names in table.items()
        for name in names.split()
    }


def test_every_module_has_its_place_in_the_order() -> None:
    assert {package_of(file) for file in sources()} == set(ORDER), "say in ORDER where these belong"


def test_imports_point_down() -> None:
    def rank(module: str) -> int:
        return ORDER.index(package_of(module))

    assert [str(found) for found, module in inside() if rank(module) > rank(found.file)] == []


def test_no_modules_need_each_other() -> None:
    """Not even by imports in functions."""
    needs = TopologicalSorter[str]()
    for found, module in inside():
        needs.add(found.file, module)
    needs.prepare()  # raises with the circle


def test_packages_are_entered_by_their_face_and_that_shows_nothing_that_nobody_looks_at() -> None:
    entered = {
        module: str(found)
        for found, module in inside()
        if package_of(module) in FACES and package_of(found.file) != package_of(module)
    }
    faces = modules(FACES)
    assert [entered[one] for one in entered.keys() - faces] == []
    assert faces - entered.keys() == set()


def test_a_function_that_no_other_file_names_is_private() -> None:
    """But for those of `cli`, which are found by their words."""
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.html"), *ROOT.glob("[!.]*/**/*.py")]
    named = Counter(word for path in {*files} for word in {*re.findall(r"\w+", path.read_text())})
    shown = [
        f"tunerd/{file}.py:{node.lineno} {node.name}"
        for file, path in sources().items()
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef) and package_of(file) != "cli"
        if not node.name.startswith("_") and named[node.name] == 1
    ]
    assert shown == []


def test_packages_are_small_enough_to_be_looked_over() -> None:
    folders = [path.parent.name for path in sources().values()]
    assert [one for one in set(folders) if folders.count(one) > FILES_IN_A_PACKAGE] == []


def test_what_decides_is_told_apart_from_what_acts() -> None:
    """A module is pure that uses nothing of EFFECTS, calls nothing that acts, and imports only such modules.

    `Path` is welcome there as a name for a place, not as a way to look there.
    """
    why = {found.file: str(found) for found in imports() if found.top in EFFECTS}
    why |= {
        file: f"tunerd/{file}.py:{node.lineno} calls {called(node)}()"
        for file, node in nodes()
        if isinstance(node, ast.Call) and called(node) in EFFECTFUL_CALLS
    }
    is_growing = True
    while is_growing:
        more = {found.file: str(found) for found, module in inside() if module in why}
        is_growing = not more.keys() <= why.keys()
        why = more | why
    listed = modules(PURE)
    assert [why.get(one, f"{one} is no module") for one in listed - (sources().keys() - why)] == []
    assert sources().keys() - why - listed == set(), "these are pure: say so in PURE"


def test_one_file_owns_each_effect() -> None:
    users = {
        module: {found.file for found in imports() if f"{found.module}.".startswith(f"{module}.")}
        for module in OWNERS
    }
    assert users == {module: set(files.split()) for module, files in OWNERS.items()}


def called(node: ast.AST) -> str | None:
    """The last name of what is called: `open` of `open(...)`, `read_text` of `x.read_text()`."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None


def reads_the_environment(node: ast.AST) -> bool:
    """Its own; that of another process is asked of psutil."""
    return isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv"}


def catches_everything(node: ast.AST) -> bool:
    """Whether this handler swallows any exception."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    names = ast.walk(node.type) if node.type is not None else [ast.Name("BaseException")]
    caught = {part.id for part in names if isinstance(part, ast.Name)}
    raises = any(isinstance(part, ast.Raise) and part.exc is None for part in ast.walk(node))
    return bool(caught & {"Exception", "BaseException"}) and not raises


def follows_links(node: ast.AST) -> bool:
    """Whoever may put a link into the folder would choose the file whose owner is changed."""
    words = node.keywords if isinstance(node, ast.Call) else []
    return called(node) == "chown" and all(word.arg != "follow_symlinks" for word in words)


def test_what_few_may_do_is_done_by_nobody_else() -> None:
    few = {reads_the_environment: READ_THE_ENVIRONMENT, catches_everything: CATCH_EVERYTHING, follows_links: ""}  # fmt: skip
    for does, files in few.items():
        found = {file: f"tunerd/{file}.py:{node.lineno}" for file, node in nodes() if does(node)}
        assert [found[file] for file in found.keys() - set(files.split())] == []
        assert set(files.split()) - found.keys() == set(), "these do it no longer"


def test_no_test_replaces_parts_of_the_program() -> None:
    """Four fakes that pass the contracts of the real things; nothing is patched."""
    patching = ("unittest." + "mock", "Magic" + "Mock", "monkeypatch." + "setattr",
                "mocker" + ".", "mock" + ".patch", "monkeypatch." + "setitem")  # fmt: skip
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert [f"{path}: {word}" for path in texts for word in patching if word in texts[path]] == []


def imported_by(
    script: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> set[str]:
    """Top-level names of the modules that a script imports, in a process of its own."""
    tells = (
        "import atexit, sys\natexit.register(lambda: print('\\n', *sys.modules, file=sys.stderr))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", tells + script, *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stderr.splitlines()[-1].split()}


@pytest.mark.parametrize(
    ("command", "unwanted", "wanted"),
    [("--help", NOT_IN_HELP, "click"), ("status", NOT_IN_STATUS, "pydantic_settings"),
     ("sweep status", {"scipy"}, "sqlalchemy"), ("workload show chat", {"numpy"}, "pydantic")],
)  # fmt: skip
def test_a_command_imports_nothing_that_it_does_not_need(
    tmp_path: Path, command: str, unwanted: set[str], wanted: str
) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TUNERD_MODE": "local",
                   **{f"TUNERD_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "STATE")}}  # fmt: skip
    script = "from tunerd.cli.main import main\nmain()"
    found = imported_by(script, *command.split(), environment=environment)
    assert found & unwanted == set()
    assert wanted in found  # the check looks at the right process


def test_what_runs_all_day_holds_nothing_that_it_does_not_need() -> None:
    daemon = imported_by("import tunerd.watch.daemon, tunerd.web.part")
    page = imported_by("import tunerd.web.page")
    assert (daemon & NOT_IN_DAEMON, page & NOT_IN_WEB) == (set(), set())
