"""What would be deployed: the command line, the unit, memory, warnings, and the reason for every flag.

Nothing is touched. `apply` does exactly what this returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunerd.actions.choose_engine import PlanRequest, choose, draft_facts
from tunerd.actions.context import Context
from tunerd.actions.engine_names import named_by_plan
from tunerd.actions.find_model import found_by_metadata
from tunerd.actions.live import read_live_unit, refuse_masked, serving_now, standing_text
from tunerd.actions.memory_evidence import correction_of
from tunerd.actions.plan_checks import (
    check_arguments,
    check_ended_connections,
    check_port,
    check_unit,
    tuned_layer,
)
from tunerd.actions.plan_memory import memory_json, memory_of_plan
from tunerd.actions.plan_unit import service_user, unit_spec, unit_template, user_facts
from tunerd.core.adopted import lost_lines
from tunerd.core.cmdline import CommandLine
from tunerd.core.engine import Engine
from tunerd.core.host import Host
from tunerd.core.live import LiveUnit
from tunerd.core.memory_verdict import MemoryPlan
from tunerd.core.model import ModelFacts
from tunerd.core.plan import (
    check_live,
    check_machine,
    check_model,
    check_proofs,
    check_user,
    check_values,
    environment_conflicts,
    explain,
    serving_after,
)
from tunerd.core.resolve import Resolved
from tunerd.core.result import ActionResult, Level, Message, note
from tunerd.core.swap import sha256
from tunerd.core.unit import render_unit
from tunerd.core.unit_diff import unified_diff
from tunerd.core.unit_file import argument_warnings
from tunerd.system.host import read_host

_LOCKING = ("mlock", "mmap+mlock")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `apply` needs, and everything that a person wants to see before it."""

    resolved: Resolved
    engine: Engine
    command: CommandLine
    unit_text: str
    live: LiveUnit
    live_sha256: str | None
    diff: str
    facts: ModelFacts
    memory: MemoryPlan
    host: Host
    has_gpu: bool
    passed_over: tuple[tuple[str, str], ...]
    messages: tuple[Message, ...]

    @property
    def is_refused(self) -> bool:
        """Whether something stands against deploying it."""
        return any(message.level is Level.ERROR for message in self.messages)


def plan(ctx: Context, request: PlanRequest, *, with_explain: bool = False) -> ActionResult:
    """`tunerd plan PROFILE`; exit code 1 if it would be refused."""
    made = make_plan(ctx, request)
    payload = plan_json(made, with_explain=with_explain)
    return ActionResult("plan", payload, made.messages, 1 if made.is_refused else 0)


def plan_json(made: Plan, *, with_explain: bool) -> dict[str, Any]:
    """A plan as scripts read it."""
    explained = [
        {"flag": flag, "key": key, "origin": origin}
        for flag, key, origin in explain(made.command, made.resolved)
    ]
    return {
        "profile": made.resolved.name,
        "layers": list(made.resolved.layers),
        "engine": {
            "name": made.engine.name,
            "path": str(made.engine.program),
            "dialect": made.engine.capabilities.dialect if made.engine.capabilities else None,
        },
        "passed_over": [{"engine": name, "reason": why} for name, why in made.passed_over],
        "argv": list(made.command.argv),
        "unit": made.unit_text,
        "unit_path": str(made.live.path) if made.live.path else None,
        "diff": made.diff,
        "memory": memory_json(made.memory),
        "model": {
            "path": made.command.argv[2],
            "name": made.facts.name,
            "architecture": made.facts.architecture,
            "quant": made.facts.quant,
            "file_bytes": made.facts.file_bytes,
            "has_mtp": made.facts.has_mtp,
        },
        "warnings": [
            {"code": m.code, "text": m.text, "hint": m.hint}
            for m in made.messages
            if m.level is not Level.NOTE
        ],
        "refused": made.is_refused,
        "explain": explained if with_explain else None,
    }


def make_plan(ctx: Context, request: PlanRequest) -> Plan:
    """The plan.

    Raises:
        ConfigError: the profile is wrong.
        DeployError: the unit is masked.
        ModelFileError: the model file is missing, damaged, or not unique.
        EngineError: no engine can serve the profile.
    """
    # gather
    host = read_host(ctx.gpu)
    refuse_masked(ctx)
    live = read_live_unit(ctx)
    live_text = standing_text(ctx)
    chosen = choose(ctx, request, host)
    engine, resolved, command = chosen.engine, chosen.resolved, chosen.command
    has_gpu = chosen.has_gpu
    draft = draft_facts(ctx, resolved, command)
    user = service_user(ctx, live)

    before = serving_now(ctx, live)

    # decide
    spec = unit_spec(ctx, resolved, engine, command, user)
    unit_text = render_unit(unit_template(ctx), spec)
    correction, remarks = correction_of(ctx, command.argv, unit_text)
    memory = memory_of_plan(
        ctx, resolved, engine, chosen.facts, draft, host, chosen.devices,
        has_gpu=has_gpu, correction=correction,
    )  # fmt: skip
    after = serving_after(command, engine.capabilities)
    messages = (
        *named_by_plan(ctx, request),
        *check_machine(resolved, host, chosen.devices, has_gpu=has_gpu),
        *check_model(resolved, chosen.facts),
        *found_by_metadata(resolved, chosen.model_path),
        *check_values(resolved, host),
        *check_proofs(resolved, engine),
        *environment_conflicts(resolved.profile.environment),
        *check_live(
            after,
            live,
            before,
            lost=lost_lines(live, unit_text, command.argv),
        ),
        *check_user(user_facts(ctx, user, host, command), wants_mlock=spec.wants_mlock),
        *check_arguments(ctx, engine, command, chosen.model_path),
        *check_port(ctx, after),
        *check_ended_connections(ctx, live, before, after, engine),
        *check_unit(ctx, unit_text),
        *memory.messages,
        *remarks,
        *(note("long-argument", text) for text in argument_warnings(command.argv)),
        *tuned_layer(ctx, resolved, engine, chosen.facts, host),
    )
    old = live_text.decode("utf-8", "replace") if live_text is not None else live.text
    return Plan(
        resolved=resolved,
        engine=engine,
        command=command,
        unit_text=unit_text,
        live=live,
        live_sha256=sha256(live_text),
        diff=unified_diff(old, unit_text, ctx.unit),
        facts=chosen.facts,
        memory=memory,
        host=host,
        has_gpu=has_gpu,
        passed_over=chosen.passed_over,
        messages=messages,
    )
