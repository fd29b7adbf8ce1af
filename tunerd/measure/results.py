"""`tunerd results`: what was measured, in lists, in full, as files and bundles, and whether it still holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tunerd import __version__
from tunerd.app import Context
from tunerd.engine import fingerprint
from tunerd.engine.builds import find_engines
from tunerd.engine.choice import request_again
from tunerd.engine.conditions import FingerprintReader
from tunerd.engine.flags import argument_changes
from tunerd.errors import ConfigError, HostError, LeaseEnded, TunerdError, UsageError
from tunerd.machine.facts import Gpu
from tunerd.machine.process import words_of
from tunerd.measure import evidence
from tunerd.measure.answer import NO_ANSWER, Sample, count_marks, count_problems, summarise
from tunerd.measure.learn import workload_sha256_now
from tunerd.measure.store import EvidenceStore, reading
from tunerd.model.facts import ModelFacts
from tunerd.production.plan import Plan, cards_of, make_plan
from tunerd.profile.arm import DRAFT, DRAFT_MODEL, OFF, Arm
from tunerd.profile.schema import own_kinds
from tunerd.profile.workload import USUAL_RATES, Rates
from tunerd.records import plain
from tunerd.result import ActionResult, Message, note, warning
from tunerd.words import Family, sha256

DEFAULT_LIMIT = 20
_LOOK_BACK = 50
_NOTHING = note("nothing-measured", "nothing was measured yet", "tunerd bench")


def results(ctx: Context, *, limit: int | None = DEFAULT_LIMIT) -> ActionResult:
    """Runs, newest first, and whether they still hold on this machine; `limit` None for all of them."""
    bundles = dict(_kept(ctx))
    imported = [
        {"bundle": name, "entries": len(one.entries),
         "sources": sorted({entry.source for entry in one.entries})}
        for name, one in bundles.items() if isinstance(one, Bundle)
    ]  # fmt: skip
    unreadable = [
        warning("damaged-bundle", f"the imported bundle {name} is left out: {one.cause or one.message}",
                f"`tunerd results forget {name}`, and import it again")
        for name, one in bundles.items() if isinstance(one, TunerdError)
    ]  # fmt: skip
    with reading(ctx) as store:
        if store is None:
            nothing = {"results": [], "total": 0, "imported": imported}
            return ActionResult("results list", nothing, (_NOTHING, *unreadable))
        check = StalenessCheck(ctx)
        rows = [{**_run_json(run), "arms": check.rows(run)} for run in store.runs(limit=limit)]
        n_damaged = sum(one.n_rows for one in store.damage if one.table == "runs")
        total = store.count_runs() - n_damaged
        payload = {"results": rows, "total": total, "imported": imported}
        told = (*damage_messages(store), *check.messages, *unreadable)
        return ActionResult("results list", payload, told)


def show(ctx: Context, number: int) -> ActionResult:
    """One run: its conditions, its figures by arm and case, and its verdicts.

    Raises:
        UsageError: there is no such run.
    """
    from tunerd.measure.findings import figures

    with _opened(ctx, number) as store:
        found = store.evidence(run_of(store, number))
        messages = (*dropped_message(found.run), *damage_messages(store))
    run = found.run
    samples = ((arm, one) for arm, of in found.samples.items() for one in of)
    payload = {
        "run": _run_json(run),
        **_in_full(run, samples, found.summaries, found.verdicts),
        "figures": figures(found.samples),
        "left_out": _left_out(found.samples),
        "validity": StalenessCheck(ctx).rows(run),
    }
    return ActionResult("results show", payload, messages)


def export(ctx: Context, numbers: Sequence[int]) -> ActionResult:
    """Runs with everything that is kept of them, every sample included.

    Raises:
        UsageError: there is no such run.
    """
    runs = []
    with _opened(ctx, next(iter(numbers), 0)) as store:
        for number in numbers:
            run = run_of(store, number)
            found = store.arm_samples(number), store.summaries(number), store.verdicts(number)
            runs.append({**_run_json(run), **_in_full(run, *found)})
        messages = damage_messages(store)
    return ActionResult("results export", {"runs": runs}, messages)


def _in_full(
    run: evidence.StoredRun,
    samples: Iterable[tuple[str, Sample]],
    summaries: Sequence[evidence.SummaryRecord],
    verdicts: Sequence[evidence.VerdictRecord],
) -> dict[str, Any]:
    """Everything that is kept of a run beside its head."""
    return {
        "arms": [arm_json(arm) for arm in run.record.arms],
        "samples": [{"arm": arm, **sample_json(one)} for arm, one in samples],
        "summaries": [asdict(one) for one in summaries],
        "verdicts": [asdict(one) for one in verdicts],
    }


def export_bundle(ctx: Context, numbers: Sequence[int]) -> ActionResult:
    """Runs as a bundle that may be handed out: no samples, texts, paths, or names of hosts and accounts.

    Raises:
        UsageError: there is no such run, or nothing of them can be told so.
    """
    cards = ctx.gpu.read().gpus or ()
    entries: list[Entry] = []
    with _opened(ctx, next(iter(numbers), 0)) as store:
        for number in numbers:
            found = store.evidence(run_of(store, number))
            record = found.run.record
            # A bench has what the server calls its model, which may be anything.
            told = None if record.kind == "bench" else record.model_name
            own = _main_models(ctx, record.arms)
            models = {arm.name: model_of(own.get(arm.name), told) for arm in record.arms}
            entries += entries_of(record.arms, found.samples, models, cards)
        messages = damage_messages(store)
    if not entries:
        raise UsageError(
            "nothing of these runs can be exported",
            cause="no arm has both figures and flags of a profile",
            hint="--format json has all of them",
        )
    bundle = Bundle(
        format="tunerd-results",
        version=1,
        written_by=f"tunerd {__version__}",
        entries=tuple(entries),
    )
    payload = bundle.model_dump(mode="json", by_alias=True, exclude_none=True)
    return ActionResult("results export", payload, messages)


class StalenessCheck:
    """Compares evidence with the machine as it is now, read once."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.reader = FingerprintReader(ctx)
        self._live = ctx.deployed()
        self._live_print: fingerprint.Fingerprint | None = None
        self._workloads: dict[tuple[str | None, str | None], str | None] = {}
        self.messages: tuple[Message, ...] = ()
        if self._live is not None:
            now = self.reader.of_generation(self._live)
            self._live_print = now.fingerprint
            self.messages = tuple(
                warning("cannot-tell", f"of what serves now: {problem}") for problem in now.problems
            )

    def of(self, arm: evidence.ArmRecord, run: evidence.RunRecord) -> evidence.Validity:
        """Whether what an arm of a run showed still holds."""
        if arm.argv is None:
            text = "it was measured by its address only, so what ran there is not known"
            return evidence.Validity(None, (text,), (), None)
        then = arm.fingerprint
        workload = (run.workload, then.workload_sha256)
        if workload not in self._workloads:  # it reads all profiles, and a sweep has dozens of arms
            self._workloads[workload] = workload_sha256_now(self._ctx, *workload)
        now = self.reader.of(arm.argv, arm.environment, workload_sha256=self._workloads[workload])
        found = fingerprint.changes(then, now.fingerprint)
        return evidence.Validity(
            holds=fingerprint.holds(then, now.fingerprint),
            texts=(*(one.text for one in found if not one.is_remark), *now.problems),
            remarks=tuple(one.text for one in found if one.is_remark),
            differs_from_live=self._differences(arm),
            holds_at=fingerprint.holds_at(then, now.fingerprint),
        )

    def rows(self, run: evidence.StoredRun) -> list[dict[str, Any]]:
        """The same of each arm of a run, as scripts read it."""
        return [{"arm": arm.name, **plain(self.of(arm, run.record))} for arm in run.record.arms]

    def _differences(self, arm: evidence.ArmRecord) -> tuple[str, ...] | None:
        """What the serving command line has otherwise; empty where it is the very same server."""
        if self._live is None or self._live_print is None or arm.argv is None:
            return None
        found = list(argument_changes(arm.argv, self._live.argv))
        then = arm.fingerprint
        engines = (then.engine_sha256, self._live_print.engine_sha256)
        if None not in engines and engines[0] != engines[1]:
            found.insert(0, f"engine {arm.engine or 'unknown'} -> {self._live.engine or 'unknown'}")
        models = (then.model_sha256, self._live_print.model_sha256)
        if None not in models and models[0] != models[1]:
            found.insert(0, "another model")
        return tuple(found)


