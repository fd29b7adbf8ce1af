"""The largest context that holds a speed, searched on a real engine whose memory has an end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import needs
from tests.support.build_box import BuildBox, build_box
from tunerd.tryout.designed import Shape, design, write

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(1800)]

# A token takes 16 KiB of KV cache on it: 768 of them 12 MiB, 32768 of them 512.
WIDE = Shape(
    n_layer=2, n_head=8, n_head_kv=8, head_dim=512, full_attention_interval=2, has_mtp=False
)
SERVES, FITS, SIZES = 512, 768, "512,768,32768"
_SPARE_KIB = 200 * 1024  # a server maps some 128 MiB more for a moment, or not
WORKLOAD = """
[[classes]]
name = "ask"
kind = "code"
prompt_tokens = 60
answer_tokens = 60
"""


@pytest.fixture(scope="module")
def box() -> Iterator[BuildBox]:
    with build_box(needs.engine("mainline-2026-08-18"), shape="tiny-nomtp") as found:
        write(design(WIDE), found.model, force=True)
        config = found.box.folder / "config"
        (config / "profiles/workloads").mkdir(parents=True)
        (config / "profiles/workloads/small.toml").write_text(WORKLOAD)
        with (config / "tunerd.toml").open("a") as settings:
            settings.write("[sweep]\npatience_s = 20.0\nquiet_s = 1.0\n")
        found.profile("it", workload="small", serving__ctx_size=SERVES, serving__metrics=True)
        found.apply("it")
        found.limit_address_space(_SPARE_KIB)
        yield found


def swept(box: BuildBox, at_least: int) -> dict[str, Any]:
    """What a sweep for context prints; it takes longer than other commands may."""
    command = [sys.executable, "-m", "tunerd", "sweep", "run", "--yes", "--json", "--goal", "context",
               "--at-least", str(at_least), "--budget", "200s",
               "--space", f"serving.ctx_size={SIZES}"]  # fmt: skip
    done = subprocess.run(
        command, env=box.box.environment, cwd=box.box.folder,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_runs_out_of_memory_is_too_large_and_the_largest_that_serves_is_proved(
    box: BuildBox,
) -> None:
    found = swept(box, 40)
    assert found["verdict"] == "promote", found["sentence"]
    assert found["changes"] == f"serving.ctx_size = {FITS}"
    assert "32768 in f16: it does not start: oom" in found["sentence"]
    assert box.json("sweep", "show")["challenges"][-1]["reasons"][0].endswith("starts")
    box.json("promote", "--yes")
    assert f"--ctx-size {FITS}" in " ".join(box.json("plan", "it")["argv"])
    assert box.ask("code def return", 8)["choices"][0]["text"]
