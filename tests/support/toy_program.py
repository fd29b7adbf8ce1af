"""The toy service (toy_service.sh) as the fake service manager plays it."""

from __future__ import annotations

from tests.support.fakes import Invocation, Life
from tunerd.tryout.local_service import Ending

_NEVER = float("inf")
_FLAGS = frozenset({"--ignore-term"})


def toy_program(invocation: Invocation) -> Life:
    """Lives as the script does when given the same options."""
    options: dict[str, str] = {}
    words = list(invocation.argv[1:])
    while words:
        name = words.pop(0)
        options[name] = "" if name in _FLAGS else words.pop(0)
    text = options.get("--print")
    obeys_after_s = _NEVER if "--ignore-term" in options else float(options.get("--slow-term", 0))
    return Life(
        prints=() if text is None else (text,),
        ends_after_s=float(options.get("--end-after", _NEVER)),
        ending=Ending(code=int(options.get("--status", 0))),
        obeys_after_s=obeys_after_s,
        term_ending=Ending(code=int(options.get("--term-status", 0))),
    )
