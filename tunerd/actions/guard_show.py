"""`tunerd guard show`: every guard with its switch, its evidence and what it last said."""

from __future__ import annotations

from dataclasses import asdict

from tunerd.actions.context import Context
from tunerd.actions.guard_findings import read_findings
from tunerd.actions.telemetry import history
from tunerd.core.result import ActionResult

_EVENTS = 500


def show_guards(ctx: Context) -> ActionResult:
    """Reads only."""
    settings = ctx.settings.guards
    kept = history(ctx, 0.0, 0.0, events=_EVENTS)
    rows = [
        ("oom", settings.oom, ("oom", "guard-acted", "guard-failed"),
         ("two deaths within half an hour, or one after which systemd gave up, with the engine's words for "
         "no VRAM"),
         f"deploy a larger fit margin (1664, 1792, 2048, then 256 more), {settings.oom_steps} times at most"),
        ("hang", settings.hang, ("hang",),
         (f"health is ok, nobody asks, nothing was generated for {settings.hang_every_s:.0f} s, and two tiny "
         f"generations get no answer in {settings.hang_limit_s:.0f} s"),
         f"restart it, {settings.hang_restarts_per_hour} times an hour at most"),
        ("drift", settings.drift, ("drift", "drift-over"),
         "three stretches of 512 tokens and more in a row below what was measured of this server",
         "say so with the likely cause; act: restart one that decays within its life, when idle"),
        ("upgrade", settings.upgrade, ("upgrade", "upgrade-refused"),
         "files of the engine or the driver's version changed",
         ("plan and try the deployed command line again, and say what its next start will refuse; act: the "
          "next night compares a kept copy of the build before with the one after")),
    ]  # fmt: skip
    _, findings = read_findings(ctx, None)
    guards = []
    for name, policy, kinds, evidence, may in rows:
        last = next((event for event in kept.events if event.kind in kinds), None)
        guards.append(
            {"name": name, "policy": policy, "evidence": evidence, "may": may,
             "last": None if last is None else asdict(last)}
        )  # fmt: skip
    confirmed = findings.confirmed if findings is not None else None
    payload = {
        "guards": guards,
        "confirmed": None if confirmed is None else asdict(confirmed),
        "problem": kept.problem,
    }
    return ActionResult("guard show", payload)