def _run_json(run: evidence.StoredRun) -> dict[str, Any]:
    """A run as scripts read it."""
    head = plain(replace(run.record, arms=()))
    head["model"] = head.pop("model_name")
    del head["arms"]
    return {
        "run": run.number,
        **head,
        "ended_s": run.ended_s,
        "outcome": None if run.outcome is None else str(run.outcome),
        "reason": run.reason,
        "arm_names": [arm.name for arm in run.record.arms],
        "samples": run.n_samples,
        "left_out": run.n_unusable,
    }


def arm_json(arm: evidence.ArmRecord) -> dict[str, Any]:
    """An arm as scripts read it."""
    return {
        **plain(arm),
        "origins": [
            {"flag": flag, "key": key, "origin": origin} for flag, key, origin in arm.origins
        ],
        "fingerprint": {"sha256": arm.fingerprint.sha256, **arm.fingerprint.to_json()},
    }


def sample_json(sample: Sample) -> dict[str, Any]:
    """A sample as scripts read it; what is missing is null."""
    return {**plain(sample), "usable": sample.is_usable}


@contextmanager
def ending(
    ctx: Context, store: EvidenceStore, number: Callable[[], int | None]
) -> Iterator[list[str]]:
    """Writes how a run ended, whatever happens; it failed where a problem is added to what this gives.

    Args:
        ctx: Where.
        store: Where it is kept.
        number: Of the run; None where none was begun.
    """
    problems: list[str] = []
    outcome, reason = evidence.RunOutcome.FAILED, None
    try:
        yield problems
        outcome = evidence.RunOutcome.FAILED if problems else evidence.RunOutcome.DONE
        reason = problems[0] if problems else None
    except BaseException as error:
        is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        if is_stopped or isinstance(error, LeaseEnded):
            outcome = evidence.RunOutcome.STOPPED
        if is_stopped and (run := number()) is not None:
            error.add_note(f"what was measured until then is kept: `tunerd results show {run}`")
        reason = words_of(error)
        raise
    finally:
        if (run := number()) is not None:
            store.end_run(run, outcome, ended_s=ctx.clock.now_s(), reason=reason)


