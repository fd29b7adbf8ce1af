"""The study that boxes of one class share while they sweep: told arms, laws, winners, and who tries what."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from tunerd.app import Context
from tunerd.engine.choice import locate
from tunerd.errors import TunerdError
from tunerd.fleet.shared import Database, box_id, opened, told
from tunerd.model.files import ModelFiles
from tunerd.profile.arm import DRAFT_MODEL, Arm
from tunerd.records import plain, read, read_or_none
from tunerd.sweep.known import Law, Study, Told, known_of
from tunerd.sweep.plan import PreparedSweep
from tunerd.words import digest

# What is read of others, the newest: a night tells of some hundred arms.
_MOST = 1000
_LONGEST = 1 << 16  # letters of one; a law has some hundred
_WINNERS = 3
_KEPT_DAYS = 90
_LARGEST = 1 << 24  # of the sizes in an arm's `extra`
_MOST_RATIO = 3.0  # of turn times, as a log: 20 times as long is no speed of a server that serves
# A database that did not answer is not asked again for so long: a night has better to do [s].
_AGAIN_S = 300.0
_Found = TypeVar("_Found")
_ARM, _LAW, _WINNER = "arm", "law", "winner"


@contextlib.contextmanager
def meet(ctx: Context, prepared: PreparedSweep) -> Iterator[Study]:
    """The study of this box's class; where it cannot be reached the night goes on alone, and says so."""
    if prepared.base_plan.host.gpus is None:
        ctx.say("this box sweeps alone: its card is not known")
        yield Study(prepared.known)
        return
    drafts, builds = drafts_of(ctx, prepared), prepared.seen.identities
    engines = {name: sha for name, sha in builds.items() if sha is not None}
    try:
        box_id(ctx)  # which may have to be made, and cannot be where somebody else makes it
        database = opened(ctx, writable=True)
    except TunerdError as problem:
        ctx.say(f"this box sweeps alone: {problem.message}")
        yield Study(prepared.known)
        return
    with contextlib.closing(database):
        ours, n_texts = class_of(prepared, drafts.values()), len(prepared.workload.classes)
        study = SharedStudy(ctx, database, ours, engines, n_texts, drafts=drafts)
        study.begin()
        study.known = {**prepared.known, **study.known}
        try:
            yield study
        finally:
            study.close()


def class_of(prepared: PreparedSweep, drafts: Iterable[str] = ()) -> str:
    """One hash over what boxes must have in common to learn from each other; builds are told apart by arm.

    How often drafts are right is told by kind of speculation: another draft model would be taken for this one.
    """
    plan, gpus = prepared.base_plan, prepared.base_plan.host.gpus or ()
    return digest(
        {
            # In GiB: of the same card one driver counts more than another.
            "gpus": [[gpu.name, round((gpu.total_mib or 0) / 1024)] for gpu in gpus],
            "model": plan.facts.identity.same_sha256,
            "workload": prepared.shape.sha256,
            "context": prepared.policy.context_tokens,
            "drafts": sorted(drafts),
            "slots": prepared.policy.n_slots,
            # Its arms differ in context, of which the laws of a search for speed know nothing.
            "goal": "speed" if prepared.policy.at_least_tok_s is None else "context",
        }
    )


def drafts_of(ctx: Context, prepared: PreparedSweep) -> dict[str, str]:
    """What is in each draft model, by its name here; the file's name where it cannot be read."""
    plan = prepared.base_plan
    extras = (extra for one in prepared.space.space.families.values() for extra in one.extra)
    named = {value for extra in extras for key, value in extra if key == DRAFT_MODEL}
    named.add(plan.resolved.profile.speculation.draft_model)
    models, found = ModelFiles(ctx.paths.cache_dir, ctx.files), {}
    for name in (str(one) for one in named if one is not None):
        try:
            facts = models.read_facts(locate(ctx, name, plan.resolved))
            found[name] = facts.identity.same_sha256
        except TunerdError:
            found[name] = Path(name).name
    return found


