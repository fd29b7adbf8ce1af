"""Whole turns of the workload from the answers of a process, with the luck of the prompts taken out.

How much of a draft is accepted differs from prompt to prompt far more than from one arm to its
neighbour. What an arm accepts on a class of text is known better from all of its prompts together with
the model of its drafter than from the few of one process, so decoding is taken at that rate:

    decode' = decode (1 + A) / (1 + A') t(D') / t(D),     A' = (n mean A + k model A) / (n + k)

for A accepted and D drafted tokens in a step of duration t, n prompts seen, and k prompts' worth of
trust in the model. With many prompts nothing but measurement is left. Verdicts take turns as they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tunerd.core.sweep import observations
from tunerd.core.sweep.acceptance import Acceptance
from tunerd.core.sweep.arm import Arm
from tunerd.core.sweep.observations import Answer, Process
from tunerd.core.sweep.posterior import Observed
from tunerd.core.sweep.rows import prompt_row, step_row, terms_of_prompt, terms_of_step
from tunerd.core.sweep.turn import Costs, Prediction
from tunerd.core.workload import Workload

Array = NDArray[np.float64]

# Prompts of one class differ by some 5 % in what they let a step accept, the model is off by 2 %.
_TRUST = 6.0
_MOST_LUCK = 1.4

_Kind = tuple[tuple[str, str], int, float, int]


class Laws(Protocol):
    """What is known of the families."""

    @property
    def workload(self) -> Workload:
        """What is asked."""
        ...

    def prediction_of(self, arm: Arm) -> Prediction | None:
        """Of one arm by class; None where nothing is known."""
        ...

    def costs_of(self, arm: Arm) -> Costs | None:
        """Laws of step and prompt; None where nothing is known."""
        ...

    def acceptance_of(self, family: tuple[str, str]) -> Acceptance | None:
        """The drafter; None where nothing is drafted or known."""
        ...


def observe(processes: Iterable[Process], laws: Laws) -> list[Observed]:
    """Every whole block of every process that did not spill."""
    sound = [process for process in processes if not process.has_spilled]
    luck, prefills = _Luck(sound, laws), dict[Arm, Array | None]()
    found = []
    for process in sound:
        for (arm, block), answers in observations.blocks_of(process).items():
            times = _times(process, answers, laws, prefills)
            if times is None:
                continue
            measured = laws.workload.turn_time_s(times)
            fair = laws.workload.turn_time_s(
                [time + luck.correction_ms(answers[text]) for text, time in enumerate(times)]
            )
            found.append(Observed(arm, process.name, block, math.log(fair), math.log(measured)))
    return found


def _times(
    process: Process, answers: dict[int, Answer], laws: Laws, prefills: dict[Arm, Array | None]
) -> list[float] | None:
    """Turn time of each class [ms]; None if a class is missing."""
    times = []
    for text, one in enumerate(laws.workload.classes):
        answer = answers.get(text)
        if answer is None or answer.reading.turn_ms is None:
            return None
        if observations.is_exact(answer.request, one):
            times.append(answer.reading.turn_ms)
            continue
        ratio = _prompt_ratio(process, answer, laws)
        if answer.arm not in prefills:
            prediction = laws.prediction_of(answer.arm)
            prefills[answer.arm] = None if prediction is None else prediction.prefill_ms[:, 0]
        expected = prefills[answer.arm]
        if ratio is None or expected is None or answer.reading.predicted_ms is None:
            return None
        times.append(float(expected[text]) * ratio + answer.reading.predicted_ms)
    return times


def _prompt_ratio(process: Process, answer: Answer, laws: Laws) -> float | None:
    """What this process took for its long prompts against what the law says of them.

    For a class whose prompt was cached to measure its decoding alone.
    """
    costs = laws.costs_of(answer.arm)
    if costs is None or costs.prompt is None:
        return None
    ratios = [
        (other.reading.prompt_ms or 0.0) / float(terms_of_prompt(prompt_row(other)) @ costs.prompt)
        for other in process.answers
        if other.purpose == observations.PREFIX and observations.is_prompt_timed(other)
    ]
    return float(np.mean(ratios)) if ratios else None


class _Luck:
    """What each kind of draft usually accepts, and what an answer's own luck was worth."""

    def __init__(self, processes: Iterable[Process], laws: Laws) -> None:
        self._laws = laws
        self._seen: dict[_Kind, Array] = defaultdict(lambda: np.zeros(4))
        for process in processes:
            for answer in process.answers:
                if _is_usable(answer):
                    reading = answer.reading
                    self._seen[_kind(answer)] += (
                        1, reading.n_steps or 0, reading.n_drafted, reading.n_accepted
                    )  # fmt: skip

    def correction_ms(self, answer: Answer) -> float:
        """To be added to the time of an answer."""
        acceptance = self._laws.acceptance_of(answer.arm.family)
        costs = self._laws.costs_of(answer.arm)
        if acceptance is None or costs is None or costs.step is None or not _is_usable(answer):
            return 0.0
        reading, kind = answer.reading, _kind(answer)
        n_prompts, steps, drafted, accepted = self._seen[kind]
        n_max, text = kind[1], kind[3]
        by_text = acceptance.drafts(n_max, kind[2]).per_step(n_max)
        weight = n_prompts / (n_prompts + _TRUST)
        usual_drafted = weight * drafted / steps + (1 - weight) * float(by_text[0][text])
        usual_accepted = weight * accepted / steps + (1 - weight) * float(by_text[1][text])
        row = step_row(answer, acceptance)
        scale = usual_drafted / max(row.drafted, 1e-6)
        usual_row = replace(
            row, drafted=usual_drafted, beyond=(row.beyond[0] * scale, row.beyond[1] * scale)
        )
        own = float(terms_of_step(row) @ costs.step)
        usual = float(terms_of_step(usual_row) @ costs.step)
        rate = reading.n_accepted / (reading.n_steps or 1)
        factor = (1 + rate) / (1 + usual_accepted) * usual / max(own, 1e-9)
        factor = min(max(factor, 1 / _MOST_LUCK), _MOST_LUCK)
        return float((factor - 1.0) * (reading.predicted_ms or 0.0))


def _is_usable(answer: Answer) -> bool:
    return (
        answer.text is not None
        and answer.arm.drafts
        and answer.arm.n_max > 0
        and observations.is_timed(answer)
    )


def _kind(answer: Answer) -> _Kind:
    return answer.arm.family, answer.arm.n_max, answer.arm.p_min, answer.text or 0
