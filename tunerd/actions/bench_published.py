"""How this box stands beside the numbers that were published for its profile."""

from __future__ import annotations

from tunerd.actions.context import Context
from tunerd.actions.profile_layers import load_profile
from tunerd.core.bench.findings import ArmData
from tunerd.core.bench.mtp import Beside, beside_published, lengths_beside_published, mtp_table
from tunerd.core.bench.request import Suite
from tunerd.core.metrics import summarise
from tunerd.core.profile import Published
from tunerd.errors import UsageError


def against_published(
    published: Published, suite: Suite, arm: ArmData, family: str | None
) -> tuple[Beside, ...]:
    """The figures of an arm beside the published ones of its family of engines."""
    if suite is Suite.MTP:
        return beside_published(mtp_table(arm.samples), published, family)
    by_length = {
        n: summarise([s for s in arm.samples if s.n_predict == n])
        for n in {s.n_predict for s in arm.samples}
    }
    walls = {n: one.wall_ms.median for n, one in by_length.items()}
    rates = {n: one.decode.tok_s for n, one in by_length.items()}
    return lengths_beside_published(walls, rates, published)


def published_of(ctx: Context, profile: str | None) -> Published:
    """The published numbers of a profile.

    Raises:
        UsageError: it is not known which profile serves, or nothing was published for it.
    """
    if profile is None:
        raise UsageError(
            "nothing to compare with: no profile of tunerd serves here",
            hint="`tunerd bench PROFILE --against published`",
        )
    published = load_profile(ctx, profile, options={}).profile.published
    if published == Published():
        raise UsageError(f"profile `{profile}` has no published numbers")
    return published
