"""`tunerd` and `python -m tunerd` are the command line."""

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
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
