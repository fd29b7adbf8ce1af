"""docs/first-night.md on a real machine: each command is run, and prints what the page shows but for figures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.deployment import place_units
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.roots import PREFIX
from tunerd.tryout.designed import SHAPES, design, write

pytestmark = [pytest.mark.alone, pytest.mark.timeout(2700)]

PAGE = Path(__file__).parents[2] / "docs" / "first-night.md"
UNIT_PATH = "/etc/systemd/system/llama-server.service"
BY_HAND = """\
[Unit]
Description=my llama
After=network.target

[Service]
User=alice
ExecStart=/usr/bin/llama-server -m /srv/models/designed.gguf \\
    -c 768 -np 1 -t 1 --host 127.0.0.1 --port 8099 --metrics
Restart=always

[Install]
WantedBy=multi-user.target
"""
MORE = """
[workload]
classes = [{ kind = "code", prompt_tokens = 16, answer_tokens = 144 }]

[sweep]
"speculation.type" = ["ngram-mod"]
"speculation.n_max" = [16]
"speculation.p_min" = [0.0]
"serving.threads" = [1]
"serving.n_ubatch" = [512]
"""
# What is written by hand in the page, typed by `cat >>`.
TYPED = {"cat >> /etc/tunerd/profiles/mine.toml": MORE}
SETTINGS = '[models]\ndirs = ["/srv/models"]\n[service]\nsettle_s = 1.0\n[sweep]\npatience_s = 20\n'
_BLOCK = re.compile(r"^```\n(\$ .*?)^```$", re.MULTILINE | re.DOTALL)
_FIGURES = re.compile(r"[+-]?\d[\d.,:/-]*")


@dataclass(frozen=True)
class Step:
    """One command of the page with the lines that it shows."""

    command: str
    shown: tuple[str, ...]


def steps(text: str) -> Iterator[Step]:
    for block in _BLOCK.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = part.splitlines()
            yield Step(command, tuple(shown))


def shape(line: str) -> str:
    return " ".join(_FIGURES.sub("#", line).split())


def lacks(step: Step, printed: str) -> list[str]:
    """Lines of the page that were not printed in this order."""
    rest = iter([shape(line) for line in printed.splitlines()])
    missing = []
    for line in map(shape, step.shown):
        begin = line.removesuffix("...").rstrip()
        is_whole = line == begin
        if not begin:
            continue
        if not any(one == begin if is_whole else one.startswith(begin) for one in rest):
            missing.append(line)
            rest = iter([shape(one) for one in printed.splitlines()])
    return missing


@pytest.fixture
def machine(sid_root: Root, tmp_path: Path) -> Iterator[Machine]:
    models = tmp_path / "models"
    models.mkdir(mode=0o755)
    write(design(SHAPES["f32"]), models / "designed.gguf").chmod(0o644)
    tmp_path.chmod(0o755)
    with Machine(sid_root, binds={"/srv/models": models}) as booted:
        booted.write("/etc/tunerd/tunerd.toml", SETTINGS)
        booted.run("ln", "-sf", PREFIX / "bin/tunerd", "/usr/local/bin/tunerd")
        booted.run("useradd", "--create-home", "alice", check=False)
        booted.write(UNIT_PATH, BY_HAND)
        place_units(booted, "tunerd.service")
        booted.systemctl("enable", "--now", "llama-server.service")
        booted.sh("until curl -sf http://127.0.0.1:8099/health; do sleep 0.2; done")
        yield booted


def test_the_walk_prints_what_its_page_shows(machine: Machine) -> None:
    text = PAGE.read_text(encoding="utf-8")
    recorded, missing = text, []
    for step in steps(text):
        typed = TYPED.get(step.command)
        if typed is not None:
            assert [line for line in step.shown if line] == [
                line for line in typed.splitlines() if line
            ]
        done = machine.run("sh", "-c", step.command, stdin=typed or "", check=False, limit_s=400.0)
        printed = done.stdout
        recorded = recorded.replace(
            f"$ {step.command}\n", f"$ {step.command}\n{printed}{done.stderr}", 1
        )
        missing += [f"{step.command}: {line}" for line in ([] if typed else lacks(step, printed))]
        if done.returncode:
            missing.append(f"{step.command} ended with {done.returncode}: {done.stderr}")
    if target := os.environ.get("TUNERD_TEST_RECORD"):
        Path(target).write_text(recorded, encoding="utf-8")
    assert missing == []
