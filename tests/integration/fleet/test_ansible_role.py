"""The Ansible role and its examples, as Ansible and its linter read them."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.ansible import ROLES, environment, program
from tests.support.local_box import Box
from tunerd.errors import HostError
from tunerd.fleet.rollout import boxes_of

FOLDER = ROLES.parent


@pytest.mark.whole
def test_the_linter_has_nothing_to_say_for_production(tmp_path: Path) -> None:
    copy = tmp_path / "ansible"
    shutil.copytree(FOLDER, copy)
    words = [program("ansible-lint"), "--offline", "--strict", "--profile", "production"]
    done = subprocess.run(
        words, cwd=copy, env=environment(tmp_path), capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_settings_are_written_as_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tunerd.toml"
    engine = {"path": '/opt/ü "x"/llama-server', "environment": {"A": "${b}"}}
    wanted = {"mode": "system", "models": {"dirs": ["/srv/m"]}, "engines": {"llama.cpp": engine}}
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"tunerd_settings": wanted}))
    template = ROLES / "tunerd/templates/tunerd.toml.j2"
    words = [program("ansible"), "localhost", "--connection=local", f"--extra-vars=@{given}",
             "--module-name=template", f"--args=src={template} dest={path}"]  # fmt: skip
    done = subprocess.run(
        words, env=environment(tmp_path), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert tomllib.loads(path.read_text()) == wanted
    assert not checked(path)
    path.write_text("[backups]\nkeep = -7\n")
    assert "backups.keep" in checked(path)


def checked(path: Path) -> str:
    """What the role's own check of a settings file says."""
    tasks = yaml.safe_load((ROLES / "tunerd/tasks/configure.yml").read_text())
    (words,) = (one["ansible.builtin.template"]["validate"] for one in tasks if "ansible.builtin.template" in one)  # fmt: skip
    _, _isolated, *rest = (str(path) if word == "%s" else word for word in shlex.split(words))
    done = subprocess.run(
        [sys.executable, *rest], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode == 0) == (done.stderr == ""), done.stderr
    return done.stderr


def test_the_boxes_of_the_example_are_found(tmp_path: Path) -> None:
    program("ansible-inventory")
    ctx = Box(tmp_path, environment(tmp_path)).context
    assert boxes_of(ctx, (), FOLDER / "inventory.example.yml") == ("root@gpu1", "root@192.168.1.12")
    (tmp_path / "broken.yml").write_text("gpus: [")
    with pytest.raises(HostError, match="cannot read the inventory"):
        boxes_of(ctx, (), tmp_path / "broken.yml")
