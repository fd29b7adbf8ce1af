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
        if flags is not None and flag not in flags:
            raise ArgumentError(
                f"error: {'unknown' if self.behaviour.is_ik else 'invalid'} argument: {flag}"
            )
        follows = bool(rest) and re.match(r"-{1,2}[A-Za-z]", rest[0]) is None
        told = (flags or {}).get(flag)
        takes_value = follows if told is None else told
        if takes_value and not rest:
            lacks = f'error while handling argument "{flag}": expected value for argument'
            is_ik = self.behaviour.is_ik
            raise ArgumentError(
                f"error: invalid parameter for argument: {flag}" if is_ik else lacks
            )
        value = rest.pop(0) if takes_value else "on"
        name = SPELLINGS.get(flag, flag.lstrip("-"))
        before = self.facts.get(name)
        self.facts[name] = f"{before},{value}" if before and name == "spec_type" else value

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