class SharedStudy(Study):
    """A `Study` on PostgreSQL. What fails is said once, and the night goes on with what it has.

    Args:
        ctx: Where.
        database: The shared store.
        ours: The class, as `class_of`.
        engines: Builds by their names here.
        n_texts: Classes of the workload.
        drafts: What is in draft models, by their names here.
    """

    def __init__(
        self, ctx: Context, database: Database, ours: str, engines: Mapping[str, str], n_texts: int,
        *, drafts: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._ctx = ctx
        self._database = database
        self._class = ours
        self._box = box_id(ctx)
        self._builds = dict(engines)
        self._names = {sha: name for name, sha in engines.items()}
        self._drafts = dict(drafts or {})
        self._draft_names = {told: name for name, told in self._drafts.items()}
        self._n_texts = n_texts
        self._seen = 0
        self._unsent: list[dict[str, Any]] = []
        self._away_until_s = 0.0

    def begin(self) -> None:
        """Read what nights before left behind; arms told meanwhile come as news."""
        rows = self._told(told.c.kind != _ARM)
        laws = {
            (row.box_id, str(row.body.get("engine")), str(row.body.get("spec"))): row.body
            for row in rows
            if row.kind == _LAW
        }
        sound = [
            ((self._names[engine], spec), law)
            for (_, engine, spec), body in laws.items()
            if engine in self._names and (law := read_or_none(Law, body.get("law"))) is not None
        ]
        self.known = known_of(sound, self._n_texts)
        told_arms = {row.box_id: row.body.get("arm") for row in rows if row.kind == _WINNER}
        newest = [arm for one in reversed(told_arms.values()) if (arm := self._here(one))]
        self.seeds = tuple(dict.fromkeys(newest))[:_WINNERS]

    def close(self) -> None:
        """Give back what is claimed, and tell what could not be told before."""
        self.lose()  # it may be back, and what is not told now is told by nobody
        self._put([])
        self._give_back()

    def news(self) -> Sequence[Told]:
        """What other boxes told of arms that this one could start."""
        self._give_back()  # whatever became of the arm that was claimed last, it is tried no longer
        rows = self._told((told.c.kind == _ARM) & (told.c.id > self._seen))
        self._seen = max((row.id for row in rows), default=self._seen)
        found = []
        for row in rows:
            arm, control = self._here(row.body.get("arm")), self._here(row.body.get("control"))
            ratio = row.body.get("log_ratio")
            is_ratio = isinstance(ratio, float) and abs(ratio) < _MOST_RATIO
            if arm is not None and control is not None and is_ratio:
                found.append(Told(arm, control, ratio, row.box_id))
        return found

    def claim(self, arm: Arm) -> bool:
        """Whether nobody else tries it; what the database does not answer is not waited for."""
        there = self._there(arm.with_margin(0))
        if there is None:
            return True
        key = int(digest({"class": self._class, "arm": there})[:15], 16)
        lock = sa.select(sa.func.pg_try_advisory_lock(key))
        return self._ask(self._database.claiming, lambda line: line.scalar(lock)) is not False

    def _give_back(self) -> None:
        self._ask(self._database.claiming, lambda _: None)

    def tell(self, told: Told) -> None:
        """What one process took here; kept until the database takes it."""
        arm, control = self._there(told.arm), self._there(told.control)
        if arm is not None and control is not None:
            self._put([(_ARM, {"arm": arm, "control": control, "log_ratio": told.log_ratio})])

    def lose(self, seconds: float = 0.0) -> None:
        """Ask nobody for so long, as after a database that did not answer; by default ask again at once."""
        self._away_until_s = self._ctx.clock.monotonic_s() + seconds

    def end(self, laws: Mapping[tuple[str, str], Law], winner: Arm | None) -> None:
        """What this box knows now, for those that come later; who searches on after that hears all of it again."""
        self._seen = 0
        rows: list[tuple[str, dict[str, Any]]] = [
            (_LAW, {"engine": self._builds[engine], "spec": spec, "law": plain(law)})
            for (engine, spec), law in laws.items()
            if engine in self._builds
        ]
        if winner is not None and (arm := self._there(winner)) is not None:
            rows.append((_WINNER, {"arm": arm}))
        self._put(rows)

    def _there(self, arm: Arm) -> dict[str, Any] | None:
        """An arm as all boxes understand it: build and draft model by what they are; None where that is not known."""
        try:
            data = plain(_drafting(arm.canonical(), self._drafts))
            return {**data, "engine": self._builds[arm.engine]}
        except KeyError:
            return None

    def _here(self, data: Any) -> Arm | None:
        """An arm that was told, where this box has the build; None where not, or it is none."""
        try:
            arm = read(Arm, data)
            # Whoever reads these takes them for numbers.
            sizes = (arm.n_cpu_moe or 0, arm.context_size)
            if arm.engine not in self._names or not all(0 <= one <= _LARGEST for one in sizes):
                return None
            name = self._names[arm.engine]
            return _drafting(replace(arm, engine=name), self._draft_names).canonical()
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def _told(self, which: sa.ColumnElement[bool]) -> Sequence[Any]:
        """Rows of others, oldest first."""
        theirs = (told.c.class_id == self._class) & (told.c.box_id != self._box) & which
        theirs &= sa.func.length(sa.cast(told.c.body, sa.Text)) < _LONGEST
        read = told.c.id, told.c.box_id, told.c.kind, told.c.body
        chosen = sa.select(*read).where(theirs).order_by(told.c.id.desc()).limit(_MOST)
        database = self._database
        rows = self._ask(database.reading, lambda connection: connection.execute(chosen).all())
        return [row for row in reversed(rows or ()) if isinstance(row.body, dict)]

    def _put(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Tell; what the database did not take is told with what comes next, and by its key never twice."""
        who = {"class_id": self._class, "box_id": self._box}
        new = ({"key": uuid.uuid4().hex, "kind": kind, "body": body} for kind, body in rows)
        self._unsent += [who | one for one in new]
        put = insert(told).on_conflict_do_nothing(index_elements=[told.c.key])
        unsent = self._unsent
        # What a box knows now is in the place of what it knew; arms age, as drivers and models of others do.
        mine = (told.c.class_id == self._class) & (told.c.box_id == self._box)
        outdated = told.c.kind.in_({row["kind"] for row in unsent} - {_ARM})
        age = sa.func.make_interval(0, 0, 0, _KEPT_DAYS)
        is_old = told.c.told_at < sa.func.clock_timestamp() - age

        def replace_and_put(connection: sa.Connection) -> bool:
            connection.execute(told.delete().where(mine & (outdated | is_old)))
            connection.execute(put, unsent)
            return True

        is_there = self._ask(self._database.writing, replace_and_put) if unsent else None
        if is_there:
            self._unsent = []

    def _ask(
        self,
        connected: Callable[[], AbstractContextManager[sa.Connection]],
        act: Callable[[sa.Connection], _Found],
    ) -> _Found | None:
        """None where the database does not answer: that ends no night, is said when it begins, and is tried again later."""
        now_s = self._ctx.clock.monotonic_s()
        if now_s < self._away_until_s:
            return None
        try:
            with connected() as connection:
                found = act(connection)
        except TunerdError as problem:
            if not self._away_until_s:
                self._ctx.say(f"nothing is heard from other boxes: {problem.message}")
            self._away_until_s = now_s + _AGAIN_S
            return None
        self._away_until_s = 0.0
        return found


def _drafting(arm: Arm, names: Mapping[str, str]) -> Arm:
    """The arm with another name of its draft model; KeyError where there is none."""
    pairs = ((key, names[value] if key == DRAFT_MODEL else value) for key, value in arm.extra)
    return replace(arm, extra=frozenset(pairs))
