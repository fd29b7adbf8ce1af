"""This machine and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.support.folders import ROOT
from tests.support.needs import missing
from tunerd.machine.host import process_facts
from tunerd.machine.process import start


def test_a_running_process_is_described() -> None:
    code = "import time; print(1, flush=True); time.sleep(60)"
    with start([sys.executable, "-c", code, "an argument"]) as process:
        while not process.log_tail():
            time.sleep(0.01)

        facts = process_facts(process.pid)

    assert facts is not None
    assert facts.cmdline is not None
    assert facts.cmdline[-1] == "an argument"
    assert facts.rss_mib is not None
    assert facts.rss_mib > 2
    assert facts.read_bytes is not None


def test_what_another_user_may_not_see_is_unknown() -> None:
    if os.geteuid() != 0:
        missing("root", "needs root to become somebody else", "run as root")
    script = (
        "import os, sys; target = os.getppid(); sys.path.insert(0, sys.argv[1]);"
        "from tunerd.machine.host import process_facts; process_facts(target); os.setuid(65534);"
        "facts = process_facts(target);"
        "print(facts.read_bytes, facts.rss_mib is not None)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT)],
        capture_output=True,
        check=True,
        text=True,
        timeout=180,
    )

    assert done.stdout.split() == ["None", "True"]
