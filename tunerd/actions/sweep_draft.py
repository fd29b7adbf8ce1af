"""Which draft model a sweep tries, of those that profile, settings or `--space` name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.find_model import locate
from tunerd.actions.plan import Plan
from tunerd.core.cmdline_speculation import KINDS_WITH_DRAFT_FILE
from tunerd.core.sweep.arm import DRAFT, DRAFT_MODEL
from tunerd.core.sweep.grid import Left
from tunerd.errors import ModelFileError
from tunerd.system.model_files import ModelFiles

_NONE_NAMED = "it needs a draft model, and speculation.draft_model names none"


@dataclass(frozen=True, slots=True)
class Drafter:
    """The draft model to try, as it is named; `reason` says why there is none.

    `is_wanted`: somebody named one. `sha256` tells one file from another.
    """

    name: str | None
    reason: str | None
    is_wanted: bool
    sha256: str | None = None
    left: tuple[Left, ...] = ()


NO_DRAFTER = Drafter(None, _NONE_NAMED, is_wanted=False)


def drafter_of(ctx: Context, base: Plan, ranges: Mapping[str, tuple[Any, ...]]) -> Drafter:
    """The first of the named files that can draft for the model; one sweep tries one.

    How often drafts are right is learned by kind of speculation, so two files would be taken for one.
    """
    speculation = base.resolved.profile.speculation
    is_another_kinds = speculation.type in KINDS_WITH_DRAFT_FILE - {DRAFT}
    own = None if is_another_kinds else speculation.draft_model
    named = [str(one) for one in ranges.get(DRAFT_MODEL, ())] or ([own] if own else [])
    if speculation.type == DRAFT:
        others = [name for name in named if name != own]
        return Drafter(own, None, True, left=tuple(_second(name, str(own)) for name in others))
    taken, sha256, left = None, None, []
    for name in named:
        if taken is not None:
            left.append(_second(name, taken))
            continue
        found = _fitting(ctx, base, name)
        if found[0] is None:
            taken, sha256 = name, found[1]
        else:
            left.append(Left(name, found[0]))
    if taken is not None:
        return Drafter(taken, None, True, sha256, tuple(left))
    reason = "; ".join(one.reason for one in left) or _NONE_NAMED
    return Drafter(None, reason, bool(named), left=tuple(left))


def _second(name: str, taken: str) -> Left:
    return Left(name, f"one sweep tries one draft model: {taken}")


def _fitting(ctx: Context, base: Plan, name: str) -> tuple[str | None, str | None]:
    """Why a file cannot draft for the model, or None and its identity."""
    models = ModelFiles(ctx.paths.cache_dir, ctx.files)
    try:
        path = locate(ctx, models, name, base.resolved)
        facts = models.read_facts(path)
        apart = models.why_vocabularies_differ(_model_path(base), path)
    except ModelFileError as error:
        return (error.cause or error.message).splitlines()[0], None
    if facts.is_companion:
        return f"it drafts as {facts.architecture} only, not by itself", None
    if apart is not None:
        return f"it does not speak the model's tokens: {apart}", None
    if facts.file_bytes >= base.facts.file_bytes:
        return "it is no smaller than the model that it would draft for", None
    return None, facts.identity.sha256


def _model_path(base: Plan) -> Path:
    return base.facts.identity.files[0].path
