"""`tunerd engines`: each engine, what it can do, what was proved, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunerd.actions.context import Context
from tunerd.core.engine import Capabilities, Effect, Engine, SpecStyle
from tunerd.core.flags import ALL_FLAGS, SwitchFlag
from tunerd.core.result import ActionResult, Message, note

# Builds of these dialects say that they take n-max and p-min with a request; only a proof counts.
_CLAIMS_PER_REQUEST = frozenset({"ik-now"})


def engines(ctx: Context, *, prove: bool = False) -> ActionResult:
    """List engines, after trying their features on a designed model if asked to.

    Raises:
        Busy: another change is under way while proofs are wanted.
    """
    from tunerd.actions.find_engines import find_engines
    from tunerd.actions.prove import prove_engine

    found = find_engines(ctx)
    if prove:
        found = tuple(prove_engine(ctx, engine) for engine in found)
    messages: list[Message] = []
    if any(_untried(engine) for engine in found):
        messages.append(
            note(
                "untried",
                "what a build does with its flags has not been tried on all of them",
                "`tunerd engines --prove` takes a few seconds each",
            )
        )
    return ActionResult(
        "engines", {"engines": [engine_json(engine) for engine in found]}, tuple(messages)
    )


def engine_json(engine: Engine) -> dict[str, Any]:
    """An engine as scripts read it."""
    capabilities = engine.capabilities
    version = engine.version
    return {
        "name": engine.name,
        "path": str(engine.program),
        "found_by": engine.found_by,
        "problem": engine.problem,
        "version": None if version is None else version.text,
        "identity": None if engine.identity is None else engine.identity.sha256,
        "components": None
        if engine.identity is None
        else [{"path": str(c.path), "sha256": c.sha256} for c in engine.identity.components],
        "family": None if capabilities is None else str(capabilities.family),
        "dialect": None if capabilities is None else capabilities.dialect,
        "capabilities": None if capabilities is None else capabilities_json(capabilities),
        "lacks": None if capabilities is None else list(lacks(capabilities)),
        "proofs": [
            {"feature": p.feature, "effect": str(p.effect), "detail": p.detail}
            for p in engine.proofs
        ],
        "per_request_speculation": _per_request(engine),
        "embedded": engine.is_embedded,
    }


def capabilities_json(capabilities: Capabilities) -> dict[str, Any]:
    """What matters of a build's capabilities."""
    return {
        "spec_types": list(capabilities.spec_types),
        "spec_style": str(capabilities.spec_style),
        "kv_types": list(capabilities.kv_types),
        "fit": str(capabilities.fit),
        "fit_default_on": capabilities.fit_default_on,
        "load_mode": capabilities.has_load_mode,
        "default_n_max": capabilities.default_n_max,
        "default_p_min": capabilities.default_p_min,
        "default_port": capabilities.default_port,
    }


def lacks(capabilities: Capabilities) -> tuple[str, ...]:
    """Profile keys and kinds of speculation that this build cannot serve."""
    missing = [
        row.key
        for row in ALL_FLAGS
        if not isinstance(row, SwitchFlag) and capabilities.first_of(*row.spellings) is None
    ]
    if capabilities.spec_style is SpecStyle.NONE:
        missing.append("speculation")
    missing += [
        f"speculation.type={kind}"
        for kind in ("mtp", "dflash", "eagle3", "draft")
        if capabilities.spec_word(kind) is None
    ]
    return tuple(missing)


def named(found: Sequence[Engine], name: str) -> Engine | None:
    """The engine of this name or path."""
    return next((e for e in found if name in {e.name, str(e.program)}), None)


def _untried(engine: Engine) -> bool:
    return engine.capabilities is not None and engine.proof("mtp").effect is Effect.UNTRIED


def _per_request(engine: Engine) -> str:
    """Whether n-max and p-min can be given with a request: proved, refuted, claimed or no."""
    proof = engine.proof("per-request")
    if proof.effect is not Effect.UNTRIED:
        return "proved" if proof.effect is Effect.PROVED else "no"
    dialect = engine.capabilities.dialect if engine.capabilities is not None else ""
    return "claimed" if dialect in _CLAIMS_PER_REQUEST else "no"
