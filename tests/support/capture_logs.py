"""Captures how real engines fail: `python -m tests.support.capture_logs`, by hand.

Runs every program in TUNERD_TEST_ENGINES and the embedded server into each failure that a machine
without a GPU can show, and writes what they said to tests/data/logs/ENGINE/CASE.txt: a first line
with the way it ended, then its lines without those that say nothing about the failure.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.folders import DATA
from tests.support.real_server import free_port
from tunerd.engine.health import classify
from tunerd.engine.help import Capabilities, SpecStyle, parse_help, read_capabilities
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.words import Family

LOGS = DATA / "logs"
_LIMIT_S = 25.0
_SAYS_NOTHING = re.compile(
    r"^(?:\S+ I )?(?:llama_model_loader: - |print_info:|load: |llm_load_print_meta|load_tensors: layer"
    r"|set_abort_callback|\.+$|\s*$|kv |create_tensor: loading|common_init_result: added |srv  \S+: +\w+"
    r" +=)|control-looking token|Layer +\d+:|tokenizer\.|llama_init_from_model: (?:n_|f|graph)"
)
_USAGE = re.compile(r"^ {0,12}-{1,2}[a-zA-Z]|^ {20,}")
_MOST_LINES = 70
_MOST_TRIES = 8


@dataclass(frozen=True)
class Case:
    """One way to fail: what follows the program, and what surrounds it."""

    name: str
    arguments: Callable[[Build], Sequence[str] | None]
    address_space: int | None = None
    as_nobody: bool = False
    port_taken: bool = False


@dataclass(frozen=True)
class Build:
    """An engine that fails, with the files that it fails on."""

    name: str
    program: tuple[str, ...]
    capabilities: Capabilities
    files: Path

    def mtp(self) -> tuple[str, ...] | None:
        """The options that switch MTP on; None where there is none."""
        word = self.capabilities.spec_word("mtp")
        if word is None:
            return None
        if self.capabilities.spec_style is SpecStyle.IK_LEGACY:
            return ("--multi-token-prediction", "--draft-max", "3")
        if self.capabilities.spec_style is SpecStyle.STAGE:
            return ("--spec-type", f"{word}:n_max=3,p_min=0.0")
        return ("--spec-type", word, "--spec-draft-n-max", "3")


def _on(name: str, *more: str) -> Callable[[Build], Sequence[str]]:
    return lambda build: ("--model", str(build.files / f"{name}.gguf"), *more)


def _plain(*more: str) -> Callable[[Build], Sequence[str]]:
    return _on("tiny-nomtp", *more)


def _with_mtp(name: str) -> Callable[[Build], Sequence[str] | None]:
    def arguments(build: Build) -> Sequence[str] | None:
        mtp = build.mtp()
        return None if mtp is None else (*_on(name)(build), *mtp)

    return arguments


def _only(
    family: Family, *more: str, model: str = "tiny-nomtp"
) -> Callable[[Build], Sequence[str] | None]:
    return lambda build: _on(model, *more)(build) if build.capabilities.family is family else None


def _without_mtp(build: Build) -> Sequence[str] | None:
    return None if build.mtp() is not None else _on("tiny")(build)


def _two_slots(build: Build) -> Sequence[str] | None:
    mtp = build.mtp() if build.capabilities.family is Family.IK else None
    return None if mtp is None else (*_on("tiny")(build), *mtp, "--parallel", "2")


def _locked(build: Build) -> Sequence[str] | None:
    """Refused memory locks are a warning; what ends the server comes later."""
    mtp = build.mtp()
    if mtp is None or build.name == "ik-2026-06-02":
        return None
    lock = ("--load-mode", "mlock") if build.capabilities.has_load_mode else ("--mlock",)
    return (*_on("tiny-nomtp")(build), *mtp, *lock)


def _removed(build: Build) -> Sequence[str] | None:
    """A flag that older builds have and this one has not."""
    for flag in (("--mlock",), ("--draft-max", "3"), ("-mtp",)):
        if flag[0] not in build.capabilities.flags:
            return _plain(*flag)(build)
    return None


def _no_flash_attention(build: Build) -> Sequence[str]:
    return _plain("--flash-attn", "off", "--cache-type-v", "q8_0")(build)


def _unknown_speculation(build: Build) -> Sequence[str] | None:
    return _plain("--spec-type", "nonsense")(build) if build.capabilities.spec_types else None


CASES = (
    Case("missing-file", _on("not-there")),
    Case("folder-as-file", lambda build: ("--model", str(build.files))),
    Case("unreadable-file", _on("unreadable"), as_nobody=True),
    Case("wrong-magic", _on("wrong-magic")),
    Case("empty-file", _on("empty")),
    Case("truncated-data", _on("truncated")),
    Case("truncated-header", _on("cut-header")),
    Case("unknown-architecture", _on("unknown-architecture")),
    Case("no-mtp-block", _with_mtp("tiny-nomtp")),
    Case("mtp-file-without-mtp-engine", _without_mtp),
    Case("port-taken", _plain(), port_taken=True),
    Case("bad-host", _plain("--host", "203.0.113.7")),
    Case("unknown-flag", _plain("--no-such-flag")),
    Case("removed-flag", _removed),
    Case("bad-number", _plain("--ctx-size", "many")),
    Case("missing-value", _plain("--ctx-size")),
    Case("bad-kv-type", _plain("--cache-type-k", "q9_9")),
    Case("unknown-speculation", _unknown_speculation),
    Case("quantised-v-without-flash-attention", _no_flash_attention),
    Case("two-slots-with-mtp", _two_slots),
    Case("out-of-memory", _plain("--ctx-size", "4194304"), address_space=1_500_000 * 1024),
    Case("out-of-threads", _plain(), address_space=60_000 * 1024),
    Case("mlock-refused-and-no-mtp-block", _locked, as_nobody=True),
    Case("fit-without-gpu-moe", _only(Family.IK, "--fit", model="tiny-moe-nomtp")),
    Case("fit-without-gpu-dense", _only(Family.IK, "--fit", model="tiny")),
)


def _damaged(folder: Path) -> None:
    """The files that cannot be loaded, made of one that can."""
    whole = (folder / "tiny-nomtp.gguf").read_bytes()
    (folder / "wrong-magic.gguf").write_bytes(b"FUGG" + whole[4:])
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "truncated.gguf").write_bytes(whole[: len(whole) // 2])
    (folder / "cut-header.gguf").write_bytes(whole[:2000])
    (folder / "unknown-architecture.gguf").write_bytes(whole.replace(b"qwen35", b"qwen99"))
    (folder / "unreadable.gguf").write_bytes(whole)
    (folder / "unreadable.gguf").chmod(0o600)


def _builds(files: Path) -> Iterator[Build]:
    programs: list[tuple[str, tuple[str, ...]]] = [
        (path.name, (str(path),))
        for path in sorted(Path(os.environ["TUNERD_TEST_ENGINES"]).iterdir())
        if os.access(path, os.X_OK) and path.is_file()
    ]
    programs.append(("embedded", (sys.executable, "-m", "tunerd.tryout.embedded")))
    for name, program in programs:
        shown = subprocess.run([*program, "--help"], capture_output=True, text=True, check=False)
        capabilities = read_capabilities(parse_help(shown.stdout + shown.stderr))
        yield Build(name, program, capabilities, files)


def _run(build: Build, case: Case, arguments: Sequence[str], folder: Path) -> tuple[str, str]:
    """How it ended, as systemd calls it, and what it wrote."""

    def limit() -> None:
        if case.address_space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (case.address_space,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if case.as_nobody:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)

    port = free_port()
    with socket.socket() as taken:
        if case.port_taken:
            taken.bind(("127.0.0.1", port))
            taken.listen()
        done = subprocess.run(
            [*build.program, *_with_common(arguments), "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            cwd=folder,
            check=False,
            preexec_fn=limit,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path.cwd())},
        )
    text = done.stdout.decode(errors="replace").replace(str(build.files), "/models")
    text = text.replace(str(port), "PORT").replace(str(Path.cwd()), "/src")
    text = text.replace(build.program[0], "llama-server").replace(str(folder), "/tmp/x")  # noqa: S108
    if done.returncode < 0:
        return f"killed {-done.returncode}", text
    return f"exited {done.returncode}", text


def _with_common(arguments: Sequence[str]) -> list[str]:
    common = ["--threads", "1", "--host", "127.0.0.1", "--ctx-size", "512"]
    pairs = [common[n : n + 2] for n in range(0, len(common), 2)]
    kept = [word for pair in pairs if pair[0] not in arguments for word in pair]
    return [*kept, *arguments]


def _trimmed(text: str) -> str:
    """Without lines about anything else, and without most of a usage text."""
    lines = [line.rstrip() for line in text.splitlines() if not _SAYS_NOTHING.search(line)]
    usage = [line for line in lines if _USAGE.search(line)]
    if len(usage) > 50:
        dropped = set(usage[8:])
        lines = [line for line in lines if line not in dropped]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines = [*lines[:half], *lines[-half:]]
    text = "\n".join(lines) + "\n"
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def main() -> None:
    """Capture everything, and say how each whole log is classified."""
    wanted = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        files = folder / "models"
        files.mkdir()
        for shape in ("tiny", "tiny-nomtp", "tiny-moe-nomtp"):
            write(design(SHAPES[shape]), files / f"{shape}.gguf")
        _damaged(files)
        here = folder / "run"
        here.mkdir(mode=0o777)
        here.chmod(0o777)
        for build in _builds(files):
            for case in CASES:
                arguments = case.arguments(build)
                if arguments is None or (wanted and case.name not in wanted):
                    continue
                try:
                    # Some builds end before their log thread has written anything.
                    for _ in range(_MOST_TRIES):
                        ended, text = _run(build, case, arguments, here)
                        if text.strip():
                            break
                except (subprocess.TimeoutExpired, PermissionError) as error:
                    sys.stdout.write(f"{build.name:24} {case.name:36} {type(error).__name__}\n")
                    continue
                kind, _, status = ended.partition(" ")
                found = classify(text.splitlines(), exit_kind=kind, exit_status=int(status))
                path = LOGS / build.name / f"{case.name}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{ended}\n{_trimmed(text)}", encoding="utf-8")
                sys.stdout.write(
                    f"{build.name:24} {case.name:36} {ended:10} {found.kind}: {found.words[:100]}\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
