"""Results that travel: settings and figures without texts, names of hosts, paths or accounts, and what fits here.

What others measured is never evidence of this box: it only says what a sweep may try first. A bundle is taken for
hostile: it is bounded, of one version, and every word and number of it is held to what it may be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tunerd import __version__
from tunerd.app import Context
from tunerd.engine.builds import find_engines, request_again
from tunerd.errors import ConfigError, HostError, TunerdError, UsageError
from tunerd.machine.facts import Gpu
from tunerd.measure.answer import Sample, summarise
from tunerd.measure.evidence import ArmRecord
from tunerd.production.plan import Plan, make_plan
from tunerd.profile.arm import OFF, Arm
from tunerd.result import ActionResult, Message, note, warning
from tunerd.words import Family, sha256

VERSION = 1
MOST_BYTES = 1024 * 1024
# A start takes minutes of a night that is short.
MOST_CANDIDATES = 3
_SAME_CARD = 0.1  # of its memory: drivers and write-ups round it

Words = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:,;()'+-]{0,199}$")]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.,-]{0,39}$")]
Speed = Annotated[float, Field(gt=0, le=1e6)]
_WORDS = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:,;()'+-]{0,199}")


class Part(BaseModel):
    """A part of a bundle."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)  # fmt: skip


class Card(Part):
    """The card, by model and memory."""

    name: Words
    memory_mib: Annotated[int, Field(ge=1, le=10**7)]


class Build(Part):
    """The engine; `sha256` is of its program with its libraries."""

    family: Literal["mainline", "ik", "bee", "unknown"]
    version: Words | None = None
    sha256: Hash | None = None


class Model(Part):
    """The model, by the name in its header; `sha256` is the identity of its files."""

    name: Words
    sha256: Hash | None = None


class Values(Part):
    """The settings that a sweep tries, by their keys in a profile; what is missing was not told."""

    spec: Annotated[Word | None, Field(alias="speculation.type")] = None
    n_max: Annotated[int | None, Field(alias="speculation.n_max", ge=0, le=1000)] = None
    p_min: Annotated[float | None, Field(alias="speculation.p_min", ge=0, le=1)] = None
    fit_mib: Annotated[int | None, Field(alias="memory.fit_mib", ge=0, le=10**6)] = None
    kv: Annotated[Word | None, Field(alias="serving.cache_type_k")] = None
    ubatch: Annotated[int | None, Field(alias="serving.n_ubatch", ge=1, le=10**6)] = None
    batch: Annotated[int | None, Field(alias="serving.n_batch", ge=1, le=10**6)] = None
    threads: Annotated[int | None, Field(alias="serving.threads", ge=1, le=10**4)] = None


class Figure(Part):
    """What a kind of request came to; `n` is how many, where that is known."""

    case: Words
    tok_s: Speed
    n: Annotated[int | None, Field(ge=1, le=10**6)] = None
    acceptance_ratio: Annotated[float | None, Field(ge=0, le=1)] = None
    wall_ms: Annotated[float | None, Field(gt=0, le=1e9)] = None


class Entry(Part):
    """One configuration; `failure` is how it ended where it did not serve."""

    source: Words
    card: Card | None = None
    engine: Build
    model: Model
    settings: Values
    figures: Annotated[tuple[Figure, ...], Field(max_length=100, strict=False)] = ()
    failure: Word | None = None


class Bundle(Part):
    """Results of one box or write-up."""

    format: Literal["tunerd-results"]
    version: Literal[1]
    written_by: Words
    entries: Annotated[tuple[Entry, ...], Field(min_length=1, max_length=1000, strict=False)]


def read_bundle(content: bytes, where: str) -> Bundle:
    """A bundle, or a refusal that names the first place where it is wrong.

    Raises:
        ConfigError: it is too large, of another version, or holds what it may not.
    """
    if len(content) > MOST_BYTES:
        raise _refused(where, f"it is larger than {MOST_BYTES // 1024} KiB")
    try:
        return Bundle.model_validate_json(content)
    except ValidationError as problem:
        first = min(problem.errors(), key=lambda one: one["loc"] != ("version",))
        place = ".".join(str(part)[:60] for part in first["loc"])
        if place == "version":
            given = str(first["input"])[:40]
            raise _refused(where, f"it is of version {given!a}, and this tunerd reads version {VERSION}") from problem  # fmt: skip
        raise _refused(where, f"{place or 'the file'}: {first['msg'][:200]}") from problem


def _refused(where: str, why: str) -> ConfigError:
    return ConfigError(
        f"not a bundle of results: `{where}`",
        cause=why,
        state="nothing was imported",
        hint="`tunerd results export RUN --format bundle` writes one; docs/neighbours.md",
    )


