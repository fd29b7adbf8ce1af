"""Runs a command of tunerd that dies before one of its effects, or fails there. Runs in machines.

    die_at.py NUMBER HOW apply PROFILE | rollback | recover

HOW is `die` (as by SIGKILL), `full` (that effect fails as on a full disk), `full-from` (that one
and all later ones on the disk do), or `count`. It prints the effect, or how many there were.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from tests.fault.fuse import Fuse, FusedServices, Kind, Step, full_disk
from tunerd.app import Context, build_context
from tunerd.engine.builds import PlanRequest
from tunerd.errors import TunerdError
from tunerd.machine.files import Files
from tunerd.production.apply import apply
from tunerd.production.recover import recover
from tunerd.production.rollback import rollback
from tunerd.units.generations import Generations

DIED = 137
_ALL = 10_000


def die(step: Step) -> None:
    """End this process as SIGKILL does, but for the exit status."""
    os.write(1, f"{step.text}\n".encode())
    os._exit(DIED)


def fused(ctx: Context, fuse: Fuse) -> Context:
    """The context with a fuse at every effect."""
    files = Files(before=fuse.disk)
    return replace(
        ctx,
        files=files,
        services=FusedServices(ctx.services, fuse),
        generations=Generations(ctx.paths.generations_dir, files),
    )


def main() -> int:
    """Do what the arguments say; the exit code of the command."""
    number, how, verb, *words = sys.argv[1:]
    fuse = {
        "die": Fuse(int(number), die),
        "full": Fuse(int(number), full_disk),
        "full-from": Fuse(int(number), full_disk, until=_ALL, of=Kind.DISK),
        "count": Fuse(),
    }[how]
    ctx = fused(build_context(mode="system"), fuse)
    try:
        if verb == "apply":
            request = PlanRequest(words[0], {})
            apply(ctx, request, drain=False, confirm=lambda _: None)
        elif verb == "rollback":
            rollback(ctx, to=None, drain=False, confirm=lambda _: None)
        else:
            recover(ctx)
    except TunerdError as error:
        print(f"{fuse.burnt[0].text if fuse.burnt else ''}: {error.code}: {error} ({error.cause})")
        return error.exit_code
    print(fuse.burnt[0].text if fuse.burnt else len(fuse.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
