"""What `tunerd jobs` shows of jobs that nobody but root may ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.local_box import Box
from tunerd.jobs import folder_of
from tunerd.operations import JobRequest, Lane

SWEEP = {
    "sentence": "nothing is better", "without_service_s": None, "sweep": 3, "arms_measured": 4,
    "restarts": 5, "elapsed_s": 60.0,
}  # fmt: skip


def test_a_sweep_of_roots_own_is_watched_to_its_end(tmp_path: Path) -> None:
    box = Box(tmp_path)
    argv = ("sweep", "run", "--yes", "--space=memory.override_tensor=a,b", "--budget=172800.0")
    request = JobRequest("sweep run", argv, Lane.MEASURE, "root", 1.0, is_member=False)
    folder = folder_of(box.context)
    number = folder.create(request)
    envelope: dict[str, Any] = {
        "schema": 1,
        "command": "sweep run",
        "ok": True,
        "messages": [],
        **SWEEP,
    }
    with folder.writing(number) as tell:
        tell({"event": "begun", "pid": 1})
        tell({"event": "end", "exit_code": 0, "result": envelope})

    done = box.call("jobs", "watch", str(number))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("nothing is better\nsweep 3: 4 configurations, 5 starts in")
