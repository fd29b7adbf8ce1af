"""What a hand-written unit loses when tunerd's own text takes its place: every line that is not taken over."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from tunerd.core.flags import SECRET_FLAGS, is_secret_variable, normal_spelling, owner_of
from tunerd.core.importer_environment import PREFIX, TRUE
from tunerd.core.live import LiveUnit
from tunerd.core.unit_environment import environment_of
from tunerd.core.unit_file import Directive, UnitFile, parse_unit

# Said by tunerd in its own words, shown flag by flag elsewhere, or looked at variable by variable.
_ELSEWHERE = frozenset(
    {
        ("Unit", "Description"),
        ("Unit", "Documentation"),
        ("Service", "ExecStart"),
        ("Service", "Environment"),
        ("Service", "EnvironmentFile"),
    }
)
# Values that mean what tunerd's own text says otherwise; of a list each word counts by itself.
_SAME_MEANING: Mapping[tuple[str, str], frozenset[str]] = {
    ("Unit", "After"): frozenset({"network.target", "network-online.target"}),
    ("Unit", "Wants"): frozenset({"network.target", "network-online.target"}),
    ("Service", "Type"): frozenset({"simple", "exec"}),
    ("Install", "WantedBy"): frozenset({"multi-user.target", "default.target"}),
}
# Where the server finds its home and its downloads, which tunerd's own text says too.
_OWN_VARIABLES = frozenset({"HOME", "LLAMA_CACHE"})
# Variables whose flag has another name.
_FLAGS = {
    "N_PARALLEL": "--parallel",
    "BATCH": "--batch-size",
    "UBATCH": "--ubatch-size",
    "MODEL_ALIAS": "--alias",
}
_YES = frozenset({"yes", "true", "on", "1"})
_NO = frozenset({"no", "false", "off", "0"})
_SECRET_ARGUMENT = re.compile(
    rf"({'|'.join(sorted(map(re.escape, SECRET_FLAGS), reverse=True))})([=\s]+)\S+"
)
_ASSIGNMENT = re.compile(r"\b([A-Za-z_][A-Za-z0-9_]*)=\S+")


def lost_lines(live: LiveUnit, planned: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Lines of a hand-written unit that would no longer hold, as `Name=value`; secrets are masked.

    Drop-ins stay in force, so only the unit file itself counts. Nothing is lost of a unit of ours.

    Args:
        live: The unit that stands.
        planned: The text that takes its place; empty where it is not known.
        argv: The command line of that text.
    """
    if live.text is None or live.is_ours:
        return ()
    old, new = parse_unit(live.text), parse_unit(planned)
    found = [*_directives(old, new), *_variables(live, new, argv), *_files(live, new, argv)]
    return tuple(dict.fromkeys(found))


def _directives(old: UnitFile, new: UnitFile) -> Iterator[str]:
    kept = {(d.section, d.name, _normal(d.value)) for d in new.directives}
    for directive in old.directives:
        place = (directive.section, directive.name)
        if place in _ELSEWHERE or (*place, _normal(directive.value)) in kept:
            continue
        same = _SAME_MEANING.get(place)
        if same is None:
            yield f"{directive.name}={_masked(directive)}"
            continue
        rest = [word for word in directive.value.split() if word not in same]
        if rest:
            yield f"{directive.name}={' '.join(rest)}"


def _normal(value: str) -> str:
    """A value as systemd understands it: words for yes and no, seconds with or without their unit."""
    lowered = value.lower()
    if lowered in _YES | _NO:
        return "yes" if lowered in _YES else "no"
    return re.sub(r"^(\d+)\s*s(ec)?$", r"\1", value)


def _masked(directive: Directive) -> str:
    """The value of a line without what nobody may see."""
    if directive.name.startswith("SetCredential"):
        return f"{directive.value.partition(':')[0]}:..."
    value = _SECRET_ARGUMENT.sub(r"\1\2...", directive.value)
    return _ASSIGNMENT.sub(
        lambda one: f"{one[1]}=..." if is_secret_variable(one[1]) else one[0], value
    )


def _variables(live: LiveUnit, new: UnitFile, argv: Sequence[str]) -> Iterator[str]:
    for name, value in live.own_environment.items():
        is_overridden = bool(live.own_environment_files) and name in live.file_environment
        if not is_overridden and not _is_taken(name, value, new, argv):
            yield f"Environment={name}={'...' if is_secret_variable(name) else value}"


def _files(live: LiveUnit, new: UnitFile, argv: Sequence[str]) -> Iterator[str]:
    """Environment files, with the names of variables that are not taken over."""
    variables = live.file_environment
    lost = [name for name, value in variables.items() if not _is_taken(name, value, new, argv)]
    if variables and not lost:
        return
    for path in live.own_environment_files:
        sets = f" (with {', '.join(lost)})" if lost else ""
        yield f"EnvironmentFile={path}{sets}"


def _is_taken(name: str, value: str, new: UnitFile, argv: Sequence[str]) -> bool:
    """Whether the new unit has the variable, or its command line the option that it stands for."""
    if name in _OWN_VARIABLES or (name, value) in environment_of(new, {"%": "%"}).pairs:
        return True
    if not name.startswith(PREFIX):
        return False
    short = name.removeprefix(PREFIX)
    flag = _FLAGS.get(short, "--" + short.lower().replace("_", "-"))
    for word, after in itertools.pairwise([*argv, ""]):
        spelled = normal_spelling(word)
        is_same = spelled == flag or (owner_of(flag) or flag) == owner_of(word)
        is_on = value.lower() in TRUE and spelled.startswith("--no-") == flag.startswith("--no-")
        if word.startswith("-") and is_same and (after == value or is_on):
            return True
    return False
