"""What is known from elsewhere: laws that were published, what the server in service logged, what other boxes tell.

All are laws by family for a sweep to begin with. The log also tells whether drafts are as often
right in a sweep as in service, and what would be best by now.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import product
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np

from tunerd.engine.log import LoggedRequest
from tunerd.profile.arm import NGRAM, OFF, REQUEST, Arm, Best, Request, Sample
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep import laws, observations
from tunerd.sweep.costs import Levels, Rows
from tunerd.words import counted

# What was asked longest ago is least like what is asked now, and a fit takes time with each.
_MOST = 500
# Of how often drafts are right in a class of texts: as of the same head on another build.
_CLASS_SPREAD = 0.3
_LEAST_DRAFTED = 1000
_AGREES = 0.05
_LARGEST_COUNT = 1 << 24  # of a request's counts [tok]
_LONGEST_MS = 86_400_000.0  # of a request
_TOLD_SHARE = 0.1
_LARGEST = 1e9  # of a coefficient that is one
# How far the drafter of one box may be from that of others: seen between them, but never less or more.
_LEAST_SPREAD, _MOST_SPREAD = 0.1, 0.3
# By how much boxes of one class differ in what an arm gains over another (log ratio): by one amount for all arms, as
# speculation pays more on one of them, and for each arm. Simulated boxes: 0.05 to 0.13 and 0.01 to 0.03
# (docs/benchmarks.md, "A shared study").
LEVEL_SD = 0.1
ARM_SD = 0.03


@dataclass(frozen=True, slots=True)
class Known:
    """The laws of one family as they are known from elsewhere; None where nobody told."""

    acceptance: laws.Acceptance | None = None
    step: laws.Array | None = None
    prompt: laws.Array | None = None

    @property
    def relative(self) -> tuple[laws.Fitted | None, laws.Fitted | None]:
        """Steps and prompts as a prior: how sure others were of them did not travel."""
        step, prompt = (
            None if one is None else laws.Fitted(one, _TOLD_SHARE * one)
            for one in (self.step, self.prompt)
        )
        return step, prompt


def published(
    table: Mapping[str, Any], engines: Mapping[str, str], cards: Sequence[str], workload: Workload
) -> dict[tuple[str, str], Known]:
    """The laws of a file of `profiles/laws`, for the engines of their builds.

    Args:
        table: What the file holds.
        engines: Families of builds by names of engines.
        cards: Names of the cards here; the time of steps is told of one alone.
        workload: Its classes; a kind of text of which nothing was published is like the mean of all.
    """
    found = {}
    for engine, law in product(engines, table["laws"]):
        if engines[engine] != law["engine"]:
            continue
        alpha = law["alpha"]
        texts = [alpha.get(one.kind, fmean(alpha.values())) for one in workload.classes]
        others = np.array([*texts, *law["others"]])
        acceptance = laws.Acceptance(others, spread=table["spread"])
        step = None
        if any(fnmatch(card.casefold(), law["card"].casefold()) for card in cards):
            base, *drafted = law["step"]
            drafted += [drafted[-1]] * (laws.POSITIONS - len(drafted))
            step = np.array([base, *drafted, *law["beside"]])
        found[engine, table["spec"]] = Known(acceptance, step)
    return found


# What was served


def samples_of(requests: Sequence[LoggedRequest], arm: Arm, workload: Workload) -> Iterator[Sample]:
    """The newest requests that were alone, as if a sweep had asked them, each for the class that it is most like."""
    classes = [at for at, one in enumerate(workload.classes) if one.concurrency == 1]
    alone = [one for one in requests if one.concurrency == 1 and _is_sound(one)]
    for at, one in enumerate(alone[-_MOST:] if classes else ()):
        text = min(classes, key=lambda text: _apart(one, workload.classes[text]))
        like, block = workload.classes[text], f"served {at}"
        yield Sample(
            event=REQUEST, process="served", arm=arm, purpose=observations.BLOCK, at_s=0.0, seconds=0.0,
            request=Request(like.kind, observations.prompt_name(block, text), like.cached_tokens, like.new_tokens,
                            like.n_predict),
            n_max=arm.n_max, p_min=arm.p_min, block=block,
            answer={"cache_n": one.cached_n, "prompt_n": one.prompt_n, "prompt_ms": one.prompt_ms,
                    "predicted_n": one.predicted_n, "predicted_ms": one.predicted_ms,
                    "draft_n": one.drafted_n, "draft_n_accepted": one.accepted_n},
        )  # fmt: skip


def _is_sound(one: LoggedRequest) -> bool:
    """Whether a server can have logged this: whoever may send requests may write lines that look like it."""
    counts = (one.prompt_n, one.predicted_n, one.drafted_n or 0, one.prompt_total_n or 0)
    return (
        one.prompt_total_n is not None
        and max(counts) < _LARGEST_COUNT
        and 0 < one.predicted_ms < _LONGEST_MS
        and 0 <= one.prompt_ms < _LONGEST_MS
        and (one.accepted_n or 0) < one.predicted_n
    )


def _apart(request: LoggedRequest, one: RequestClass) -> float:
    """In powers of two; an answer's length matters less than a prompt's, as for a workload that is learned."""
    prompt = math.log2(
        max(request.prompt_total_n or 0, 1) / max(one.cached_tokens + one.new_tokens, 1)
    )
    answer = math.log2(max(request.predicted_n, 1) / max(one.n_predict, 1))
    return 2 * abs(prompt) + abs(answer)


def known_by(
    requests: Sequence[LoggedRequest], arm: Arm, workload: Workload, before: Known | None = None
) -> Known | None:
    """The laws of what serves as its own requests tell them, for a sweep to begin with.

    They were asked other texts than a sweep asks, and all with the same settings of drafts: so of how often
    drafts are right, classes are known as well as from another build, and all else is not.

    Args:
        requests: That it answered to others.
        arm: What serves.
        workload: Whose classes they count for.
        before: What was known without them.
    """
    if arm.drafts and not any(one.drafted_n for one in requests):
        return before  # a log without drafts says nothing of them, and nothing of steps
    observed = observations.Observations(workload)
    for sample in samples_of(requests, arm, workload):
        observed.add(sample)
    processes = observed.of_family(arm.family)
    answers = [answer for process in processes for answer in process.answers]
    if not any(map(observations.is_timed, answers)):
        return before
    before, n_texts = before or Known(), len(workload.classes)
    acceptance = before.acceptance
    if counts := observations.pool(answers):
        spread = np.inf if acceptance is None else acceptance.spread
        known = np.broadcast_to(spread, laws.n_parameters(n_texts)).copy()
        known[[one.text for one in counts]] = _CLASS_SPREAD
        is_lookup = arm.spec == NGRAM
        fitted = laws.fit_acceptance(counts, n_texts, is_lookup=is_lookup, relative=acceptance)
        acceptance = replace(fitted, spread=known)
    costs = Rows(processes, acceptance).fit(workload, Levels(()), [before.relative])
    if costs is None:
        return Known(acceptance, before.step, before.prompt)
    return Known(acceptance, costs.shared.step, costs.shared.prompt)


def compare_drafts(
    samples: Iterable[Sample], requests: Sequence[LoggedRequest], arm: Arm, workload: Workload
) -> dict[str, Any] | None:
    """Whether drafts of what serves were as often right in the sweep as for its people; None where that is unknown."""
    told = [one for one in requests if one.drafted_n and one.accepted_n is not None]
    drafted = sum(one.drafted_n or 0 for one in told)
    here = observations.acceptance_of(samples, arm, workload)
    if here is None or drafted < _LEAST_DRAFTED:
        return None
    there = sum(one.accepted_n or 0 for one in told) / drafted
    agrees = abs(here - there) <= _AGREES
    means = (
        "in this the workload's texts are like theirs"
        if agrees
        else "their texts, or their sampling, differ from the workload's"
    )
    text = (
        f"{here:.0%} of the drafts of what serves were accepted in the sweep, and {there:.0%} in service "
        f"({counted(len(told), 'request')} since it was deployed): {means}"
    )
    return {"sweep": round(here, 4), "production": round(there, 4), "agrees": agrees,
            "requests": len(told), "text": text}  # fmt: skip


# What is best by now


def best_now(
    requests: Sequence[LoggedRequest], models: Mapping[str, Any], arm: Arm,
    families: Iterable[Mapping[str, Any]], workload: Workload, then: float | None = None,
) -> Best | None:  # fmt: skip
    """What is predicted to be best for what is asked now; None where too little was drafted, or no law is known.

    Speculation with the settings that a sweep tries, and none; whatever else would be faster, this does not tell.

    Args:
        requests: That production answered to others.
        models: The laws of a sweep, as it stored them.
        arm: What serves.
        families: What that sweep tried, as it stored it.
        workload: What it measured.
        then: The gain when it ended (ratio); None to take what its laws alone say.
    """
    drafted = sum(one.drafted_n or 0 for one in requests)
    n_texts, (engine, spec) = len(workload.classes), arm.family
    swept, off = (_stored(models.get(f"{engine}, {one}"), one, n_texts) for one in (spec, OFF))
    if swept is None or drafted < _LEAST_DRAFTED:
        return None
    own = [one for one in families if (one["engine"], one["speculation"]) == arm.family]
    drafts = [(n, p) for one in own for n in one["n_max"] for p in one["p_min"]]
    arms = [arm, *(arm.with_draft(*one) for one in drafts)]
    now = _fastest(known_by(requests, arm, workload, swept) or swept, swept, off, arms, workload)
    before = _fastest(swept, swept, off, arms, workload)[1] if then is None else then
    return Best(str(arm), now[0], now[1], before, len(requests))


def _stored(data: Mapping[str, Any] | None, spec: str, n_texts: int) -> Known | None:
    """The laws of one family as they were stored; None where they are not of so many classes, or not all known."""
    costs, drafter = ((data or {}).get(name) or {} for name in ("costs", "acceptance"))
    told = (costs.get("step_ms"), costs.get("prompt_ms"), drafter.get("parameters"))
    step, prompt, parameters = (tuple(one or ()) for one in told)
    law = Law(step, prompt, parameters, spec == NGRAM)
    return law.known() if law.is_sound(n_texts) else None  # of another version: with other terms


def _fastest(
    known: Known, swept: Known, off: Known | None, arms: Sequence[Arm], workload: Workload
) -> tuple[str, float]:
    """The arm that is predicted to be fastest, and its gain over the first of them (ratio).

    Without speculation nothing was served: it is held against what the sweep saw of both.
    """
    turns = _log_turns(known.acceptance, known, arms, workload)
    gains = dict(zip(map(str, arms), (turns[0] - turns).tolist(), strict=True))
    if off is not None:
        plain = replace(arms[0], spec=OFF)
        here = _log_turns(known.acceptance, swept, arms[:1], workload)
        gains[str(plain)] = float(here[0] - _log_turns(None, off, [plain], workload)[0])
    best = max(gains, key=lambda one: gains[one])
    return best, math.expm1(gains[best])


def _log_turns(
    acceptance: laws.Acceptance | None, of: Known, arms: Sequence[Arm], workload: Workload
) -> laws.Array:
    if of.step is None or of.prompt is None:
        return np.zeros(len(arms))
    one = np.ones(len(workload.classes))
    costs = laws.Costs(of.step, of.prompt, one, one, 0.0 * one)
    return laws.predict(arms, workload, acceptance, costs, np.zeros((len(arms), 2))).log_turn


# What boxes of one class tell each other: laws, arms with their gain over a control, and who tries what


@dataclass(frozen=True, slots=True)
class Law:
    """The laws of one family on one box, as they travel: coefficients of steps and prompts [ms], and the drafter's."""

    step: tuple[float, ...]
    prompt: tuple[float, ...]
    acceptance: tuple[float, ...] = ()
    is_lookup: bool = False

    def known(self, spread: float = _MOST_SPREAD) -> Known:
        """As a sweep begins with it; the drafter may be so far off."""
        drafter = laws.Acceptance(np.array(self.acceptance), self.is_lookup, spread)
        step, prompt = np.array(self.step), np.array(self.prompt)
        return Known(drafter if self.acceptance else None, step, prompt)

    def is_sound(self, n_texts: int) -> bool:
        """Whether these can be laws for so many classes of text."""
        lengths = (len(self.step), len(self.prompt)) == (laws.N_STEP_TERMS, laws.N_PROMPT_TERMS)
        values = np.array([*self.step, *self.prompt, *self.acceptance])
        return (
            lengths
            and len(self.acceptance) in {0, laws.n_parameters(n_texts)}
            and bool(np.isfinite(values).all() and (np.abs(values) < _LARGEST).all())
            and min(*self.step, *self.prompt) >= 0.0
        )


