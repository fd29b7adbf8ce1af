"""A service that tells how it was started: one JSON object in the file named by its first argument.

Run by a bare interpreter. With `--flee` it leaves a child in a session of its own behind.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

out = Path(sys.argv[1])
facts = {
    "argv": sys.argv[2:],
    "environment": dict(os.environ),
    "folder": str(Path.cwd()),
    "umask": os.umask(0),
    "ids": [os.getuid(), os.getgid()],
    "n_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
    "pid": os.getpid(),
    "fled": None,
}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if "--flee" in sys.argv:
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
    facts["fled"] = child
written = out.with_name(f"{out.name}.new")
written.write_text(json.dumps(facts))
written.rename(out)
while True:
    time.sleep(1)
