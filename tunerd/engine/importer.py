"""Turns the command line that serves today into profile keys that render to the same list.

The rows of `flags` say which key a flag belongs to; whether it is said by that key is asked of the renderer
itself. Every flag ends in one of three places: a key, `extra_args` (the build lists it but no key knows
it), or the list of what could not be placed. Keys that tunerd would set by itself and the command line
does not are left to the engine.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from tunerd.engine.capabilities import Capabilities, FitStyle, Option
from tunerd.engine.flags import (
    IN_STAGE,
    LEGACY_LOAD,
    NO_FLAG_NEEDED,
    SECRET_FLAGS,
    CommandLine,
    RenderContext,
    has_a_word_of,
    holds_secret,
    is_flag,
    normal_spelling,
    owner_of,
    render,
    secrets_in,
    with_dashes,
)
from tunerd.errors import ConfigError
from tunerd.profile.layers import Layer, LayerFile, Resolved, default_layer, resolve
from tunerd.profile.schema import LEAVE_TO_ENGINE, flatten, nest, own_kinds, validate
from tunerd.words import Family, is_name

# They take a value, but ik's help shows no placeholder.
_WITH_VALUE = frozenset({"--alias", "-a", "--reasoning", "-rea", "--reasoning-budget-message"})
_SECRET = "a secret: put it into a file and set serving.api_key_file"  # noqa: S105
_OTHER_SECRET = "a secret: keep it in a drop-in with EnvironmentFile="  # noqa: S105
_EMPTY_WORD = "an empty word (`${NAME}` of an empty variable leaves one, `$NAME` none)"
_FOR_DOWNLOADS = "a secret that only downloads need: tunerd serves files that are here"
_TOKENS = re.compile(r"-hft|--hf-token.*|(\w+_)?(HF|HUGGING_?FACE)_.*")
_KEYS = re.compile(r"--api-key|LLAMA_(ARG_)?API_KEY")
_NO_TEXT = re.compile("[\ud800-\udfff]")  # what stands for bytes that are not UTF-8
# Of a file or folder, by the placeholder of a build's help; one flag may take several.
_PATH = re.compile(r"FNAME|PATH|(\w+_)?FILE|(LOG)?DIR")
_SEVERAL = ("--lora", "--control-vector")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with its values, as it stood on the command line or in the environment."""

    word: str
    values: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """As typed."""
        return (self.word, *self.values)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A flag that no profile can hold, and why."""

    words: tuple[str, ...]
    reason: str


def split_flags(arguments: Sequence[str], capabilities: Capabilities) -> Iterator[Flag]:
    """The flags of an argument vector, each with its values; words before the first are one too."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        option = _option(word, capabilities)
        least = _n_values(word, option)
        if _is_switch_here(arguments[position:], capabilities):
            least = 0
        # There are no positional arguments, and ik's help leaves some placeholders out.
        most = len(arguments)
        if owner_of(word) is not None:
            most = least if option is not None else max(least, 1)
        position += 1
        end = position + least
        while end < min(position + most, len(arguments)) and not is_flag(arguments[end]):
            end += 1
        yield Flag(word, tuple(arguments[position:end]))
        position = end


def unlisted_flags(arguments: Sequence[str], capabilities: Capabilities) -> tuple[str, ...]:
    """What among arguments a build does not list as working, each once: a flag as typed, or in words what is wrong."""
    found = (_unlisted(flag, capabilities) for flag in split_flags(arguments, capabilities))
    return tuple(dict.fromkeys(filter(None, found)))


def _unlisted(flag: Flag, capabilities: Capabilities) -> str | None:
    if not flag.word:
        return _EMPTY_WORD
    if not is_flag(flag.word):
        return None
    if capabilities.flags.isdisjoint((flag.word, with_dashes(flag.word))):
        return flag.word
    return (
        f"{flag.word} without `on` or `off`" if _is_switch_here(flag.words, capabilities) else None
    )


