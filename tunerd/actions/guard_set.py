"""`tunerd guard set`: what a guard may do."""

from __future__ import annotations

from tunerd.actions.context import Context
from tunerd.actions.write_settings import write_settings
from tunerd.core.result import ActionResult, note


def set_guard(ctx: Context, guard: str, policy: str) -> ActionResult:
    """Write the switch of one guard into tunerd.toml.

    Args:
        ctx: Where.
        guard: oom, hang, drift or upgrade.
        policy: act, advise or off.

    Raises:
        UsageError: there is no such switch.
        HostError: the file cannot be read or written.
    """
    key = f"guards.{guard}"
    write_settings(ctx, {key: policy})
    hint = "the daemon takes it over by itself; `tunerd guard show`"
    message = note("written", f"`{ctx.paths.settings_file}` was changed", hint)
    return ActionResult("guard set", {"changed": {key: policy}}, (message,), has_acted=True)