# What a run of this box becomes


def entries_of(arms: Sequence[ArmRecord], samples: Mapping[str, Sequence[Sample]], model: str | None, cards: Sequence[Gpu]) -> Iterator[Entry]:  # fmt: skip
    """Entries of the arms whose flags are known, and that have figures.

    Args:
        arms: Of a run.
        samples: By arm.
        model: Name in the model's header.
        cards: Of this machine now; where they are others than were measured, none is told.
    """
    for arm in arms:
        by_case: dict[str, list[Sample]] = {}
        for one in samples.get(arm.name, ()):
            if one.is_usable:
                by_case.setdefault(_words(f"{one.suite} {one.case}", "case"), []).append(one)
        figures = tuple(_figure(case, found) for case, found in by_case.items())
        values = _values(arm.origins)
        if values is not None and any(figures):
            names = tuple(gpu.name for gpu in cards)
            same = len(cards) == 1 and arm.fingerprint.gpu_names == names
            card = Card(name=_words(names[0], "card"), memory_mib=cards[0].total_mib) if same and cards[0].total_mib else None  # fmt: skip
            yield Entry(
                source=f"measured by tunerd {__version__}",
                card=card,
                engine=Build(
                    family=arm.family if arm.family in set(Family) else "unknown",  # type: ignore[arg-type]
                    version=None if arm.engine_version is None else _words(arm.engine_version, "unknown"),
                    sha256=arm.fingerprint.engine_sha256,
                ),
                model=Model(name=_words(model or "", "unnamed"), sha256=arm.fingerprint.model_sha256),
                settings=values,
                figures=tuple(one for one in figures if one is not None),
            )  # fmt: skip


def _words(text: str, otherwise: str) -> str:
    """A text if it is plain words: whatever else stands there is not handed out."""
    return text if _WORDS.fullmatch(text) and "/" not in text else otherwise


def _figure(case: str, samples: Sequence[Sample]) -> Figure | None:
    found = summarise(samples)
    speed = found.decode_tok_s.median
    if not speed or speed <= 0:
        return None
    return Figure(case=case, tok_s=speed, n=found.n, acceptance_ratio=found.acceptance_ratio, wall_ms=found.wall_ms.median)  # fmt: skip


def _values(origins: Sequence[tuple[str, str, str]]) -> Values | None:
    """What the flags of an arm set of the keys that travel; None where they are not known."""
    if not origins:
        return None
    keys = {field.alias: name for name, field in Values.model_fields.items()}
    found: dict[str, Any] = {"spec": OFF}
    for text, key, _who in origins:
        name = keys.get(key)
        flag, _, value = text.partition(" ")
        if name is None or not flag.startswith("-"):
            continue
        if name == "spec":
            stage, _, inside = value.partition(":")
            found["spec"] = stage.removeprefix("draft-") or "mtp"
            found |= {part: _number(said) for part, _, said in (one.partition("=") for one in inside.split(",")) if part in {"n_max", "p_min"}}  # fmt: skip
        else:
            found[name] = value if name == "kv" else _number(value)
    try:
        if "p_min" in found:
            found["p_min"] = float(found["p_min"])
        return Values(**found)
    except ValueError:
        return None


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# What of a bundle fits here


@dataclass(frozen=True, slots=True)
class Here:
    """What this box would measure: card, model, and the families of its engines by name, the serving one first."""

    cards: tuple[Gpu, ...]
    model: str | None
    model_sha256: str | None
    engines: Mapping[str, str]


def why_not(entry: Entry, here: Here) -> str | None:
    """Why an entry is no candidate here; None where it is one."""
    if entry.failure is not None:
        return f"it did not serve there: {entry.failure}"
    if entry.card is None and here.cards:
        return "its card is not told"
    if entry.card is not None and not any(_is_same_card(entry.card, one) for one in here.cards):
        return f"it is of another card: {entry.card.name}, {entry.card.memory_mib} MiB"
    has_hashes = entry.model.sha256 is not None and here.model_sha256 is not None
    if not (has_hashes and entry.model.sha256 == here.model_sha256) and not _is_same_model(entry.model.name, here.model):  # fmt: skip
        return f"it is of another model: {entry.model.name}"
    if entry.engine.family not in here.engines.values():
        return f"no engine of its family is here: {entry.engine.family}"
    return None


