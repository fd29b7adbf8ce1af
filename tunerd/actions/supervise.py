"""`tunerd supervise`: run units on a machine without a service manager, in the foreground."""

from __future__ import annotations

import os

from tunerd.core.host import Mode
from tunerd.core.paths import paths_for
from tunerd.system import supervisor


def run_supervisor() -> int:
    """Supervise the units of this user's local mode until SIGTERM; the exit status.

    Raises:
        Busy: a supervisor runs already.
        HostError: a folder cannot be written.
    """
    paths = paths_for(Mode.LOCAL, os.environ)
    supervisor.supervise(paths, os.environ)
    return 0