def rates_seen(ctx: Context, profile: str) -> Rates:
    """How fast the profile was when it was measured last; usual speeds where it never was."""
    with reading(ctx) as store:
        for run in () if store is None else store.runs(limit=_LOOK_BACK):
            if store is None or run.record.profile != profile or not run.n_samples:
                continue
            found = summarise(store.samples(run.number))
            if found.decode.tok_s is not None:
                return Rates(found.prompt.tok_s, found.decode.tok_s)
    return USUAL_RATES


@contextmanager
def _opened(ctx: Context, number: int) -> Iterator[EvidenceStore]:
    """The store for this run, which cannot be there without one."""
    with reading(ctx) as store:
        if store is None:
            raise _unknown(number)
        yield store


def damage_messages(store: EvidenceStore) -> tuple[Message, ...]:
    """One warning for each kind of row that was left out so far as damaged."""
    return tuple(warning("damaged-rows", one.text) for one in store.damage)


def dropped_message(run: evidence.StoredRun) -> tuple[Message, ...]:
    """That what was asked in a run is not kept any more."""
    if run.record.dropped is None:
        return ()
    text = f"the starts and requests of sweep {run.number} are no longer kept, but for its pairs"
    return (note("requests-dropped", text, "`sweep.keep_days` says how long they are"),)


def run_of(store: EvidenceStore, number: int) -> evidence.StoredRun:
    """The run of this number.

    Raises:
        UsageError: there is none.
        HostError: its own row is damaged.
    """
    run = store.run(number)
    if run is not None:
        return run
    for one in store.damage:
        if one.table == "runs" and one.run == number:
            raise HostError(
                f"run {number} cannot be read", cause=one.text,
                state="nothing was changed; the other runs can be read",
                hint="`tunerd results list` lists them",
            )  # fmt: skip
    raise _unknown(number)


def _unknown(number: int) -> UsageError:
    return UsageError(f"there is no run {number}", hint="`tunerd results list` lists what there is")