def _is_switch_here(arguments: Sequence[str], capabilities: Capabilities) -> bool:
    """Whether they begin with a flag alone that wants `on` or `off` behind it, as `-fa` does since September 2025."""
    spellings = {arguments[0], with_dashes(arguments[0])}
    wants_word = not capabilities.on_off_flags.isdisjoint(spellings)
    return wants_word and (len(arguments) == 1 or is_flag(arguments[1]))


def _option(word: str, capabilities: Capabilities) -> Option | None:
    spellings = (word, normal_spelling(word), with_dashes(word))
    found = (capabilities.help.option(spelling) for spelling in spellings)
    return next((option for option in found if option is not None), None)


def _n_values(word: str, option: Option | None) -> int:
    """How many values a flag takes at least."""
    if option is None or not option.argument:
        return int(word in _WITH_VALUE)
    return 2 if re.fullmatch(r"[A-Z]+ [A-Z]+", option.argument) else 1


def _is_default(flag: Flag, option: Option) -> bool:
    """Whether a number that no key takes is what the build does without the flag.

    Source: parser of mainline, where -1 stands for `auto`.
    """
    return flag.values == ("-1",) and (option.default or "").partition(",")[0] in {"-1", "auto"}


def _as_meant(flag: Flag, folder: str, capabilities: Capabilities) -> Flag:
    """A flag with what it means alone, and its files by their whole paths, wherever the server will start."""
    if _is_switch_here(flag.words, capabilities):
        return Flag(flag.word, ("on",))
    option = _option(flag.word, capabilities)
    if not folder or not flag.values or option is None or not _PATH.match(option.argument):
        return flag
    if any("hf-" in spelling for spelling in option.spellings):  # a name in a repository
        return flag
    is_list = option.spellings[0].startswith(_SEVERAL)
    names = flag.values[0].split(",") if is_list else [flag.values[0]]
    paths = (
        str(PurePosixPath(folder, name)) if name[:1] not in {"/", "%", ""} else name
        for name in names
    )
    return Flag(flag.word, (",".join(paths), *flag.values[1:]))


def _why_secret(name: str) -> str:
    """What becomes of a secret, by the flag or variable that gives it."""
    if _TOKENS.fullmatch(name):
        return _FOR_DOWNLOADS
    return _SECRET if _KEYS.fullmatch(name) else _OTHER_SECRET


PREFIX = "LLAMA_ARG_"
TRUE = frozenset({"on", "enabled", "true", "1"})
FALSE = frozenset({"off", "disabled", "false", "0"})

# ik prints no names of variables; these it reads. Source: its argument parser; switches tried on the
# build of August 2026: `1` and `true` mean on, everything else off, also the word `on`.
_IK_VARIABLES = {
    *("MODEL", "MODEL_URL", "MODEL_ALIAS", "HF_REPO", "HF_FILE", "CHAT_TEMPLATE", "HOST", "PORT"),
    *("THREADS", "THREADS_HTTP", "N_PARALLEL", "BATCH", "UBATCH", "CTX_SIZE", "N_PREDICT"),
    *("N_GPU_LAYERS", "CACHE_TYPE_K", "CACHE_TYPE_V", "DEFRAG_THOLD"),
}
# Variables whose flag has another name.
_NAMED_OTHERWISE = {
    "N_PARALLEL": "--parallel",
    "N_PREDICT": "--predict",
    "BATCH": "--batch-size",
    "UBATCH": "--ubatch-size",
    "MODEL_ALIAS": "--alias",
    "DIO": "--direct-io",
    "CHECKPOINT_EVERY_NT": "--checkpoint-every-n-tokens",
    "CHECKPOINT_MIN_SPACING_NT": "--checkpoint-min-step",
    "ENDPOINT_METRICS": "--metrics",
    "ENDPOINT_PROPS": "--props",
    "ENDPOINT_SLOTS": "--slots",
    "HFD_REPO": "--hf-repo-draft",
    "ROPE_SCALING_TYPE": "--rope-scaling",
    "SPEC_DRAFT_CACHE_TYPE_K": "--cache-type-k-draft",
    "SPEC_DRAFT_CACHE_TYPE_V": "--cache-type-v-draft",
    "SPEC_DRAFT_HF_REPO": "--hf-repo-draft",
    "STATIC_PATH": "--path",
    "THINK": "--reasoning-format",
    "THINK_BUDGET": "--reasoning-budget",
    "THINK_BUDGET_MESSAGE": "--reasoning-budget-message",
}
# What a variable means when it is on, and when it is off; nothing is the engine's default.
_IK_SWITCHES: Mapping[str, tuple[str, str]] = {
    "ENDPOINT_METRICS": ("--metrics", ""),
    "ENDPOINT_SLOTS": ("", "--no-slots"),
    "MLOCK": ("--mlock", ""),
    "FLASH_ATTN": ("--flash-attn on", "--flash-attn off"),
    "K_CACHE_HADAMARD": ("-khad", ""),
    "V_CACHE_HADAMARD": ("-vhad", ""),
}


