"""`tunerd` and `python -m tunerd` are the command line."""

import contextlib
import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit; Ctrl-C while it is being loaded, or while it ends, ends it quietly."""
    try:
        if sys.getfilesystemencoding() != "utf-8":
            from tunerd.machine.process import begin_in_utf_8

            begin_in_utf_8()
        from tunerd.cli.main import main as run

        run()
    except KeyboardInterrupt:
        # Python ends with 120 where it cannot write what is left for a reader who has gone too.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
