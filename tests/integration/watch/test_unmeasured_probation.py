"""What watches a server that was deployed by hand and never measured."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.sweep_box import swept, until
from tunerd.machine.net import free_port

pytestmark = pytest.mark.timeout(300)

UNIT = "llama-server.service"


def test_a_server_that_dies_after_apply_is_taken_back_though_nothing_was_measured() -> None:
    with swept(free_port()) as box:
        assert box.json("probation", "show")["probations"] == [], "a first one is not watched"
        with box.daemon():
            done = box.json("apply", "night", "--set", "speculation.n_max=2", "--yes")
            told = {one["code"]: one["text"] for one in done["messages"]}
            assert "its speed is not judged" in told["probation"]
            until(lambda: box.probation().get("boot_id") is not None, "the daemon watches it")
            watched = box.probation()
            assert (watched["generation"], watched["state"]) == (done["generation"], "running")
            assert watched["basis"]["slowest_tok_s"] is None
            box.call("bench", "--suite", "workload", "--workload", "small", "--yes")
            found = box.json("guard", "check")
            assert found["generation"] == done["generation"]
            assert found["basis"]["slowest_tok_s"] is not None, "what is measured meanwhile"
            pid = box.box.context.services.state(UNIT).main_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            until(lambda: box.probation()["state"] == "taken back", "it is taken back")
            assert "died" in box.probation()["reason"]
            until(lambda: box.serves, "what served before serves")
            assert "--spec-draft-n-max 4" in " ".join(box.engine.served()[-1])
