"""What trial runs show of a build; a flag in a help text is no proof of effect."""

from __future__ import annotations

from pathlib import Path

from tunerd.engine.capabilities import Effect, EngineIdentity, Proof
from tunerd.engine.health import Completion
from tunerd.engine.probe import read_proofs, remember_proofs
from tunerd.engine.prove import (
    GATED,
    GATED_BY_REQUEST,
    NATIVE,
    OFF,
    OVERRIDDEN,
    PLAIN,
    SHALLOW,
    judge_trials,
)
from tunerd.machine.files import Files

BUILD = EngineIdentity("a" * 64, ())
PROOFS = (Proof("mtp", Effect.PROVED, "seen"),)


def test_proofs_are_those_of_the_very_build(tmp_path: Path) -> None:
    remember_proofs(tmp_path / "cache", Files(), BUILD, PROOFS)
    assert read_proofs(tmp_path / "cache", Files(), BUILD) == PROOFS
    other = EngineIdentity("b" * 64, ())
    assert read_proofs(tmp_path / "cache", Files(), other) == ()


TEXT = "one two three four five six seven eight nine ten"


def trial(
    drafted: int | None = 12, *, text: str | None = TEXT, problem: str | None = None
) -> Completion:
    accepted = None if drafted is None else drafted // 2
    return Completion(text, 65, drafted, problem, n_accepted=accepted)


def effects(trials: dict[str, Completion]) -> dict[str, Effect]:
    return {proof.feature: proof.effect for proof in judge_trials(trials, TEXT)}


ALL = {PLAIN: trial(12), GATED: trial(9), SHALLOW: trial(7), NATIVE: trial(12), OVERRIDDEN: trial(7),
       GATED_BY_REQUEST: trial(9)}  # fmt: skip


def test_a_build_that_does_what_it_says_is_proved() -> None:
    features = ("text", "mtp", "p-min", "n-max", "per-request", "per-request p-min", "counts")
    assert effects(ALL) == dict.fromkeys(features, Effect.PROVED)


def test_what_is_parsed_and_ignored_has_no_effect_and_says_nothing_of_the_rest() -> None:
    proved = effects(ALL)
    # As p-min for MTP in the merge of May 2026: the same counts at 0.0 and 0.75.
    for ignored, feature in ((GATED_BY_REQUEST, "per-request p-min"), (GATED, "p-min")):
        assert effects({**ALL, ignored: trial(12)}) == proved | {feature: Effect.NO_EFFECT}
    assert effects({**ALL, NATIVE: trial(None)})["counts"] == Effect.NO_EFFECT


def test_a_build_that_does_not_draft_says_nothing_of_how_it_would() -> None:
    silent = {"text": Effect.PROVED, "mtp": Effect.NO_EFFECT}
    assert effects({**ALL, PLAIN: trial(0)}) == silent
    failed = effects({PLAIN: trial(None, text=None, problem="status 500")})
    assert failed == {"text": Effect.FAILED, "mtp": Effect.FAILED}


def test_the_text_must_be_the_one_that_the_model_must_write() -> None:
    # ik with MTP leaves out its last tokens.
    for text in (TEXT, TEXT + " and more", TEXT[:-4], TEXT + " \n"):
        assert effects({OFF: trial(None, text=text)}) == {"text": Effect.PROVED}
    for wrong in ("", None, TEXT[:10], TEXT.replace("seven", "siebn"), " " + TEXT):
        assert effects({OFF: trial(None, text=wrong)}) == {"text": Effect.FAILED}
