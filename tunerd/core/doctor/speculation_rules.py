"""Rules about drafting ahead: whether it pays, and whether build, model and settings go together."""

from __future__ import annotations

from collections.abc import Iterator

from tunerd.core.cmdline_speculation import KINDS_WITH_PROBABILITY
from tunerd.core.doctor import sources
from tunerd.core.doctor.diagnosis import CannotTell, Missing, Rule, Seen, need
from tunerd.core.doctor.facts import MTP, Facts, speculates
from tunerd.core.doctor.questions import (
    asks_for_mtp,
    capabilities_of,
    is_starved,
    model_of,
    server_of,
    settings_of,
    traffic_of,
)
from tunerd.core.doctor.server_log import Traffic
from tunerd.core.engine import Effect
from tunerd.core.gguf_types import TYPES_BY_NAME
from tunerd.core.result import Level

# So many drafted tokens tell an acceptance to about three hundredths (one standard deviation).
_ENOUGH_DRAFTS = 300
# Bits per weight below which a type counts as small: four-bit types have 4.25 to 4.5.
_SMALL_BITS = 5.0


def _does_not_pay(facts: Facts) -> Iterator[Seen | Missing]:
    log = server_of(facts).log
    # What the log counted is drafted, whatever the command line was understood to say.
    drafts = log is not None and log.traffic is not None and log.traffic.n_drafted > 0
    if not drafts and not speculates(settings_of(facts)):
        return
    traffic = traffic_of(facts)
    if not traffic.n_drafted:
        yield Seen(
            Level.WARNING,
            f"speculation is asked for, and {traffic.n_requests} requests drafted nothing",
            "tunerd engines --prove",
        )
        return
    ratio, wanted = _acceptance(facts, traffic)
    if ratio < wanted:
        yield Seen(
            Level.WARNING,
            f"{ratio:.0%} of {traffic.n_drafted} drafted tokens were accepted, and on this box, with "
            f"this traffic, {_needs(wanted)}{_measured_at(facts)}",
            "tunerd plan PROFILE --set speculation.type=off, or a higher speculation.p_min or lower "
            "speculation.n_max",
        )


def _acceptance(facts: Facts, traffic: Traffic) -> tuple[float, float]:
    """The acceptance seen, and the one from which speculation pays here."""
    if traffic.n_drafted < _ENOUGH_DRAFTS:
        raise CannotTell(
            f"more traffic: {traffic.n_drafted} drafted tokens are too few to judge by"
        )
    evidence = need(facts.evidence, "stored measurements")
    cost = need(evidence.break_even, evidence.no_break_even)
    wanted = need(cost.acceptance_ratio(traffic), "drafts in the traffic")
    return traffic.n_accepted / traffic.n_drafted, wanted


def _needs(wanted: float) -> str:
    if wanted > 1:
        return "speculation would not pay if all of them were"
    return f"speculation pays from {wanted:.0%} on"


def _measured_at(facts: Facts) -> str:
    """What the figure is of: the depth of context, and whether the cost to prompts is in it."""
    cost = facts.evidence.break_even if facts.evidence is not None else None
    if cost is None:
        return ""
    depth = f"measured at about {cost.depth_tokens} tokens of context"
    is_taxed = cost.tax_ms(1) is not None
    return (
        f" ({depth}{'' if is_taxed else '; its cost to prompts is not in it, for no run shows it'})"
    )


def _head_quant(facts: Facts) -> Iterator[Seen | Missing]:
    if settings_of(facts).speculation.type != MTP:
        return
    model = model_of(facts)
    if not model.has_mtp:
        return
    bits = need(_bits(model.mtp_types), "the types of the MTP block's weights")
    if bits >= _SMALL_BITS:
        return
    ratio, wanted = _acceptance(facts, traffic_of(facts))
    if ratio < wanted:
        yield Seen(
            Level.WARNING,
            f"the MTP block has {bits:.1f} bits per weight ({model.mtp_types[0][0]}), and only "
            f"{ratio:.0%} of what it drafts is accepted",
            "try a file whose MTP block has 6 or 8 bits; `tunerd plan PROFILE --set model.path=FILE`",
        )


def _bits(types: tuple[tuple[str, int], ...]) -> float | None:
    """Mean bits per weight over bytes by type; None if a type is not known, or there is none."""
    n_bytes = n_values = 0.0
    for name, size in types:
        kind = TYPES_BY_NAME.get(name.lower())
        if kind is None:
            return None
        n_bytes += size
        n_values += size / kind.bytes_per_value
    return n_bytes * 8 / n_values if n_values else None


