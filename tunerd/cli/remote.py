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


def from_daemon(mode: str | None, *parts: str, as_json: bool, **query: Any) -> ActionResult | None:
    """What a reading route says, for who acts through the daemon; None for who acts by themselves."""
    remote = remote_for(mode, as_json=as_json)
    return None if remote is None else remote.read(*parts, **query)


def by_daemon(
    mode: str | None, route: str, body: Mapping[str, Any], *, as_json: bool, yes: bool = True
) -> ActionResult | None:
    """What a job came to, for who acts through the daemon; None for who acts by themselves.

    Args:
        mode: As given on the command line.
        route: Below `/api/`.
        body: Its arguments; what is None is left out.
        as_json: Whether progress is not shown.
        yes: False for a job with a question: it is found out first, and asked here.
    """
    remote = remote_for(mode, as_json=as_json)
    if remote is None:
        return None
    if not yes:
        asked = remote.do(route, {**body, "ask": True})
        for message in asked.messages:
            print_message(message)
        confirm(asked.payload["question"], yes=False)
    return remote.do(route, body)


def acts_through_daemon(mode: str | None) -> bool:
    """Whether this is somebody who acts through the daemon's socket."""
    return socket_for(mode, os.environ) is not None


def watch_by_daemon(mode: str | None, route: str) -> bool:
    """Print what a job tells, line by line, until it ends; False for who acts by themselves."""
    path = socket_for(mode, os.environ)
    if path is None:
        return False
    from tunerd.actions.remote import Remote

    Remote(path, lambda one: print(harmless(one.text), flush=True)).do(route, {})
    return True


def demand_root(mode: str | None, command: str, why: str) -> None:
    """Refuse what nobody but root may do, where it would go through the daemon.

    Raises:
        HostError: this is not root, and means the system's server.
    """
    if not acts_through_daemon(mode):
        return
    from tunerd.errors import HostError

    raise HostError(
        f"`tunerd {command}` needs root",
        cause=why,
        state="nothing was touched",
        hint="use sudo, or `--user` for a unit of your own",
    )


def options_for_daemon(options: Sequence[str], mode: str | None = "system") -> dict[str, Any]:
    """What was given with `--set`, refused where it may not be set without root.

    Raises:
        UsageError: a key names a program, a file or an address, or it is no `key=value`.
    """
    from tunerd.actions.profile_layers import parse_options
    from tunerd.core.job import check_options

    keys = parse_options(options)
    if acts_through_daemon(mode):
        check_options(keys)
    return keys


def remote_profile(remote: Remote, profile: str, options: Sequence[str]) -> ActionResult:
    """What `tunerd profiles show` says, of the daemon's machine."""
    import json

    from tunerd.core.names import check_name

    check_name(profile, of="a profile")
    keys = options_for_daemon(options)
    return remote.read("profiles", profile, set=json.dumps(keys) if keys else None)


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

    from tunerd.core.names import check_name

    check_name(profile, of="a profile")
    keys = options_for_daemon(options)
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
    from tunerd.actions.remote import seen
    from tunerd.cli.commands.plan import render
    from tunerd.core.names import check_name

    check_name(profile, of="a profile")
    keys = options_for_daemon(options)
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


def remote_promote(
    remote: Remote, number: int | None, *, now: bool, probation: bool, yes: bool
) -> ActionResult:
    """Show what would be deployed, ask, and have the daemon promote exactly that."""
    from tunerd.actions.remote import seen
    from tunerd.cli.commands.plan import render

    body: dict[str, Any] = {"sweep": number, "now": now, "probation": probation}
    if not yes:
        asked = remote.do("promote", {**body, "ask": True})
        show(asked.payload, render, sys.stderr)
        for message in asked.messages:
            print_message(message)
        confirm(asked.payload["question"], yes=yes)
        body["shown"] = seen(asked)
    return remote.do("promote", body)
