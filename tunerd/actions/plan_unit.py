"""The unit of a plan: who runs the server, and what its text is made of."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.core.cmdline import CommandLine
from tunerd.core.engine import Engine
from tunerd.core.host import Host, Mode
from tunerd.core.live import LiveUnit
from tunerd.core.plan import UserFacts
from tunerd.core.resolve import Resolved
from tunerd.core.unit import UnitSpec
from tunerd.errors import HostError
from tunerd.system.accounts import SERVICE_ACCOUNT, account, may_read
from tunerd.system.systemd import lingers

_LOCKING = ("mlock", "mmap+mlock")


@dataclass(frozen=True, slots=True)
class ServiceUser:
    """Who runs the server: None for whoever runs the service manager."""

    user: str | None
    group: str | None
    is_missing: bool


def service_user(ctx: Context, live: LiveUnit) -> ServiceUser:
    """In system mode the settings' user, else the live unit's, else the system account."""
    if ctx.mode is not Mode.SYSTEM:
        own = ctx.settings.service.user if os.geteuid() == 0 else None
        return ServiceUser(own, None, own is not None and account(own) is None)
    if ctx.settings.service.user is not None:
        user, group = ctx.settings.service.user, None
    elif live.user is not None:
        user, group = live.user, live.group
    else:
        user, group = SERVICE_ACCOUNT, SERVICE_ACCOUNT
    return ServiceUser(user, group, account(user) is None)


def unit_spec(
    ctx: Context, resolved: Resolved, engine: Engine, command: CommandLine, user: ServiceUser
) -> UnitSpec:
    """What the unit is rendered from."""
    paths = [word for word in command.argv if word.startswith("/")]
    return UnitSpec(
        unit=ctx.unit,
        mode=ctx.mode,
        profile=resolved.name,
        engine=engine.name,
        argv=command.argv,
        environment={**engine.environment, **resolved.profile.environment},
        user=user.user,
        group=user.group,
        api_key_file=resolved.profile.serving.api_key_file,
        work_dir=str(ctx.paths.log_dir),
        wants_mlock=resolved.profile.serving.load_mode in _LOCKING,
        needs_home=any(path.startswith(("/home/", "/root/", "/run/user/")) for path in paths),
        stop_timeout_s=ctx.settings.service.stop_timeout_s,
        wanted_by="multi-user.target" if ctx.mode is Mode.SYSTEM else "default.target",
    )


def unit_template(ctx: Context) -> str:
    """The unit file with its fields open, from this installation."""
    path = ctx.data_dir / "units" / "llama-server.service.in"
    content = ctx.files.read(path)
    if content is None:
        raise HostError(f"the unit template is missing: `{path}`", hint="install tunerd again")
    return content.decode()


def user_facts(ctx: Context, user: ServiceUser, host: Host, command: CommandLine) -> UserFacts:
    """What the account may read of what the command line names."""
    unreadable: list[str] = []
    who = account(user.user) if user.user is not None else None
    if who is not None:
        words = [word for word in command.argv if word.startswith("/")]
        unreadable = [word for word in words if not may_read(who, Path(word))]
    return UserFacts(
        mode=ctx.mode,
        user=user.user,
        is_missing=user.is_missing,
        unreadable=unreadable,
        lingers=lingers(ctx.environment) if ctx.mode is Mode.USER else None,
        memlock_unlimited=host.memory.memlock_unlimited,
        lacks_manager=ctx.lacks_manager,
    )
