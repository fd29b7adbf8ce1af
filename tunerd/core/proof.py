"""What trial runs on a designed model show of a build; a flag in a help text is no proof of effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tunerd.core.engine import Effect, Proof


@dataclass(frozen=True, slots=True)
class Trial:
    """One generation of a trial server.

    `n_drafted` is None where the reply does not count drafts; `problem` says why there is no
    answer at all.
    """

    text: str | None
    n_drafted: int | None
    n_accepted: int | None
    problem: str | None


# What each trial is for; the keys name the settings that it ran with.
PLAIN = "n_max 3, p_min 0"
GATED = "n_max 3, p_min 0.75"
SHALLOW = "n_max 1, p_min 0"
NATIVE = "native route"
OVERRIDDEN = "n_max 1 by request"
GATED_BY_REQUEST = "p_min 0.75 by request"
OFF = "off"


def judge_trials(trials: Mapping[str, Trial], expected_text: str) -> tuple[Proof, ...]:
    """The proofs that a set of trials gives; a feature whose trial is missing stays untried."""
    proofs = []
    base = trials.get(PLAIN) or trials.get(OFF)
    if base is not None:
        proofs.append(_text(base, expected_text))
    if PLAIN in trials:
        proofs.append(_mtp(trials[PLAIN]))
    if _drafts(trials, PLAIN):
        proofs += [
            _differs("p-min", trials, GATED, "0.75 instead of 0"),
            _differs("n-max", trials, SHALLOW, "1 instead of 3"),
        ]
        if OVERRIDDEN in trials:
            proofs.append(_differs("per-request", trials, OVERRIDDEN, "n-max 1 with the request"))
        if GATED_BY_REQUEST in trials:
            change = "p-min 0.75 with the request"
            proofs.append(_differs("per-request p-min", trials, GATED_BY_REQUEST, change))
        if NATIVE in trials:
            proofs.append(_counts(trials[NATIVE]))
    return tuple(proofs)


def _text(trial: Trial, expected: str) -> Proof:
    if trial.problem is not None:
        return Proof("text", Effect.FAILED, trial.problem)
    written = (trial.text or "").rstrip()
    # ik with MTP may leave out the last one or two tokens that it counts.
    if len(written) * 2 < len(expected):
        return Proof(
            "text", Effect.FAILED, f"it writes {len(written)} characters of {len(expected)}"
        )
    if not expected.startswith(written[: len(expected)]):
        return Proof("text", Effect.FAILED, "it writes something else than the model's known text")
    return Proof("text", Effect.PROVED, f"{len(written)} characters as the model must write them")


def _mtp(trial: Trial) -> Proof:
    if trial.problem is not None:
        return Proof("mtp", Effect.FAILED, f"it does not serve a model with MTP: {trial.problem}")
    if not trial.n_drafted:
        return Proof("mtp", Effect.NO_EFFECT, "it drafted nothing")
    return Proof(
        "mtp", Effect.PROVED, f"{trial.n_drafted} drafted, {trial.n_accepted} accepted at {PLAIN}"
    )


def _differs(feature: str, trials: Mapping[str, Trial], name: str, change: str) -> Proof:
    before, after = trials[PLAIN], trials.get(name)
    if after is None or after.problem is not None:
        why = after.problem if after is not None else "not tried"
        return Proof(feature, Effect.FAILED if after is not None else Effect.UNTRIED, why or "")
    counts = f"{before.n_drafted} drafted, with {change} {after.n_drafted or 0}"
    effect = Effect.PROVED if after.n_drafted != before.n_drafted else Effect.NO_EFFECT
    return Proof(feature, effect, counts)


def _counts(trial: Trial) -> Proof:
    if trial.n_drafted:
        return Proof("counts", Effect.PROVED, "the native route counts drafts")
    return Proof("counts", Effect.NO_EFFECT, "only the OpenAI routes count drafts")


def _drafts(trials: Mapping[str, Trial], name: str) -> bool:
    return name in trials and bool(trials[name].n_drafted)
