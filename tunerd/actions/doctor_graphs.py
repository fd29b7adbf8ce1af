"""The control run of `doctor --deep`: decoding with CUDA graphs against decoding without, in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerd.actions.compare import CompareRequest, Confirm, run_compare
from tunerd.actions.context import Context
from tunerd.core.compare import Limits
from tunerd.core.doctor.facts import NO_GRAPHS, Facts, GraphControl
from tunerd.core.doctor.graphs import control_to_record
from tunerd.core.result import Message, note, warning
from tunerd.errors import (
    BenchError,
    ConfigError,
    DeployError,
    EngineError,
    ModelFileError,
    Preempted,
    Stranded,
    TunerdError,
    UsageError,
)

MAX_PAIRS = 12
_COULD_NOT = (BenchError, ConfigError, DeployError, EngineError, ModelFileError, UsageError)


def measure_graphs(
    ctx: Context, facts: Facts, *, budget_s: float, confirm: Confirm
) -> tuple[GraphControl | None, tuple[Message, ...]]:
    """What serves now against the same without CUDA graphs, in production's place.

    Args:
        ctx: Where.
        facts: What is known already; without an NVIDIA GPU in use, and where graphs are off, nothing
            is run.
        budget_s: The longest that it may take.
        confirm: Shows what will happen and asks; raises to stop.

    Raises:
        Busy: another measurement or change is under way.
        Preempted: the measurement was ended from outside.
        Stranded: production does not serve afterwards.
    """
    server = facts.server
    if not facts.host.gpus or (server is not None and server.devices == ()):
        return None, (note("no-control", "no control run: the server uses no NVIDIA GPU"),)
    if server is not None and NO_GRAPHS in server.environment:
        return None, (note("no-control", f"no control run: {NO_GRAPHS} is set already"),)
    request = CompareRequest(
        words=(),
        options=(f'environment.{NO_GRAPHS}="1"',),
        limits=Limits(budget_s=budget_s, max_pairs=MAX_PAIRS),
    )
    try:
        result = run_compare(ctx, request, confirm=confirm)
    except (Preempted, Stranded):
        raise
    except _COULD_NOT as problem:
        cause = f": {problem.cause}" if problem.cause else ""
        text = f"no control run without CUDA graphs: {problem.message}{cause}"
        return None, (warning("no-control", text, problem.hint),)
    if result.exit_code:
        text = f"the control run failed: {result.payload['problem']}"
        return None, (warning("no-control", text),)
    control = control_of(result.payload)
    return control, () if control is None else keep_control(ctx, result.payload["run"], control)


def keep_control(ctx: Context, run: int, control: GraphControl) -> tuple[Message, ...]:
    """Keep what it came to with its run, so that later calls know it; A is the server with graphs."""
    from tunerd.system.store import EvidenceStore

    try:
        with EvidenceStore(ctx.paths.evidence) as store:
            store.add_summary(run, control_to_record(control, "A"))
    except TunerdError as problem:
        text = f"the control run cannot be kept for later: {problem.message}"
        return (warning("not-kept", text, problem.hint),)
    return ()


def control_of(payload: Mapping[str, Any]) -> GraphControl | None:
    """What the comparison says of decoding over the whole mix; B is without graphs."""
    for part in payload["parts"]:
        if part["part"] == "decode" and part["class"] is None:
            return GraphControl(part["gain"], part["gain_low"], part["gain_high"], payload["pairs"])
    return None