def _plain(text: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", text.casefold())


def _is_same_card(card: Card, gpu: Gpu) -> bool:
    total = gpu.total_mib or 0
    return _plain(card.name) == _plain(gpu.name) and abs(total - card.memory_mib) <= _SAME_CARD * card.memory_mib  # fmt: skip


def _is_same_model(name: str, ours: str | None) -> bool:
    """By name alone: a quantisation or a head more is told by neither."""
    first, second = _plain(name), _plain(ours or "")
    return bool(first and second) and (first in second or second in first)


def arm_of(entry: Entry, here: Here, base: Arm) -> Arm:
    """What serves, with the settings that an entry tells."""
    family = entry.engine.family
    engine = next(name for name, one in here.engines.items() if one == family)
    told = {one.name for one in fields(Arm)} & set(Values.model_fields)
    given = {name: value for name in told if (value := getattr(entry.settings, name)) is not None}
    if given.get("spec") == OFF:
        given |= {"n_max": 0, "p_min": 0.0}
    return replace(base, engine=base.engine if here.engines.get(base.engine) == family else engine, **given)  # fmt: skip


def candidates(entries: Sequence[Entry], here: Here, base: Arm) -> tuple[Arm, ...]:
    """The fastest few that fit, each once, without what serves."""
    fitting = [entry for entry in entries if entry.figures and why_not(entry, here) is None]
    fitting.sort(key=lambda entry: -fmean(one.tok_s for one in entry.figures))
    arms = dict.fromkeys(arm_of(entry, here, base).canonical() for entry in fitting)
    return tuple(arm for arm in arms if arm != base.canonical())[:MOST_CANDIDATES]


def here_of(ctx: Context, made: Plan) -> Here:
    """This box as a plan of what serves has it."""
    engines = {one.name: one for one in (made.engine, *find_engines(ctx))}
    families = {name: str(one.capabilities.family) for name, one in engines.items() if one.capabilities is not None}  # fmt: skip
    return Here(made.host.gpus or (), made.facts.name, made.facts.identity.sha256, families)


def here_now(ctx: Context) -> Here | None:
    """This box by what serves; None where nothing does that a profile deployed, or it cannot be planned again."""
    entry = ctx.generations.serving(ctx.unit)
    if entry is None or entry.generation.profile is None:
        return None
    try:
        return here_of(ctx, make_plan(ctx, request_again(entry.generation)))
    except TunerdError:
        return None


# What was imported


def imported(ctx: Context) -> dict[str, Bundle]:
    """The bundles that were imported, by their number; one that cannot be read any more is left out."""
    found = {}
    for path in sorted(ctx.paths.imported_dir.glob("*.json")):
        try:
            found[path.stem] = read_bundle(ctx.files.read(path) or b"", str(path))
        except (ConfigError, HostError):
            continue
    return found


def import_bundles(ctx: Context, files: Sequence[Path], here: Here | None) -> ActionResult:
    """Keep bundles beside the evidence, and say of each entry why it is no candidate here.

    Args:
        ctx: Where.
        files: All are read before any is kept.
        here: What serves; None where nothing does that could be compared.

    Raises:
        ConfigError: one is no bundle.
        UsageError: there is no such file.
    """
    read = []
    for path in files:
        content = ctx.files.read(path)
        if content is None:
            raise UsageError(f"no such file: `{path}`", state="nothing was imported")
        read.append((content, read_bundle(content, str(path))))
    rows: list[dict[str, Any]] = []
    for content, bundle in read:
        name = str(sha256(content))[:12]
        ctx.files.make_folder(ctx.paths.imported_dir)
        ctx.files.write(ctx.paths.imported_dir / f"{name}.json", content, mode=0o644)
        for entry in bundle.entries:
            why = None if here is None else why_not(entry, here)
            rows.append({"bundle": name, "source": entry.source, "card": None if entry.card is None else entry.card.name,
                         "model": entry.model.name, "settings": entry.settings.model_dump(by_alias=True, exclude_none=True),
                         "fits": None if here is None else why is None, "why_not": why})  # fmt: skip
    messages: tuple[Message, ...] = (
        note("candidates-only", "nothing of it counts as measured here: a sweep tries the fastest of what fits first",
             "`tunerd sweep run --dry-run` shows its first candidates"),
    )  # fmt: skip
    if here is None:
        text = "nothing serves that it could be compared with: what fits is seen when a sweep is planned"
        messages = (*messages, warning("not-compared", text))
    return ActionResult("results import", {"entries": rows}, messages, has_acted=True)


def forget(ctx: Context, name: str) -> ActionResult:
    """Remove an imported bundle.

    Raises:
        UsageError: there is none of this name.
    """
    path = ctx.paths.imported_dir / f"{name}.json"
    if not re.fullmatch(r"[0-9a-f]{12}", name) or not path.exists():
        raise UsageError(
            f"no bundle {name[:40]!a} was imported", hint="`tunerd results list` lists them"
        )
    ctx.files.remove(path)
    return ActionResult("results forget", {"bundle": name}, has_acted=True)
