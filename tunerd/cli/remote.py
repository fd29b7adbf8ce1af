"""Which commands go through the daemon's socket, and how they ask before they do."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd.cli.output import confirm, harmless, print_message, progress_sink, show
from tunerd.core.host import Mode
from tunerd.core.paths import paths_for

if TYPE_CHECKING:
    from tunerd.actions.remote import Remote
    from tunerd.core.result import ActionResult

_SOCKET = "tunerd.sock"


def remote_for(mode: str | None, *, as_json: bool) -> Remote | None:
    """The daemon, for who acts through it; None for root, and for one's own units."""
    if os.geteuid() == 0:
        return None
    path = socket_for(mode, os.environ)
    if path is None:
        return None
    from tunerd.actions.remote import Remote

    return Remote(path, progress_sink(as_json=as_json))


def socket_for(mode: str | None, environment: Mapping[str, str]) -> Path | None:
    """The daemon's socket, for who should act through it; None for who acts by themselves.

    Root never does. Others do with `--system`, and without a mode where the socket lets them in:
    then root made them members of the group for just that.
    """
    wanted = mode or environment.get("TUNERD_MODE") or None
    if os.geteuid() == 0 or wanted not in {None, str(Mode.SYSTEM)}:
        return None
    path = paths_for(Mode.SYSTEM, environment).runtime_dir / _SOCKET
    if wanted is None:
        return path if os.access(path, os.R_OK | os.W_OK) else None
    return path if path.exists() else None


def remote_plan(
    remote: Remote,
    profile: str,
    options: Sequence[str],
    *,
    untuned: bool,
    explain: bool = False,
) -> ActionResult:
    """What `tunerd plan` says, found out by the daemon."""
    import json

    from tunerd.actions.profile_layers import parse_options
    from tunerd.core.job import check_options
    from tunerd.core.names import check_name

    check_name(profile, of="a profile")
    keys = parse_options(options)
    check_options(keys)
    chosen = json.dumps(keys) if keys else None
    return remote.read("plan", profile, set=chosen, untuned=untuned, explain=explain)


def remote_apply(
    remote: Remote,
    profile: str,
    options: Sequence[str],
    *,
    untuned: bool,
    now: bool,
    probation: bool,
    yes: bool,
) -> ActionResult:
    """Show the plan, ask, and have the daemon deploy exactly that."""
    from tunerd.actions.profile_layers import parse_options
    from tunerd.actions.remote import seen
    from tunerd.cli.commands.plan import render
    from tunerd.core.job import check_options
    from tunerd.core.names import check_name

    check_name(profile, of="a profile")
    keys = parse_options(options)
    check_options(keys)
    body: dict[str, Any] = {"profile": profile, "set": keys, "untuned": untuned, "now": now,
                            "probation": probation}  # fmt: skip
    if not yes:
        plan = remote_plan(remote, profile, options, untuned=untuned)
        show(plan.payload, render, sys.stderr)
        for message in plan.messages:
            print_message(message)
        confirm("Swap it now?", yes=yes)
        body["shown"] = seen(plan)
    return remote.do("apply", body)


def remote_rollback(remote: Remote, *, to: str | None, now: bool, yes: bool) -> ActionResult:
    """Show where it leads, ask where somebody is there to answer, and have the daemon go back."""
    from tunerd.actions.remote import seen

    body: dict[str, Any] = {"now": now} if to is None else {"now": now, "to": to}
    if not yes and sys.stdin.isatty():
        target = remote.read("rollback", "preview", to=to)
        print(harmless(target.payload["diff"], keep="\n"), file=sys.stderr)
        for message in target.messages:
            print_message(message)
        confirm(f"Go back to {target.payload['to']} now?", yes=yes)
        body["shown"] = seen(target)
    return remote.do("rollback", body)