def _left_out(by_arm: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """How many samples no average may have, by arm and reason."""
    return [
        {"arm": arm, "reason": reason, "samples": n,
         "problems": dict(count_problems(measured)) if reason == NO_ANSWER else {}}
        for arm, measured in by_arm.items()
        for reason, n in count_marks(measured).items()
    ]  # fmt: skip


# Results that travel: settings and figures without texts, names of hosts, paths or accounts, and what fits here.
# What others measured is never evidence of this box: it only says what a sweep may try first. A bundle is taken for
# hostile: it is bounded, of one version, and every word and number of it is held to what it may be.

VERSION = 1
MOST_BYTES = 1024 * 1024
# A start takes minutes of a night that is short.
MOST_CANDIDATES = 3
_SAME_CARD = 0.1  # of its memory: drivers and write-ups round it

_TYPE, _CACHE_TYPE = "speculation.type", "serving.cache_type_k"
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
    """The model, by the name in its header; `sha256` is over its size and header."""

    name: Words
    sha256: Hash | None = None


class Values(Part):
    """The settings that a sweep tries, by their keys in a profile; what is missing was not told."""

    spec: Annotated[Word | None, Field(alias=_TYPE)] = None
    n_max: Annotated[int | None, Field(alias="speculation.n_max", ge=0, le=1000)] = None
    p_min: Annotated[float | None, Field(alias="speculation.p_min", ge=0, le=1)] = None
    fit_mib: Annotated[int | None, Field(alias="memory.fit_mib", ge=0, le=10**6)] = None
    kv: Annotated[Word | None, Field(alias=_CACHE_TYPE)] = None
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
        if place == "version" and first["type"] != "missing":
            given = str(first["input"])[:40]
            raise _refused(where, f"it has version {given!a}, and this tunerd reads version {VERSION}") from problem  # fmt: skip
        raise _refused(where, f"{place or 'the file'}: {first['msg'][:200]}") from problem


def _refused(where: str, why: str) -> ConfigError:
    return ConfigError(
        f"not a bundle of results: `{where}`",
        cause=why,
        state="nothing was imported",
        hint="`tunerd results export RUN --format bundle` writes one; docs/neighbours.md",
    )


# What a run of this box becomes


def _main_models(
    ctx: Context, arms: Sequence[evidence.ArmRecord]
) -> Mapping[str, ModelFacts | None]:
    """Each arm's model, as far as that can be told."""
    with suppress(TunerdError):
        reader = FingerprintReader(ctx)
        return {arm.name: reader.main_model(arm.argv, arm.fingerprint) for arm in arms}
    return {}


def model_of(facts: ModelFacts | None, told: str | None) -> Model:
    """A model by its header, else by what it was called; its hash is the same wherever its files are."""
    name = _words((facts and facts.name) or told or "", "unnamed")
    return Model(name=name, sha256=None if facts is None else facts.identity.same_sha256)


def entries_of(arms: Sequence[evidence.ArmRecord], samples: Mapping[str, Sequence[Sample]], models: Mapping[str, Model], cards: Sequence[Gpu]) -> Iterator[Entry]:  # fmt: skip
    """Entries of the arms whose flags are known, and that have figures.

    Args:
        arms: Of a run.
        samples: By arm.
        models: Of each arm.
        cards: Of this machine now; where they are others than were measured, none is told.
    """
    for arm in arms:
        by_case: dict[str, list[Sample]] = {}
        for one in samples.get(arm.name, ()):
            if one.is_usable:
                by_case.setdefault(_words(_case(one), "case"), []).append(one)
        figures = tuple(_figure(case, found) for case, found in by_case.items())
        values = _values(arm.origins)
        if values is not None and any(figures):
            names = tuple(gpu.name for gpu in cards)
            now = fingerprint.Fingerprint(
                gpu_names=names, gpu_memory_mib=tuple(gpu.total_mib for gpu in cards)
            )
            same = len(cards) == 1 and fingerprint.on_same_cards(arm.fingerprint, now)
            card = Card(name=_words(names[0], "card"), memory_mib=cards[0].total_mib) if same and cards[0].total_mib else None  # fmt: skip
            yield Entry(
                source=f"measured by tunerd {__version__}",
                card=card,
                engine=Build(
                    family=arm.family if arm.family in set(Family) else "unknown",  # type: ignore[arg-type]
                    version=None if arm.engine_version is None else _words(arm.engine_version, "unknown"),
                    sha256=arm.fingerprint.engine_sha256,
                ),
                model=models[arm.name],
                settings=values,
                figures=tuple(one for one in figures if one is not None),
            )  # fmt: skip


def _case(one: Sample) -> str:
    """What it asked; a class of a workload goes by its number, since its owner named it."""
    number = one.details.get("class")
    return f"{one.suite} {one.case if number is None else f'class {number + 1}'}"


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
    keys = {field.alias for field in Values.model_fields.values()}
    found: dict[str, Any] = {_TYPE: OFF}
    for text, key, _who in origins:
        flag, _, value = text.partition(" ")
        if not flag.startswith("-"):
            continue
        if key == DRAFT_MODEL and found[_TYPE] == OFF:  # older builds draft where one is named
            found[_TYPE] = DRAFT
        elif key == _TYPE:
            stage, _, inside = value.partition(":")
            found[_TYPE] = own_kinds(stage) or "mtp"
            found |= {f"speculation.{part}": said for part, _, said in (one.partition("=") for one in inside.split(",")) if part in {"n_max", "p_min"}}  # fmt: skip
        elif key in keys:
            found[key] = value
    of_v = (text.partition(" ")[2] for text, key, _ in origins if key == "serving.cache_type_v")
    if found.get(_CACHE_TYPE) != next(of_v, None):  # one word tells of both
        found.pop(_CACHE_TYPE, None)
    try:
        return Values.model_validate(found, strict=False)  # its numbers are words of a command line
    except ValueError:
        return None


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
        return "it does not name its card"
    if entry.card is not None and not any(_is_same_card(entry.card, one) for one in here.cards):
        return f"it is for another card: {entry.card.name}, {entry.card.memory_mib} MiB"
    has_hashes = entry.model.sha256 is not None and here.model_sha256 is not None
    if not (has_hashes and entry.model.sha256 == here.model_sha256) and not _is_same_model(entry.model.name, here.model):  # fmt: skip
        return f"it is for another model: {entry.model.name}"
    if entry.engine.family not in here.engines.values():
        return f"no engine of its family is installed: {entry.engine.family}"
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


def _arm_of(entry: Entry, here: Here, base: Arm) -> Arm:
    """What serves, with the settings that an entry tells."""
    family = entry.engine.family
    engine = next(name for name, one in here.engines.items() if one == family)
    told = {one.name for one in fields(Arm)} & set(Values.model_fields)
    given = {name: value for name in told if (value := getattr(entry.settings, name)) is not None}
    if given.get("spec") == OFF:
        given |= {"n_max": 0, "p_min": 0.0}
    return replace(base, engine=base.engine if here.engines.get(base.engine) == family else engine, **given)  # fmt: skip


def candidates(
    entries: Sequence[Entry], here: Here, base: Arm, may_try: Callable[[Arm], bool]
) -> tuple[Arm, ...]:
    """The fastest few that fit and may be tried, each once, without what serves."""
    fitting = [entry for entry in entries if entry.figures and why_not(entry, here) is None]
    fitting.sort(key=lambda entry: -fmean(one.tok_s for one in entry.figures))
    arms = dict.fromkeys(_arm_of(entry, here, base).canonical() for entry in fitting)
    new = (arm for arm in arms if arm != base.canonical() and may_try(arm))
    return tuple(new)[:MOST_CANDIDATES]


def here_of(ctx: Context, made: Plan) -> Here:
    """This box as a plan of what serves has it."""
    engines = {one.name: one for one in (made.engine, *find_engines(ctx))}
    families = {name: str(one.capabilities.family) for name, one in engines.items() if one.capabilities is not None}  # fmt: skip
    return Here(
        cards_of(made.host, made), made.facts.name, made.facts.identity.same_sha256, families
    )


def here_now(ctx: Context) -> Here | None:
    """This box by what serves; None where nothing does that a profile deployed, or it cannot be planned again."""
    generation = ctx.deployed()
    if generation is None or generation.profile is None:
        return None
    try:
        return here_of(ctx, make_plan(ctx, request_again(generation)))
    except TunerdError:
        return None


# What was imported


def imported(ctx: Context) -> dict[str, Bundle]:
    """The bundles that were imported, by their number; one that cannot be read any more is left out."""
    return {name: one for name, one in _kept(ctx) if isinstance(one, Bundle)}


def _kept(ctx: Context) -> Iterator[tuple[str, Bundle | TunerdError]]:
    """Each that was imported by its number, or why it cannot be read any more."""
    for path in sorted(ctx.paths.imported_dir.glob("*.json")):
        try:
            yield path.stem, read_bundle(ctx.files.read(path) or b"", str(path))
        except (ConfigError, HostError) as problem:
            yield path.stem, problem


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
        note("candidates-only", "none of it counts as measured here: a sweep tries the fastest of what fits first",
             None if all(row["why_not"] for row in rows) else "`tunerd sweep run --dry-run` shows its first candidates"),
    )  # fmt: skip
    if here is None:
        text = "nothing serves here to compare it with: planning a sweep shows what fits"
        messages = (*messages, warning("not-compared", text))
    return ActionResult("results import", {"entries": rows}, messages, has_acted=True)


def forget(ctx: Context, name: str) -> ActionResult:
    """Remove an imported bundle.

    Raises:
        UsageError: there is none of this name.
    """
    path = ctx.paths.imported_dir / f"{name}.json"
    if not re.fullmatch(r"[0-9a-f]{12}", name) or not path.exists():
        text = f"no bundle {name[:40]!a} was imported"
        raise UsageError(text, hint="`tunerd results list` lists them")
    ctx.files.remove(path)
    return ActionResult("results forget", {"bundle": name}, has_acted=True)
