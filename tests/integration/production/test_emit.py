"""`tunerd emit` and `fits` as a user calls them; what is written is run by those it is written for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import needs
from tests.support.build_box import BuildBox, build_box
from tests.support.emitted import HOSTILE, LINES, any_words, same, server_of, words_of
from tests.support.server_process import start
from tunerd.engine.emit import Target, emit
from tunerd.engine.flags import owner_of

ROUTERS = ("mainline-2026-04-26", "mainline-2026-05-16", "mainline-2026-08-18")
HOSTILE_NAME = 'it\'s 100% $HOME `é` "m" ${PORT}.gguf'
# Of which the router makes its own.
OF_ROUTERS = {"serving.host", "serving.port", "serving.alias"}
DUMP = '#!/bin/sh\nfor word; do printf "%s\\0" "$word"; done >"$DUMP"\n'
# That `$`, `~` and `\` between single quotes stay as they are, is meant.
SHELLCHECK = ("/usr/bin/shellcheck", "--exclude=SC1003,SC2016,SC2088")


@contextmanager
def engine_box(name: str) -> Iterator[BuildBox]:
    with build_box(needs.engine(name), shape="tiny-nomtp") as box:
        shutil.copy(box.model, box.model.with_name(HOSTILE_NAME))
        box.profile("designed", model__path=str(box.model.with_name(HOSTILE_NAME)))
        yield box


def pairs(argv: list[str]) -> set[tuple[str, ...]]:
    """Keys of flags with their values, without those of routers."""
    found: list[list[str]] = []
    for word in argv:
        if word.startswith("--"):
            found.append([owner_of(word) or word])
        else:
            found[-1].append(word)
    return {tuple(one) for one in found if one[0] not in OF_ROUTERS}


@pytest.mark.engine
@pytest.mark.parametrize("build", ROUTERS)
def test_a_router_runs_the_flags_of_the_plan(build: str, tmp_path: Path) -> None:
    with engine_box(build) as box:
        plan = box.json("plan", "designed")
        file = tmp_path / "models.ini"
        made = box.json("emit", "models-ini", "designed", "-o", str(file))
        assert made["path"] == str(file)
        with start([plan["argv"][0], "--models-preset", str(file)], tmp_path / "log") as router:
            router.wait_ready()
            model = next(one for one in router.get("/models")["data"] if one["id"] == "designed")
            assert pairs(plan["argv"][1:]) <= pairs(model["status"]["args"][1:])
            asked = {"model": "designed", "prompt": "1 2 3", "max_tokens": 4}
            assert router.post("/v1/completions", asked)["choices"][0]["text"]


def test_words_of_any_kind_come_through_a_script(tmp_path: Path) -> None:
    program, dump = tmp_path / "a program", tmp_path / "words"
    program.write_text(DUMP)
    program.chmod(0o755)

    @settings(
        max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )  # fmt: skip
    @given(st.lists(any_words, max_size=4))
    def run(values: list[str]) -> None:
        server = server_of(*values, program=(str(program),), environment={"DUMP": str(dump)})
        text = emit(Target.SHELL, [server]).text
        subprocess.run(["/bin/sh", "-s"], input=text.encode(), check=True, env={})
        assert same(dump.read_bytes().decode().split("\0")[:-1], words_of(server))

    run()
    script = tmp_path / "serve"
    script.write_text(emit(Target.SHELL, [server_of(*HOSTILE, *LINES[:2])]).text)
    subprocess.run([*SHELLCHECK, str(script)], check=True)


@pytest.mark.llama
def test_what_serves_is_written_nothing_is_replaced_unasked_and_no_variable_of_a_file_is_said(
    tmp_path: Path,
) -> None:
    with build_box(None, shape="tiny") as box:
        nothing = box.box.call("emit", "shell")
        assert nothing.returncode == 2
        assert "llama-server.service serves nothing here" in nothing.stderr
        box.profile("mine", serving__api_key_file=str(tmp_path / "key"))
        (tmp_path / "key").write_text("sk-secret\n")
        box.apply("mine")
        live, planned = box.json("emit", "compose"), box.json("emit", "compose", "mine")
        (service,) = yaml.safe_load(live["text"])["services"].values()
        assert service["command"] == next(iter(yaml.safe_load(planned["text"])["services"].values()))["command"]  # fmt: skip
        assert "# serving.ctx_size, set by " in live["text"]
        assert {"type": "bind", "source": str(box.box.folder), "target": "/mnt/0", "read_only": True} in service["volumes"]  # fmt: skip
        assert "sk-secret" not in str(live)
        told = box.box.call("emit", "compose")
        assert told.stdout == live["text"]
        assert all(f"not carried over: {line}" in told.stderr for line in live["not_carried"])

        file = tmp_path / "compose.yaml"
        file.write_text("mine")
        refused = box.box.call("emit", "compose", "mine", "-o", str(file))
        assert (refused.returncode, file.read_text()) == (2, "mine")
        assert "--force replaces it" in refused.stderr
        assert box.box.call("emit", "compose", "-o", str(file), "--force").returncode == 0
        assert file.read_text() == live["text"]

        long_word = "/" + "x" * 300
        box.profile("mine", serving__chat_template=long_word)
        assert long_word in box.json("emit", "shell", "mine")["text"]
        box.profile("mine")
        box.apply("mine")
        (unit,) = box.box.folder.rglob("llama-server.service")
        (box.box.folder / "of-root").write_text("DATABASE=sk-hidden\nGGML_SAID=1\n")
        key, lora = box.model.with_name("keys.txt"), box.model.with_name("lora.gguf")
        key.write_text("sk-secret\n")
        lora.touch()
        words = f"{box.model.name} --api-key-file keys.txt --lora-scaled {lora}:0.5,{lora.name}:2"
        text = unit.read_text().replace(str(box.model), words)
        text = text.replace("Type=", f"EnvironmentFile={box.box.folder}/of-root\nType=")
        unit.write_text(re.sub("WorkingDirectory=.*", f"WorkingDirectory={box.model.parent}", text))
        assert str(box.model) not in unit.read_text()
        made = box.json("emit", "shell")
        assert str(box.model) in made["text"]
        inside = box.json("emit", "compose")
        (service,) = yaml.safe_load(inside["text"])["services"].values()
        assert str(key) in {one["source"] for one in service["volumes"]}
        assert "/mnt/0/lora.gguf:0.5,/mnt/0/lora.gguf:2" in service["command"]
        assert not [line for line in inside["not_carried"] if "no such file" in line]
        assert f"--api-key-file {key} " in box.json("emit", "models-ini")["text"]
        assert "sk-hidden" not in str(made)
        assert "export GGML_SAID=1\n" in made["text"]
        assert any("DATABASE: it comes from a file" in line for line in made["not_carried"])


@pytest.fixture(scope="module")
def box() -> Iterator[BuildBox]:
    with build_box(None, shape="tiny") as made:
        for name in ("one", "two"):
            made.profile(name)
        yield made


@pytest.mark.llama
def test_two_small_models_fit_and_are_written_to_run_together(box: BuildBox) -> None:
    made = box.json("fits", "one", "two")
    (found,) = made["devices"]
    needs = [row["mib"] for row in found["needs"]]
    assert made["fits"] is found["fits"] is True
    assert found["left_mib"] == found["budget_mib"] - sum(needs) - found["margin_mib"]
    text = box.json("emit", "llama-swap", "one", "two")["text"]
    made = yaml.safe_load(text)
    assert list(made["models"]) == ["one", "two"]
    assert made["groups"]["tunerd"]["swap"] is False
    assert text == box.json("emit", "llama-swap", "one", "two", "one")["text"], "once each"
    assert "--models-max 2" in box.json("emit", "models-ini", "one", "two")["text"]


@pytest.mark.llama
def test_a_budget_that_is_too_small_is_refused_with_what_is_missing(box: BuildBox) -> None:
    (found,) = box.json("fits", "one", "two")["devices"]
    needs = sum(row["mib"] for row in found["needs"])
    (found,) = box.json("fits", "one", "two", "--budget-mib", str(needs))["devices"]
    assert found["left_mib"] == 0
    done = box.box.call("fits", "one", "two", "--budget-mib", str(needs - 7))
    assert done.returncode == 1
    assert "they do not fit together: they need 7 MiB more RAM than may be taken" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[3:5]] == ["one", "two"]
    assert box.box.call("fits", "one", "nobody").returncode == 1