def flag_of(variable: str) -> str:
    """The flag that a variable stands for, by its name without `LLAMA_ARG_`."""
    return _NAMED_OTHERWISE.get(variable, "--" + variable.lower().replace("_", "-"))


def _options(name: str, value: str, capabilities: Capabilities) -> tuple[Flag, ...] | None:
    """The flags that a variable stands for, none if it asks for the default; None if unread."""
    if capabilities.family is Family.IK:
        return _ik_options(name.removeprefix(PREFIX), value)
    negative = name.replace(f"{PREFIX}NO_", PREFIX, 1)
    for option in capabilities.help.options:
        if option.env == name and not option.is_removed:
            return _mainline_options(option, value)
        if option.env == negative and not option.is_removed and not option.argument:
            _, off = _sides(option)
            return None if off is None else (Flag(off, ()),)  # any value means off
    return None


def _ik_options(name: str, value: str) -> tuple[Flag, ...] | None:
    if name in _IK_VARIABLES:
        return (Flag(flag_of(name), (value,)),)
    if name not in _IK_SWITCHES:
        return None
    on, off = _IK_SWITCHES[name]
    words = (on if value in {"1", "true"} else off).split()
    return (Flag(words[0], tuple(words[1:])),) if words else ()


def _mainline_options(option: Option, value: str) -> tuple[Flag, ...] | None:
    on, off = _sides(option)
    if on is None:  # `--no-host` has no other side, and its variable says NO_ too
        on, off = off, None
    if option.argument and on is not None:
        return (Flag(on, (value,)),)
    if value.lower() in TRUE:
        return None if on is None else (Flag(on, ()),)
    if value.lower() in FALSE:
        return () if off is None else (Flag(off, ()),)
    return None


def _sides(option: Option) -> tuple[str | None, str | None]:
    """The first long spelling that switches on, and the first that switches off."""
    long = [word for word in option.spellings if word.startswith("--")] or list(option.spellings)
    on = next((word for word in long if not word.startswith("--no-")), None)
    off = next((word for word in long if word.startswith("--no-")), None)
    return on, off


# What is served is the file in the cache of Hugging Face, by its path.
_REPOSITORY = {
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "model.hf_repo"),
    **dict.fromkeys(("-hff", "--hf-file"), "model.hf_file"),
}
_STAGE_KEYS = tuple(f"speculation.{name}" for name in ("type", "n_max", "n_min", "p_min"))
_DEPTHS = frozenset(_STAGE_KEYS[1:])
_LOAD_MODE, _FIT, _MARGIN = "serving.load_mode", "memory.fit", "memory.fit_mib"
_TYPE, _TENSORS = "speculation.type", "memory.override_tensor"
_ALIAS, _KEY_FILE, _KWARGS = "serving.alias", "serving.api_key_file", "serving.chat_template_kwargs"
_LISTS = frozenset({_TENSORS, "speculation.override_tensor"})
# Source: each pair of flags tried on the six builds of April to August 2026.
_ADDING = frozenset({*_LISTS, _KEY_FILE, _KWARGS, _LOAD_MODE, _TYPE, None})
# They are several switches on some builds, and one value on others.
_RESPELLED = frozenset({_LOAD_MODE, _TYPE})
_UNDOES = {"--mmap": "--no-mmap", "--no-direct-io": "--direct-io", "-ndio": "--direct-io"}


