"""`tunerd verdict`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.output import finish, json_option


@click.command(name="verdict", short_help="What a sweep came to, with the numbers behind it.")
@click.argument("number", metavar="[ID]", type=int, required=False)
@json_option
@click.pass_obj
def command(mode: str | None, number: int | None, as_json: bool) -> None:
    """What a sweep came to (the newest without ID): promote, keep or inconclusive, and why.

    Exit code 0 whatever the verdict.

    \b
    Example:
      tunerd verdict
      tunerd verdict 12 --json | jq .outcome
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.sweeps import verdict
    from tunerd.cli.remote import from_daemon

    of = () if number is None else (str(number),)
    found = from_daemon(mode, "verdict", *of, as_json=as_json)
    finish(found or verdict(build_context(mode=mode), number), render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield payload["sentence"]
    for one in payload["challenges"]:
        decision, gain = one["decision"], one["gain"]
        ratios = ", ".join(f"{math.expm1(pair['log_ratio']):+.1%}" for pair in one["pairs"])
        yield f"  challenge {one['number']}, {one['outcome']}: {ratios or 'no pairs'}"
        yield (
            f"    evidence {decision['e_value']:.3g} of {decision['needed']:.0f} needed; by betting, "
            f"which assumes less, {decision['betting_e_value']:.3g}"
        )
        if gain is not None and gain["lower"] is not None and gain["upper"] is not None:
            yield f"    95 % interval {gain['lower']:+.1%} to {gain['upper']:+.1%}"
        yield from (f"    {reason}" for reason in one["reasons"])
    if payload["decision"]:
        yield f"then: {payload['decision']['text']}"
