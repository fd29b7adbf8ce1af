"""Questions that several rules ask of the facts; each ends the rule that lacks the answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tunerd.core.doctor.diagnosis import CannotTell, need
from tunerd.core.doctor.facts import DEFAULT_KV_TYPE, MTP, Facts, ServerFacts
from tunerd.core.doctor.server_log import LogFacts, Traffic
from tunerd.core.engine import SPEC_WORDS, Capabilities
from tunerd.core.flags import normal_spelling
from tunerd.core.host import Gpu
from tunerd.core.memory_parts import Device
from tunerd.core.model import ModelFacts
from tunerd.core.profile import ProfileFile

NO_UNIT = "a unit that serves"
# Of a card's memory; more is too full. Source: the 12 GB write-up, checklist point 2.
FULL_SHARE = 0.95
_MTP_SWITCHES = frozenset({"-mtp", "--multi-token-prediction"})


def server_of(facts: Facts) -> ServerFacts:
    """The unit that serves."""
    return need(facts.server, NO_UNIT)


def settings_of(facts: Facts) -> ProfileFile:
    """What the unit's command line sets."""
    server = server_of(facts)
    why = f" ({server.settings_problem})" if server.settings_problem else ""
    return need(server.settings, f"the settings of {server.unit}{why}")


def capabilities_of(facts: Facts) -> Capabilities:
    """What the unit's build accepts."""
    server = server_of(facts)
    engine = server.engine
    why = f" ({engine.problem})" if engine is not None and engine.problem else ""
    return need(server.capabilities, f"what the build of {server.unit} accepts{why}")


def model_of(facts: Facts) -> ModelFacts:
    """The model that is served."""
    server = server_of(facts)
    why = f" ({server.model_problem})" if server.model_problem else ""
    return need(server.model, f"the header of the served model{why}")


def log_of(facts: Facts) -> LogFacts:
    """What the unit wrote since it was started."""
    server = server_of(facts)
    why = " (the one that runs was started with another command line)" if server.was_edited else ""
    return need(server.log, f"the log of the running server{why}")


def traffic_of(facts: Facts) -> Traffic:
    """What the unit answered since it was started, as far back as its log goes."""
    return need(log_of(facts).traffic, "requests in the log of the running server")


def cards_of(facts: Facts) -> Sequence[Gpu]:
    """All cards; empty where there certainly are none."""
    problem = facts.host.gpu_problem
    return need(facts.host.gpus, "the GPUs" + (f" ({problem})" if problem else ""))


def card_of(facts: Facts) -> Gpu | None:
    """The card that the server uses; None where there certainly is no card."""
    cards_of(facts)
    return facts.card()


def served_card(facts: Facts) -> Gpu | None:
    """The same; None also where the build of the server offloads to no device."""
    card = card_of(facts)
    return None if facts.server is not None and facts.server.devices == () else card


def cache_types(settings: ProfileFile) -> tuple[str, str]:
    """Types of K and V in effect."""
    serving = settings.serving
    return serving.cache_type_k or DEFAULT_KV_TYPE, serving.cache_type_v or DEFAULT_KV_TYPE


def asks_for_mtp(server: ServerFacts) -> bool:
    """Whether the words of the command line ask for MTP, known to the build or not."""
    for word, value in itertools.pairwise((*server.argv, "")):
        flag = normal_spelling(word)
        if flag in _MTP_SWITCHES or (
            flag == "--spec-type" and value.partition(":")[0] in SPEC_WORDS[MTP]
        ):
            return True
    return False


def experts_by_hand(settings: ProfileFile) -> bool:
    """Whether the command line itself keeps weights on the CPU."""
    memory = settings.memory
    return bool(
        memory.n_cpu_moe
        or memory.cpu_moe
        or memory.n_cpu_ffn
        or any(rule.rpartition("=")[2].startswith("CPU") for rule in memory.override_tensor or ())
    )


def is_starved(facts: Facts) -> bool:
    """Whether the card is too small for the model, so that weights of it stay on the CPU.

    By what the engine placed where its log says so, else by the command line, else by the estimate.

    Raises:
        CannotTell: none of them says.
    """
    card = served_card(facts)
    if card is None:
        return False
    server = server_of(facts)
    if server.settings is not None and experts_by_hand(server.settings):
        return True
    report = server.log.report if server.log is not None else None
    placed = report.n_layers_on_gpu if report is not None else None
    if report is not None and placed is not None and placed < (report.n_layers_to_place or 0):
        return True
    if server.estimate is not None and card.total_mib is not None:
        margin = server.settings.memory.fit_mib if server.settings is not None else None
        return server.estimate.start_mib(Device.GPU) > card.total_mib - (margin or 0)
    raise CannotTell("where the weights are: neither a log of the load nor an estimate says")
