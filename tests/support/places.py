"""Where end-to-end tests of the daemon run: on this host's systemd as root; where asked for, elsewhere too.

`TUNERD_TEST_PLACES=host,sid,host-user,sid-user` names the places (`trixie` too, Debian 13); CI has time for the
first alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLE = "TUNERD_TEST_PLACES"
USER = "alice"


@dataclass(frozen=True)
class Place:
    """A root, and whose service manager: that of root, or of a user."""

    root: str
    user: str | None

    def __str__(self) -> str:
        return self.root if self.user is None else f"{self.root}-user"


PLACES = {
    str(one): one
    for root in ("host", "sid", "trixie")
    for one in (Place(root, None), Place(root, USER))
}


def places(*, of: str | None = None) -> list[Place]:
    """The places that were asked for.

    Args:
        of: `system` or `user`, for tests that mean only that.
    """
    names = os.environ.get(VARIABLE, "host").split(",")
    found = [PLACES[name] for name in names if name]
    return [one for one in found if of is None or (one.user is None) is (of == "system")]
