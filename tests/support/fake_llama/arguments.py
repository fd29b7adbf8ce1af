"""The command line that arrived, checked against what the build's `--help` lists."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

from tests.support.fake_llama.behaviour import Behaviour

# Facts by the flags that set them. Whatever else is on the line is a fact by its own name.
_FLAGS = {
    "model": ("-m", "--model"),
    "alias": ("-a", "--alias"),
    "n_ctx": ("-c", "--ctx-size"),
    "n_slots": ("-np", "--parallel"),
    "n_ubatch": ("-ub", "--ubatch-size"),
    "n_predict": ("-n", "--predict", "--n-predict"),
    "verbosity": ("-lv", "--verbosity", "--log-verbosity"),
    "spec_type": ("--spec-type",),
    "n_max": ("--spec-draft-n-max", "--draft-max", "--draft", "--draft-n"),
    "p_min": ("--spec-draft-p-min", "--draft-p-min"),
    "api_key": ("--api-key",),
    "api_key_file": ("--api-key-file",),
    "no_slots": ("--no-slots",),
    "sleep_s": ("--sleep-idle-seconds",),
}
SPELLINGS = {spelling: fact for fact, spellings in _FLAGS.items() for spelling in spellings}
# Parsed by ik although the help of a CPU build leaves them out.
IK_HIDDEN = {
    "-ngl",
    "--gpu-layers",
    "--n-gpu-layers",
    "-sm",
    "-ts",
    "-dev",
    "-mg",
    "-op",
    "-a",
    "--alias",
}
IK_LEGACY = {"-mtp", "--multi-token-prediction", "--draft", "--draft-n", "--draft-max", "--draft-min",
             "--draft-n-min", "--draft-p-min", "--spec-stage"}  # fmt: skip


class ArgumentError(Exception):
    """The command line is refused; the text is the engine's own."""


class Arguments:
    """The command line that arrived, as facts; `facts` maps our names and raw flags to text."""

    def __init__(self, argv: list[str], behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.facts: dict[str, str] = {}
        rest = list(argv)
        while rest:
            self._take(rest.pop(0), rest)
        self._take_speculation()

    def _take(self, flag: str, rest: list[str]) -> None:
        flags = self.behaviour.flags
        known = flags.get(flag, {}) if flags is not None else {}
        if flags is not None and not known:
            known = self._unlisted(flag)
        if known.get("removal"):
            raise ArgumentError(f'error while handling argument "{flag}": {known["removal"]}')
        follows = bool(rest) and re.match(r"-{1,2}[A-Za-z]", rest[0]) is None
        told = known.get("takes_value")
        takes_value = follows if told is None else told
        if takes_value and not rest:
            raise ArgumentError(self._words("missing", flag))
        value = rest.pop(0) if takes_value else "on"
        if known.get("choices"):
            self._check_choice(flag, value, known["choices"])
        name = SPELLINGS.get(flag, flag.lstrip("-"))
        before = self.facts.get(name)
        self.facts[name] = f"{before},{value}" if before and name == "spec_type" else value

    def _unlisted(self, flag: str) -> dict[str, Any]:
        if self.behaviour.is_ik and flag in IK_HIDDEN:
            return {"takes_value": True}
        if self.behaviour.is_ik and flag in IK_LEGACY:
            raise ArgumentError(
                f"legacy speculative option '{flag}' is disabled; use the value inside the "
                "relevant repeated --spec-type entry, e.g. --spec-type mtp:n_max=3,p_min=0.0"
            )
        raise ArgumentError(self._words("unknown", flag))

    def _words(self, problem: str, flag: str) -> str:
        if self.behaviour.is_ik:
            word = "unknown argument" if problem == "unknown" else "invalid parameter for argument"
            return f"error: {word}: {flag}"
        if problem == "unknown":
            return f"error: invalid argument: {flag}"
        return f'error while handling argument "{flag}": expected value for argument'

    def _check_choice(self, flag: str, value: str, choices: list[str]) -> None:
        for part in value.split(","):
            if part not in choices:
                raise ArgumentError(
                    f'error while handling argument "{flag}": unknown speculative type: {part}'
                )

    def _take_speculation(self) -> None:
        """Bring ik's `mtp:n_max=3,p_min=0.5` into the common facts."""
        spec = self.facts.get("spec_type", "none")
        if self.behaviour.is_ik and ":" in spec:
            spec, _, keys = spec.partition(":")
            for pair in keys.split(","):
                key, _, value = pair.partition("=")
                self.facts[key] = value
        self.facts["speculative"] = "off" if spec == "none" else "on"
        self.facts["spec_type"] = spec

    def number(self, name: str, default: float) -> float:
        try:
            return float(self.facts[name])
        except (KeyError, ValueError):
            return default

    def whole(self, name: str, default: int) -> int:
        return int(self.number(name, default))

    def holds(self, when: dict[str, Any]) -> bool:
        """Whether the facts are as a rule wants them; numbers compare as numbers."""
        for name, wanted in when.items():
            found = self.facts.get(name)
            try:
                same = found is not None and float(found) == float(wanted)
            except (TypeError, ValueError):
                same = found == wanted
            if not same:
                return False
        return True


def apply_rules(behaviour: Behaviour, arguments: Arguments) -> None:
    """Set what the rules say for this command line."""
    known = {item.name for item in dataclasses.fields(Behaviour)}
    for rule in behaviour.rules:
        unknown = set(rule["set"]) - known
        if unknown:
            sys.exit(f"stand-in: unknown fields in a rule: {sorted(unknown)}")
        if arguments.holds(rule["when"]):
            for name, value in rule["set"].items():
                setattr(behaviour, name, value)
