"""Whether a unit's text may become live where root is not at the keyboard: for a job, guard or probation.

Whoever may change a program that root has once put into a unit would else have it run as that unit's
account, root in most units that people wrote, by asking for a rollback.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunerd.app import Context
from tunerd.engine.probe import libraries_of, shebang, writable_by_others
from tunerd.engine.serving import file_environment_of, specifiers_of, standing_text, unit_with
from tunerd.errors import ConfigError, DeployError
from tunerd.machine.files import is_gone
from tunerd.machine.process import account
from tunerd.units.live import is_shell
from tunerd.units.text import TRUE, UnitFile, environment_of, expand_specifiers, parse_exec
from tunerd.words import Mode

if TYPE_CHECKING:
    from tunerd.production.plan import Plan


_ROOT = frozenset({"", "root", "0"})
# What gives a service more than its account has.
_PRIVILEGES = frozenset({"Group", "SupplementaryGroups", "AmbientCapabilities", "PAMName"})
# What the service manager opens for it as root, through links too (systemd.exec(5)).
_OPENED = re.compile(
    r"(OpenFile|LoadCredential\w*)=.*|Standard(Input|Output|Error)=(file|append|truncate):.*"
)
# Paths behind these are read as data, or only shown.
_DATA_FLAGS = frozenset({"-m", "--model", "-md", "--model-draft", "--spec-draft-model", "-mm", "--mmproj",
                         "--api-key-file", "--chat-template-file"})  # fmt: skip
_DATA_VARIABLES = re.compile(r"LLAMA_ARG_(MODEL|MMPROJ|.*_MODEL)|LLAMA_API_KEY.*")
_DATA_DIRECTIVES = re.compile(
    r"LoadCredential|SetCredential|(?!(Working|Root)D).*Directory|(ReadOnly|ReadWrite|Inaccessible)Paths|DeviceAllow"
    r"|Environment"  # which is looked at variable by variable
)
_DEVICE = re.compile("/dev/(?!shm/)")  # what is in memory there is anybody's
_TEMPORARY = re.compile(r"/(var/)?tmp(/(?!.*\.\.).*)?")
_PATH = re.compile(r"(?<![^\s\"'=:,;@!+-])/(?!/)[^\s\"',;:]*")


@dataclass(frozen=True, slots=True)
class Named:
    """What a unit's text would run, and as whom.

    `account` is None for root, or where that cannot be told. `programs` and `paths` are what must not
    be changed by others, `opened` what its account must not change either; `privileges` is what it has
    beside its account.
    """

    account: str | None
    privileges: frozenset[tuple[str, str]]
    programs: tuple[str, ...]
    paths: tuple[str, ...]
    opened: tuple[str, ...]

    def is_no_more_than(self, present: Named) -> bool:
        """Whether whoever controls this one gains nothing that the present one does not give."""
        if self.account is None:
            return False
        if (
            present.account is None
        ):  # an account by itself is less than root; with privileges it may be root
            return self.privileges <= {("Group", self.account)}
        return self.account == present.account and self.privileges <= present.privileges


def named_by(
    unit: UnitFile, file_environment: Mapping[str, str], specifiers: Mapping[str, str]
) -> Named:
    """What a unit names, its drop-ins merged into it.

    Raises:
        ConfigError: one of its lines cannot be read.
    """
    environment = {**environment_of(unit, specifiers), **file_environment}
    service = [one for one in unit.directives if one.section == "Service"]
    names = dict.fromkeys(one.name for one in service)
    kept = [one for name in names for one in unit.values("Service", name)]
    run = [one for one in kept if one.name.startswith("Exec") and one.name != "ExecSearchPath"]
    commands = [parse_exec(one.value, environment, specifiers) for one in run]
    words = [_checked(command.argv[1:]) for command in commands]
    variables = [text for name, text in environment.items() if not _DATA_VARIABLES.fullmatch(name)]
    others = [one for one in kept if one not in run and not _DATA_DIRECTIVES.fullmatch(one.name)]
    told = (expand_specifiers(one.value, specifiers) for one in others)
    texts = [*itertools.chain(*words), *variables, *told]
    opened = [one for one in kept if _OPENED.fullmatch(f"{one.name}={one.value}")]
    given = [*opened, *(one for one in kept if one.name in _PRIVILEGES)]
    # Its temporary folders are its own then (systemd.exec(5)), and nobody else can put anything there.
    has_own = any(
        (unit.value("Service", name) or "").lower() in {*TRUE, "disconnected"}
        for name in ("PrivateTmp", "DynamicUser")
    )
    found = dict.fromkeys(path for text in texts for path in _paths(text))
    is_privileged = any(set(command.prefixes) & {"+", "!"} for command in commands)
    return Named(
        account=None if is_privileged else _account(unit),
        privileges=frozenset((one.name, one.value) for one in given),
        programs=tuple(dict.fromkeys(command.path for command in commands)),
        paths=tuple(path for path in found if not (has_own and _TEMPORARY.fullmatch(path))),
        opened=tuple(
            path for one in opened for path in _paths(expand_specifiers(one.value, specifiers))
        ),
    )


def why_root_must(meant: Named, present: Named | None, changeable: Sequence[str]) -> str | None:
    """Why root has to make a text live; None where nobody gains anything by it.

    Args:
        meant: What would become live.
        present: What is live; None where nothing is.
        changeable: Who else than root, and the account that it runs as, may change what it names.
    """
    if not changeable or (present is not None and meant.is_no_more_than(present)):
        return None
    runs_as = f"`{meant.account}`" if meant.account is not None else "root"
    return f"it would run as {runs_as}, and {changeable[0]}"


def _account(unit: UnitFile) -> str | None:
    name = unit.value("Service", "User") or ""
    if (unit.value("Service", "DynamicUser") or "").lower() in TRUE and name not in {"root", "0"}:
        return name or "a dynamic user"
    return None if name in _ROOT or "%" in name else name


def _checked(words: Sequence[str]) -> Iterator[str]:
    """Arguments without those behind a flag that takes data."""
    for flag, word in itertools.pairwise(("", *words)):
        name = word.partition("=")[0] if word.startswith("-") else flag
        if name.replace("_", "-") not in _DATA_FLAGS:
            yield word


def _paths(text: str) -> list[str]:
    found = [text] if text.startswith("/") else []
    return [path for path in (*found, *_PATH.findall(text)) if not _DEVICE.match(path)]


def why_only_root(ctx: Context, text: bytes | None) -> str | None:
    """Why only root may make a text live; None where root asks, it is harmless, or it removes the unit."""
    if not ctx.is_unattended or ctx.mode is not Mode.SYSTEM or text is None:
        return None
    try:
        meant = _named(ctx, text)
        standing = standing_text(ctx)
        present = _named(ctx, standing) if standing else None
        return why_root_must(meant, present, list(_changeable(meant)))
    except ConfigError as error:
        return f"tunerd cannot tell what it runs: {error.message}"


def demand_root_for(ctx: Context, text: bytes | None, what: str) -> None:
    """See that whoever asks may make a text live.

    Raises:
        DeployError: only root may.
    """
    why = why_only_root(ctx, text)
    if why is not None:
        raise DeployError(
            f"only root may make {what} live",
            cause=why,
            state="nothing was changed",
            hint="check its program and account, then run the same command as root",
        )


def demand_root_for_plan(ctx: Context, plan: Plan) -> None:
    """As `demand_root_for`: a candidate's unit runs the same as what would be deployed.

    Raises:
        DeployError: only root may make it live.
    """
    text = plan.unit_text.encode("utf-8", "surrogateescape")
    demand_root_for(ctx, text, f"`{plan.resolved.name}`")


def _named(ctx: Context, text: bytes) -> Named:
    unit = unit_with(ctx, text.decode("utf-8", "surrogateescape"))
    specifiers = specifiers_of(ctx, ctx.unit)
    return named_by(unit, file_environment_of(ctx, unit, specifiers), specifiers)


def _changeable(meant: Named) -> Iterator[str]:
    """Who else than root and its own account may change what a unit names."""
    who = account(meant.account) if meant.account is not None else None
    uid = 0 if who is None else who.uid
    for word in meant.programs:
        program = Path(word)
        if is_shell(word) or any(map(is_shell, shebang(program))):
            yield f"tunerd cannot tell what `{word}` runs"
        paths = [program, *libraries_of(program)] if program.is_absolute() else []
        yield from _changed_by(paths, uid)
    yield from _changed_by([Path(path) for path in meant.paths], uid)
    yield from _changed_by([Path(path) for path in meant.opened], 0)


def _changed_by(paths: list[Path], uid: int) -> Iterator[str]:
    for path in paths:
        there = next(one for one in (path, *path.parents) if not is_gone(one))
        who = writable_by_others(there, trusted=uid)
        if who is not None:
            yield who
