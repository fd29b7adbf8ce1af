"""`tunerd doctor`: everything that may be wrong on this box, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunerd.actions.context import Context
from tunerd.actions.doctor_evidence import read_evidence
from tunerd.actions.doctor_server import ServerReading, read_port, read_server
from tunerd.core.doctor.catalogue import ALL_RULES
from tunerd.core.doctor.diagnosis import Diagnosis, diagnose
from tunerd.core.doctor.facts import EvidenceFacts, Facts
from tunerd.core.result import ActionResult, Message, note, warning
from tunerd.errors import TunerdError
from tunerd.system.cpu_frequency import read_cpu_frequency
from tunerd.system.driver_files import read_driver_files
from tunerd.system.host import read_host

if TYPE_CHECKING:
    from tunerd.actions.compare import Confirm


@dataclass(frozen=True, slots=True)
class DeepRequest:
    """What a control run may take [s], and who is asked before production is stopped for it."""

    budget_s: float
    confirm: Confirm


def doctor(ctx: Context, deep: DeepRequest | None = None) -> ActionResult:
    """Reads only, but for the control run; exit code 0 for nothing or notes, 6 warnings, 7 errors.

    Args:
        ctx: Where.
        deep: Ask for the control run without CUDA graphs as well.

    Raises:
        Busy: another measurement or change is under way.
        Preempted: the control run was ended from outside.
        Stranded: production does not serve after the control run.
    """
    facts, reading, messages = _gather(ctx)
    if deep is not None:
        from tunerd.actions.doctor_graphs import measure_graphs

        graphs, told = measure_graphs(ctx, facts, budget_s=deep.budget_s, confirm=deep.confirm)
        messages += told
        # Its own runs are evidence too; the rest stays as it was, for the server has a new log now.
        facts = replace(facts, graphs=graphs, evidence=_evidence(ctx, reading, messages))
    diagnosis = diagnose(facts, ALL_RULES)
    server = facts.server
    payload = {
        "unit": server.unit if server is not None else None,
        "active": server.is_active if server is not None else None,
        **diagnosis_json(diagnosis),
    }
    return ActionResult("doctor", payload, tuple(messages), diagnosis.exit_code)


def gather(ctx: Context) -> tuple[Facts, list[Message]]:
    """All facts, and what went wrong on the way to them."""
    facts, _, messages = _gather(ctx)
    return facts, messages


def _gather(ctx: Context) -> tuple[Facts, ServerReading | None, list[Message]]:
    messages: list[Message] = []
    host = read_host(ctx.gpu)
    reading: ServerReading | None = None
    try:
        reading = read_server(ctx, host)
    except TunerdError as problem:
        messages.append(_could_not("the unit", problem))
    if reading is not None and reading.facts.was_edited:
        messages.append(_edited(ctx))
    facts = Facts(
        host=host,
        frequency=read_cpu_frequency(),
        driver=read_driver_files(),
        server=reading.facts if reading is not None else None,
        port=read_port(reading),
        evidence=_evidence(ctx, reading, messages),
    )
    return facts, reading, messages


def _evidence(
    ctx: Context, reading: ServerReading | None, messages: list[Message]
) -> EvidenceFacts | None:
    try:
        facts = read_evidence(ctx, reading)
    except TunerdError as problem:
        messages.append(_could_not("stored measurements", problem))
        return None
    if facts is not None:
        messages += [warning("damaged-rows", text) for text in facts.damage]
    return facts


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis as scripts read it."""
    looks_for = {rule.code: rule.looks_for for rule in ALL_RULES}
    return {
        "findings": [
            {
                "code": finding.code,
                "severity": str(finding.severity),
                "seen": finding.seen,
                "why": finding.why,
                "do": finding.do,
                "source": finding.source,
            }
            for finding in diagnosis.findings
        ],
        "not_checked": [
            {"code": one.code, "looks_for": looks_for[one.code], "missing": list(one.missing)}
            for one in diagnosis.not_checked
        ],
        "passed": list(diagnosis.passed),
    }


def _edited(ctx: Context) -> Message:
    return note(
        "edited",
        f"{ctx.unit} was edited since its server was started: what is said is of the text, and what "
        "only a running server shows is unknown",
        f"tunerd verify; systemctl restart {ctx.unit}",
    )


def _could_not(what: str, problem: TunerdError) -> Message:
    cause = f": {problem.cause}" if problem.cause else ""
    return warning("cannot-read", f"{what} cannot be read: {problem.message}{cause}", problem.hint)
