"""Measures profiles on the live box until somebody ends it; run inside a machine.

    python -m tests.fault.measure PROFILE... [--budget S] [--rounds N] [--requests N] [--power W...]

Prints what it does, one word a line: `planned`, `held`, `serving UNIT`, `limited`, `asked`, `preempted`, `back`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from tunerd.app import Context, build_context
from tunerd.engine.choice import PlanRequest
from tunerd.engine.server import LlamaServer
from tunerd.errors import LeaseEnded, TunerdError
from tunerd.production.lease import Held, hold
from tunerd.production.plan import Plan, make_plan
from tunerd.production.power import power_limit


def main() -> int:
    """Measure; the exit status is 0 when all rounds were done, 3 when somebody else ended it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("profiles", nargs="+")
    parser.add_argument("--budget", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--power", type=float, nargs="*", default=[])
    told = parser.parse_args()
    ctx = build_context(start_supervisor=True)
    plans = [make_plan(ctx, PlanRequest(name, {})) for name in told.profiles]
    _say("planned")
    try:
        with hold(ctx, purpose="a test", budget_s=told.budget) as held:
            _say(f"held {held.id} {held.inhibits}")
            for number in range(told.rounds):
                _serve(ctx, held, plans[number % len(plans)], told)
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except LeaseEnded as error:
        _say(f"preempted {error.cause}")
        return 3
    except TunerdError as error:
        _say(f"error {error.message} {error.cause} {error.state}")
        return error.exit_code
    _say(f"back {held.without_service_s}")
    return 0


def _serve(ctx: Context, held: Held, plan: Plan, told: argparse.Namespace) -> None:
    with held.serve(plan) as candidate:
        if candidate.fault is not None:
            _say(f"fault {candidate.fault.reason} {candidate.fault.words}")
            return
        _say(f"serving {candidate.unit}")
        server = LlamaServer(candidate.address, ctx.clock)
        for watts in told.power or [None]:
            with contextlib.ExitStack() as limits:
                if watts is not None:
                    limits.enter_context(power_limit(ctx, held.id, ctx.unit, watts))
                    _say(f"limited {watts:g}")
                for _ in range(told.requests):
                    done = server.complete("please go on with code", n_predict=24, timeout_s=30.0)
                    fault = held.look(candidate)
                    if fault is not None:
                        _say(f"fault {fault.reason} {fault.words}")
                        return
                    if done.problem is None:
                        _say("asked")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