@dataclass(frozen=True, slots=True)
class Imported:
    """The profile data of a command line, and what is not in it.

    `resolved` and `command` are what it resolves and renders to, without a program; `added` are flags there
    that nobody had given.
    """

    data: Mapping[str, Any]
    unplaced: tuple[Unplaced, ...]
    overridden: tuple[str, ...]
    resolved: Resolved
    command: CommandLine
    added: tuple[str, ...]


def import_command_line(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    capabilities: Capabilities,
    folder: str = "",
) -> Imported:
    """The profile of a command line.

    Args:
        arguments: Without the program.
        environment: The server's environment; `LLAMA_ARG_*` are options.
        capabilities: Of the build, whose help says how many values a flag takes.
        folder: Where the server starts, from where files may be named; empty to leave names as they are.

    Raises:
        ConfigError: it cannot be read at all.
    """
    draft = _Import(capabilities)
    typed = list(split_flags(arguments, capabilities))
    secrets = secrets_in(arguments)
    found = draft.in_effect(draft.with_variables(typed, environment, secrets))
    draft.flags = tuple(_as_meant(flag, folder, capabilities) for flag in found)
    resolved, command = draft.settle()
    given = {draft.owner(flag) for flag in draft.placed}
    added = (
        " ".join(argument.words)
        for argument in command.arguments
        if owner_of(argument.flag) not in given
        and argument.key != "extra_args"
        and argument.value != ""
    )
    return Imported(
        draft.data(),
        tuple(draft.unplaced),
        tuple(draft.overridden),
        resolved,
        command,
        tuple(added),
    )


