"""A draft model beside the model, on the real embedded engine: what a sweep would try, and that it drafts."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from tests.support.local_box import deployed
from tunerd.machine.net import free_port
from tunerd.sweep.plan import SweepRequest
from tunerd.sweep.run import sweep_plan
from tunerd.tryout.designed import Shape, design, write

pytestmark = [pytest.mark.llama, pytest.mark.timeout(180)]

# Of the same seed and width as the model, so that it knows the same successors.
LITTLE = Shape(n_layer=2, full_attention_interval=2, has_mtp=False)
PROFILE = """
extends = "cpu-embedded"
[model]
path = "{model}"
[serving]
port = {port}
ctx_size = 1024
[speculation]
type = "mtp"
n_max = 4
p_min = 0.0
draft_model = "{little}"
"""


def drafted(port: int) -> tuple[int, int]:
    """Tokens drafted, and of those accepted, for one answer."""
    body = json.dumps({"prompt": "please go on with code", "n_predict": 48, "temperature": 0})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", body.encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as reply:
        timings = json.loads(reply.read())["timings"]
    return timings["draft_n"], timings["draft_n_accepted"]


def test_a_draft_model_that_a_profile_names_is_offered_and_drafts_on_the_real_engine(
    tmp_path: Path,
) -> None:
    port = free_port()
    little = write(design(LITTLE), tmp_path / "little.gguf").path
    with deployed(tmp_path, port) as box:
        folder = tmp_path / "config/profiles"
        folder.mkdir(parents=True)
        (folder / "two.toml").write_text(PROFILE.format(port=port, model=box.model, little=little))
        assert box.call("apply", "two", "--yes").returncode == 0
        plan = sweep_plan(box.context, SweepRequest(budget_s=3600.0)).payload["plan"]
        (family,) = (one for one in plan["families"] if one["speculation"] == "draft")
        assert family["extra"] == [[["speculation.draft_model", str(little)]]]

        done = box.call("apply", "two", "--yes", "--set", "speculation.type=draft")
        assert done.returncode == 0, done.stderr
        n_drafted, n_accepted = drafted(port)
    assert n_drafted >= 24
    assert n_accepted == n_drafted