def _p_min(facts: Facts) -> Iterator[Seen | Missing]:
    speculation = settings_of(facts).speculation
    if speculation.type not in KINDS_WITH_PROBABILITY:
        return
    p_min = speculation.p_min
    if p_min is None:
        p_min = need(capabilities_of(facts).default_p_min, "the build's default for p-min")
    if p_min > 0 or not is_starved(facts):
        return
    yield Seen(
        Level.WARNING,
        "p-min is 0, so every draft is verified however unsure, and weights are on the CPU",
        "tunerd plan PROFILE --set speculation.p_min=0.75",
    )


def _slots(facts: Facts) -> Iterator[Seen | Missing]:
    settings, server = settings_of(facts), server_of(facts)
    if settings.speculation.type != MTP:
        return
    from_log = server.log.n_slots if server.log is not None else None
    known = (server.n_slots, from_log, settings.serving.n_parallel)
    n_slots = need(next((n for n in known if n is not None), None), "the number of slots")
    if n_slots > 1:
        yield Seen(
            Level.WARNING,
            f"{n_slots} slots with MTP",
            "tunerd plan PROFILE --set serving.n_parallel=1",
        )


def _model_without(facts: Facts) -> Iterator[Seen | Missing]:
    speculation = settings_of(facts).speculation
    if speculation.type != MTP or speculation.draft_model is not None:
        return
    model = model_of(facts)
    if not model.has_mtp:
        why = model.mtp_problem or "it has no MTP block"
        yield Seen(
            Level.ERROR,
            f"MTP is asked for, and the model cannot draft: {why}",
            "serve the MTP variant of the model, or tunerd plan PROFILE --set speculation.type=off",
        )


def _engine_without(facts: Facts) -> Iterator[Seen | Missing]:
    engine = server_of(facts).engine
    has_word = capabilities_of(facts).spec_word(MTP) is not None
    name = engine.name if engine is not None else "the build"
    if not has_word and asks_for_mtp(server_of(facts)):
        yield Seen(Level.ERROR, f"MTP is asked for, and {name} knows no such kind of speculation",
                   "serve it with a newer build: tunerd engines lists what is here")  # fmt: skip
        return
    if settings_of(facts).speculation.type == MTP:
        proof = engine.proof(MTP) if engine is not None else None
        if proof is not None and proof.effect in {Effect.NO_EFFECT, Effect.FAILED}:
            yield Seen(Level.ERROR, f"{name} takes the flags for MTP, but {proof.detail}",
                       "tunerd engines")  # fmt: skip
        return
    if not has_word and model_of(facts).has_mtp:
        yield Seen(
            Level.NOTE,
            f"the model can draft for itself, and {name} knows no MTP",
            "serve it with a newer build: tunerd engines lists what is here",
        )


RULES = (
    Rule(
        "mtp-does-not-pay",
        "drafts are accepted too rarely to pay for themselves on this box",
        "a rejected draft costs time and gives nothing; from which acceptance on it pays depends on "
        "this box's step time and prompt speed, not on a fixed share",
        f"{sources.CARD_12_GB}, checklist point 1 (60 %); crossover of {sources.CARD_24_GB}",
        _does_not_pay,
    ),
    Rule(
        "mtp-head-quant",
        "a small quant of the MTP block drafts badly",
        "some MTP heads bear fewer bits worse than the rest of the weights do",
        f"{sources.CARD_12_GB}, checklist point 5",
        _head_quant,
    ),
    Rule(
        "p-min-zero",
        "p-min is 0 while weights are on the CPU",
        "each unsure draft still costs a verification, which is slow where experts are on the CPU; "
        "0.75 raised throughput on two of three cards",
        f"{sources.CARD_12_GB}, checklist point 4; {sources.CARD_24_GB}, phase 9",
        _p_min,
    ),
    Rule(
        "mtp-slots",
        "more than one slot with MTP",
        "drafts of one slot can leak into another, a hybrid model can abort, and the gain is gone",
        sources.issue(28286, 28019, 27537),
        _slots,
    ),
    Rule(
        "model-without-mtp",
        "MTP is asked of a model that has no MTP block",
        "the heads come from training; a server that is asked for them without ends at its start",
        f"{sources.CARD_16_GB}; messages of mainline and ik_llama.cpp of 2026",
        _model_without,
    ),
    Rule(
        "engine-without-mtp",
        "the build cannot draft with MTP",
        "a flag in a help text is no proof: builds of May 2026 took it without effect, and older "
        "ones have no MTP at all",
        sources.issue(22673, 23549),
        _engine_without,
    ),
)