@dataclass(slots=True)
class _Import:
    """What has been placed so far; `parts` are flags that together make one key."""

    capabilities: Capabilities
    flags: tuple[Flag, ...] = ()
    placed: list[Flag] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, list[Flag]] = field(default_factory=dict)
    extra: list[Flag] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    unplaced: list[Unplaced] = field(default_factory=list)
    overridden: list[str] = field(default_factory=list)

    @property
    def adding(self) -> frozenset[str | None]:
        """Keys of which each flag counts, and not the last alone."""
        return _ADDING if self.capabilities.family is Family.IK else _ADDING | {_ALIAS}

    def owner(self, flag: Flag) -> str | None:
        """The key that says this flag on this build."""
        return owner_of(flag.word, self.capabilities.flags)

    def data(self) -> dict[str, Any]:
        """As a profile file has it."""
        data = nest(self.keys)
        if self.extra:
            data["extra_args"] = [word for flag in self.extra for word in flag.words]
        return {**data, "environment": self.environment} if self.environment else data

    def with_variables(
        self, typed: Sequence[Flag], environment: Mapping[str, str], secrets: frozenset[str]
    ) -> tuple[Flag, ...]:
        """All flags, weakest first: on mainline the command line wins, on ik the environment."""
        is_ik = self.capabilities.family is Family.IK
        # What adds up does so with its variable too. Source: builds of May and August 2026, each pair tried.
        adding = self.adding if self.capabilities.takes_chains else self.adding - {_TYPE}
        taken = {self.owner(flag) or flag.word for flag in typed} - adding
        # `LLAMA_LOG_VERBOSITY` and the like are options too. They are read in the order of the help.
        known = {option.env: place for place, option in enumerate(self.capabilities.help.options)}
        places = {
            name: known.get(name.replace(f"{PREFIX}NO_", PREFIX, 1), 0) for name in environment
        }
        found: list[Flag] = []
        for name, value in sorted(environment.items(), key=lambda one: places[one[0]]):
            is_option = name.startswith(PREFIX) or name in known
            flags = _options(name, value, self.capabilities) if is_option else ()
            if holds_secret(name, value, secrets):
                why = _SECRET if has_a_word_of(value, secrets) else _why_secret(name)
                self.unplaced.append(Unplaced((f"{name}=...",), why))
            elif not is_option and is_name(name) and not _NO_TEXT.search(value):
                self.environment[name] = value
            elif flags is None or not is_option:
                reason = "the engine ignores it, or this value of it"
                reason = reason if is_option else "a profile cannot have it in [environment]"
                self.unplaced.append(Unplaced((f"{name}={value}",), reason))
            elif not is_ik and any((self.owner(flag) or flag.word) in taken for flag in flags):
                self.overridden.append(name)
            else:
                found += flags
        return (*typed, *found) if is_ik else (*found, *typed)

    def in_effect(self, flags: Sequence[Flag]) -> Iterator[Flag]:
        """Each flag once: where one is repeated the last wins, but for flags that add up."""
        last: dict[str | None, Flag] = {}
        for flag in flags:
            owner = self.owner(flag)
            if owner in self.adding:
                yield flag
            else:  # on and off spellings of one switch share the key, values of one key too
                last[owner] = flag
        typed = [flag for flag in flags if self.owner(flag) == _TYPE and flag.values]
        if (
            self.capabilities.takes_chains and len(typed) > 1
        ):  # there each adds its kinds, and "none" nothing
            kinds = dict.fromkeys(kind for flag in typed for kind in flag.values[0].split(","))
            kinds.pop("none", None)
            last[_TYPE] = Flag(typed[-1].word, (",".join(kinds) or "none",))
        yield from last.values()

    def place(self, flag: Flag) -> str | None:
        """Put a flag where it belongs, or why that is nowhere."""
        spelling, owner = normal_spelling(flag.word), self.owner(flag)
        option = _option(flag.word, self.capabilities)
        if spelling in SECRET_FLAGS:
            return _why_secret(spelling)
        is_taken = not self.capabilities.flags.isdisjoint((flag.word, spelling))
        if option is None and owner is None and not is_taken:
            return "this build does not list it"
        is_bare = not flag.values and owner in {*_LISTS, _MARGIN}  # which not every help shows
        if is_bare or len(flag.values) < _n_values(flag.word, option):
            return "its value is missing"
        if owner == _KEY_FILE and owner in self.keys:
            return "a profile has one file of keys"
        if spelling in _REPOSITORY:
            self.keys[_REPOSITORY[spelling]] = flag.values[0]
        elif owner is None:
            is_listed = flag.word in self.capabilities.flags
            self.extra.append(flag if is_listed else Flag(spelling, flag.values))
        elif owner == _LOAD_MODE:
            self.parts.setdefault(owner, []).append(Flag(spelling, flag.values))
        elif owner == _TYPE:
            return self._place_type(flag)
        else:
            values = self._readings(owner, flag)
            found = [list(validate("", nest({owner: value}))) for value in values]
            if [] not in found and option is not None and _is_default(flag, option):
                self.keys[owner] = LEAVE_TO_ENGINE
                return None
            if [] not in found and owner == _MARGIN and "," in flag.values[0]:
                return "a profile has one margin for all devices"
            if [] not in found:  # of the likeliest reading
                return f"allowed: {found[0][0].allowed}"
            self.keys[owner] = values[found.index([])]
        return None

    def _readings(self, owner: str, flag: Flag) -> list[Any]:
        """What a flag may mean, the likeliest first, with what was said before where it adds to that."""
        if owner in _LISTS:
            return [[*self.keys.get(owner, ()), *flag.values[0].split(",")]]
        found = list(_values(flag, normal_spelling(flag.word)))
        if owner not in self.adding or owner not in self.keys:
            return found
        before = self.keys[owner]
        if isinstance(before, dict):
            return [{**before, **one} if isinstance(one, dict) else one for one in found]
        return [f"{before},{one}" for one in found]

    def _place_type(self, flag: Flag) -> str | None:
        """`--spec-type draft-mtp`, `--spec-type mtp:n_max=3,p_min=0.75`, `--multi-token-prediction`."""
        if flag.values:
            word, _, pairs = flag.values[0].partition(":")
        else:
            word, pairs = "none" if "-no-" in flag.word else "mtp", ""
        kind = own_kinds(word)
        keys: dict[str, Any] = {_TYPE: "off" if kind == "none" else kind}
        for pair in filter(None, pairs.split(",")):
            name, _, text = pair.partition("=")
            keys[f"speculation.{name}"] = next(_read(text))
        stages = self.parts.setdefault(_TYPE, [])
        stages.append(flag)
        # Of a list of kinds the last one counts.
        is_alone = self.capabilities.takes_chains or self.keys.get(_TYPE) in {None, keys[_TYPE]}
        if is_alone and not list(validate("", nest(keys))):
            self.keys.update(keys)
        elif flag.values:
            # Whole stages say all of themselves, so they can stand as they are.
            self.keys.update(dict.fromkeys(_STAGE_KEYS, LEAVE_TO_ENGINE))
            self.extra[:] = [one for one in self.extra if one not in stages] + stages
        else:
            return "a profile has one kind of speculation"
        return None

    def finish(self, lost: Mapping[str, str]) -> None:
        """Make keys of what several flags say together, and leave the rest to the engine."""
        keys = self.keys
        if flags := self.parts.get(_LOAD_MODE):
            self._load_mode(flags)
        # Without a name such a server is called so, and by the path of its file it would be called otherwise.
        # Source: four builds of April to August 2026.
        if "model.hf_repo" in keys and self.capabilities.family is not Family.IK:
            keys.setdefault(_ALIAS, keys["model.hf_repo"])
        # ik's fit is off unless it is asked for.
        if self.capabilities.fit is FitStyle.SWITCH and _MARGIN in keys:
            keys.setdefault(_FIT, False)
        # Stages that stand as they are have the rest of what they draft by beside them.
        for flag in self.placed if keys.get(_TYPE) == LEAVE_TO_ENGINE else ():
            owner = self.owner(flag) or ""
            if owner.startswith("speculation.") and owner != _TYPE:
                keys[owner] = LEAVE_TO_ENGINE
                self.extra.append(flag)
        is_ready_made = any(flag.word == "--spec-default" for flag in self.extra)
        keys.setdefault(_TYPE, LEAVE_TO_ENGINE if is_ready_made else "off")
        # A depth that the build took once is of a line for a build that drafted by the model alone.
        depths = (flag.word for flag in self.flags if self.owner(flag) in _DEPTHS)
        is_older = any(
            self.capabilities.flags.isdisjoint((one, with_dashes(one))) for one in depths
        )
        drafts_unasked = self.capabilities.drafts_unasked or is_older
        if drafts_unasked and "speculation.draft_model" in keys and keys[_TYPE] == "off":
            keys[_TYPE] = "draft"
        for key in lost:
            keys.pop(key, None)
        keys.setdefault(_TYPE, "off")
        for key in flatten(default_layer().data):
            keys.setdefault(key, LEAVE_TO_ENGINE)

    def _load_mode(self, flags: Sequence[Flag]) -> None:
        last = flags[-1]
        if self.capabilities.has_load_mode:
            # Each of the old switches is a mode there, and the last one counts.
            # Source: the build of August 2026, tried in pairs.
            modes = {"--mlock": "mlock", "--mmap": "mmap", "-dio": "dio", "--direct-io": "dio"}
            self.keys[_LOAD_MODE] = last.values[0] if last.values else modes.get(last.word, "none")
            return
        given: set[str] = set()
        for flag in flags:
            given.discard(_UNDOES.get(flag.word, ""))
            if flag.word not in _UNDOES:
                given.add("--direct-io" if flag.word == "-dio" else flag.word)
        if "--direct-io" in given:
            given.discard("--no-mmap")  # which it implies
        modes = {" ".join(sorted(switches)): mode for mode, switches in LEGACY_LOAD.items()}
        mode = modes.get(" ".join(sorted(given)))
        if mode is None:
            words = tuple(flag.word for flag in flags)
            self.unplaced.append(Unplaced(words, "a profile has one load mode"))
        else:
            self.keys[_LOAD_MODE] = mode

    def settle(self) -> tuple[Resolved, CommandLine]:
        """Place all flags but those that do not render to what they came from.

        Raises:
            ConfigError: something cannot be resolved that no flag says.
        """
        told = list(self.unplaced)
        lost: dict[str, str] = {}
        while True:
            self.keys, self.parts, self.extra, self.placed = {}, {}, [], []
            self.unplaced = list(told)
            for flag in self.flags:
                reason = self._why_lost(flag, lost) or self.place(flag)
                if reason is None:
                    self.placed.append(flag)
                else:
                    is_secret = normal_spelling(flag.word) in SECRET_FLAGS
                    words = (flag.word, "...") if is_secret else flag.words
                    words = words if flag.word else ('""', *flag.values)
                    self.unplaced.append(Unplaced(words, reason))
            self.finish(lost)
            resolved = resolve("imported", (LayerFile(Layer.SITE, "imported", self.data()),))
            if not isinstance(resolved, Resolved):
                found = {problem.key: f"allowed: {problem.allowed}" for problem in resolved}
            else:
                model = str(self.keys.get("model.path", ""))
                context = RenderContext("", model, has_gpu=True, physical_cores=None)
                command = render(resolved, self.capabilities, context)
                if isinstance(command, CommandLine):
                    found = self._lost(command)
                    if not found:
                        return resolved, command
                else:
                    found = {
                        one.value if one.key == "extra_args" else one.key: one.reason
                        for one in command
                    }
            if found.keys() <= lost.keys():
                raise ConfigError("the command line cannot be read", cause=str(found))
            lost |= found

    def _why_lost(self, flag: Flag, lost: Mapping[str, str]) -> str | None:
        """Why a flag is left out: no profile can hold it, its key is lost, or a word of it where it stands as it is."""
        if not flag.word:
            return _EMPTY_WORD
        if any(map(_NO_TEXT.search, flag.values)):
            return "it is not UTF-8, as all of a profile is"
        owner = self.owner(flag) or ""
        words = (*flag.words, normal_spelling(flag.word)) if owner in {"", _TYPE} else ()
        names = (owner, *words, *map(repr, words))
        return next((lost[name] for name in names if name in lost), None)

    def _lost(self, command: CommandLine) -> dict[str, str]:
        """Keys that leave another flag than they came from, or none, with the reason."""
        said = {one.key for one in command.arguments if owner_of(one.flag) == one.key}
        notes = {note.key: note.text for note in command.notes}
        owners = {key for flag in self.placed if (key := self.owner(flag)) is not None}
        return {
            key: notes.get(key, "it cannot be combined with the rest").removeprefix("left out: ")
            for key in owners - said - _RESPELLED
            if self.keys.get(key, LEAVE_TO_ENGINE) != LEAVE_TO_ENGINE
            and not notes.get(key, "").endswith((NO_FLAG_NEEDED, IN_STAGE))
        }


_LOOSE_NUMBER = re.compile(r"\+?-?0*[0-9]{1,18}\.?|\+[0-9]{1,9}\.[0-9]{1,9}", re.ASCII)


def _values(flag: Flag, spelling: str) -> Iterator[object]:
    """What a flag may mean, the likeliest first."""
    if flag.values:
        yield from _read(flag.values[0])
    else:
        yield not spelling.startswith("--no-")


def _read(text: str) -> Iterator[object]:
    """What a word may mean: a number or JSON, text, or one of the words for on and off."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(re.sub(r"^(-?)\.", r"\g<1>0.", text))
        if found is not None and not isinstance(found, str):
            yield found
    if _LOOSE_NUMBER.fullmatch(text):  # which engines read, and JSON does not: 08, +5, 1.
        yield float(text) if "." in text else int(text)
    yield text
    if text.lower() in TRUE | FALSE:
        yield text.lower() in TRUE
        yield "on" if text.lower() in TRUE else "off"