def known_of(
    told: Iterable[tuple[tuple[str, str], Law]], n_texts: int
) -> dict[tuple[str, str], Known]:
    """What the laws of several boxes say together: their mean, and their spread."""
    of_family: dict[tuple[str, str], list[Law]] = defaultdict(list)
    for family, law in told:
        if law.is_sound(n_texts):
            of_family[family].append(law)
    return {family: _together(found) for family, found in of_family.items()}


def _together(found: Sequence[Law]) -> Known:
    drafters = [law.acceptance for law in found if law.acceptance]
    step, prompt, drafter = (
        tuple(np.mean(told, axis=0)) if told else ()
        for told in ([law.step for law in found], [law.prompt for law in found], drafters)
    )
    mean = Law(step, prompt, drafter, any(law.is_lookup for law in found))
    spread = np.std(drafters, axis=0).max() if drafters else 0.0
    return mean.known(float(np.clip(spread, _LEAST_SPREAD, _MOST_SPREAD)))


def law_of(acceptance: laws.Acceptance | None, costs: laws.Costs) -> Law:
    """What a box tells of a family."""
    step, prompt = tuple(map(float, costs.step)), tuple(map(float, costs.prompt))
    if acceptance is None:
        return Law(step, prompt)
    return Law(step, prompt, tuple(map(float, acceptance.parameters)), acceptance.is_lookup)


@dataclass(frozen=True, slots=True)
class Told:
    """One process of another box: log of its turn time over that of the arm which served there."""

    arm: Arm
    control: Arm
    log_ratio: float
    box: str = ""


class Study:
    """Where boxes of a class meet; as it is, a box that has nobody to ask.

    Whatever fails there is no reason to end a night: it says nothing then.
    """

    seeds: Sequence[Arm] = ()
    """What won on other boxes."""

    def __init__(self, known: Mapping[tuple[str, str], Known] = MappingProxyType({})) -> None:
        self.known = known
        """Laws by family, from before this night."""

    def news(self) -> Sequence[Told]:
        """What others told since it was asked last."""
        return ()

    def claim(self, arm: Arm) -> bool:
        """Whether this box may try an arm; not while another does."""
        del arm
        return True

    def tell(self, told: Told) -> None:
        """One process of this box."""

    def end(self, laws: Mapping[tuple[str, str], Law], winner: Arm | None) -> None:
        """What this box has learned when its night ends, and what it proved."""
