"""The stand-in engine: a program that plays llama-server, well or badly, as a file tells it.

It takes the flags of the dialect that it plays (refusing what that build's `--help` does not
have), writes that engine's log lines, answers its HTTP routes and simulates its speed. It never
computes anything, and needs the standard library alone.

How it behaves stands in a JSON file (`--stand-in FILE`, the first arguments), read once at each start: the
fields of `Behaviour`.
`tests/support/stand_in.py` installs it as a program whose path needs no arguments.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
sys.modules["ssl"] = None  # type: ignore[assignment]  # http.client would load it

from tests.support.fake_llama.program import main  # noqa: E402 # the path to it comes first

if __name__ == "__main__":
    main()
