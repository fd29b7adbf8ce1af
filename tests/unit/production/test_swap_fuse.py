"""A swap is cut short, or fails, at each of its effects in turn; afterwards one whole unit serves.

`TUNERD_TEST_FAULTS=1` tries every effect, and every pair of them, where by default a sample is tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.fault.campaign import IS_CAMPAIGN
from tests.fault.fuse import Burn, Fuse, Kind, Life, Step, ctrl_c, full_disk
from tests.fault.scenarios import ARM, SCENARIOS, TUNED, Scenario, deploy, locked_swap
from tests.fault.world import BROKEN, UNIT, Snapshot, World, a_world
from tests.support.ports import free_port
from tunerd.errors import DeployError, RolledBack, Stranded, TunerdError
from tunerd.production.recover import recover
from tunerd.production.swap import SwapRequest
from tunerd.profile.files import (
    failure_of,
    read_declined,
    read_tuned,
    remember_failure,
    write_tuned,
)
from tunerd.records import plain
from tunerd.units.generations import Outcome

PORT = free_port()
MOST = 400
_FEW = 6
EDITED = b"# edited by hand\n[Service]\nExecStart=/bin/true --port 0 --alias edited\n"


class Case:
    """A scenario, and how the world looks before it and after it."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.scenario = scenario
        self.problems: list[str] = []
        self.n_tried = 0
        self._folder = folder
        with self._world("whole") as world:
            self.before = world.snapshot()
            with contextlib.suppress(RolledBack):
                scenario.act(world.context(), world)
            self.after = world.snapshot()
            assert world.leftovers() == []
        assert (self.before == self.after) == scenario.fails

    @contextlib.contextmanager
    def _world(self, name: str) -> Iterator[World]:
        with a_world(self._folder / name) as world:
            world.port = PORT
            self.scenario.prepare(world)
            yield world

    def worlds(self, *, every: int) -> Iterator[tuple[int, World]]:
        """Fresh worlds before the swap, numbered, without end; all in a campaign, else one of so many."""
        every = 1 if IS_CAMPAIGN else every
        for number in range(SCENARIOS.index(self.scenario) % every, MOST, every):
            self.n_tried += 1
            with self._world(f"{number}") as world:
                yield number, world
        raise AssertionError("it has no end")

    def kills(self, *, every: int) -> Iterator[tuple[int, World, Step]]:
        """Worlds in which the swap was killed before each of its effects in turn."""
        for number, world in self.worlds(every=every):
            step = self.kill(world, number)
            if step is None:
                return
            yield number, world, step

    def kill(self, world: World, number: int) -> Step | None:
        """Kill the swap before this effect; None if it has fewer."""
        life = Life(world.paths.lock)
        context = world.context(Fuse(number, life.die))
        life.live(lambda: self.scenario.act(context, world))
        return life.died_before

    def kill_twice(self, number: int, second: int) -> int:
        """Kill the swap, then its recovery; how many of the two had as many effects."""
        self.n_tried += 1
        with self._world(f"{number}-{second}") as world:
            step = self.kill(world, number)
            if step is None:
                return 0
            life = Life(world.paths.lock)
            context = world.context(Fuse(second, life.die))
            life.live(lambda: recover(context))
            if life.died_before is None:
                return 1
            where = f"killed before {number} ({step.text}), {second} ({life.died_before.text})"
            self.note(where, one_whole_unit_stands=world.standing in self.whole_texts(world))
            world.recover()
            self.check(world, where)
            return 2

    def whole_texts(self, world: World) -> set[bytes | None]:
        """What may stand while a swap is cut short."""
        return {self.before.text, self.after.text, world.text("new", program=BROKEN)}

    @property
    def good_end(self) -> Outcome:
        """What history calls the good end of this swap."""
        return Outcome.SERVING if self.after.is_active else Outcome.REMOVED

    def attempts(
        self,
        happens: Burn,
        *,
        of: Kind | None = None,
        until: int | None = None,
        asks: bool = False,
        every: int = _FEW,
    ) -> Iterator[tuple[str, World, BaseException | None]]:
        """Worlds in which this happened at each effect in turn: where, and what the swap raised."""
        for number, world in self.worlds(every=every):
            fuse, raised = Fuse(number, happens, of=of, until=until), None
            self.world = world
            try:
                self.scenario.act(world.context(fuse, asks=asks), world)
            except (TunerdError, KeyboardInterrupt) as error:
                raised = error
            if not fuse.burnt:
                return
            yield (
                f"{happens.__name__} at {number} ({fuse.burnt[0].text}): {raised!r}",
                world,
                raised,
            )

    def note(self, where: str, **checks: bool) -> None:
        """Keep what does not hold."""
        self.problems += [f"{where}: {name}" for name, holds in checks.items() if not holds]

    def check(self, world: World, where: str) -> Snapshot:
        """One whole unit must serve, and nothing be left of the swap."""
        found = world.snapshot()
        outcomes = world.outcomes()
        serving = world.context().generations.serving(UNIT)
        is_new = found == self.after != self.before
        kept = [path.read_bytes() for path in world.backups()]
        if found not in {self.before, self.after}:
            self.problems.append(f"{where}: {found}")
        if world.leftovers():
            self.problems.append(f"{where}: left over {world.leftovers()}")
        self.note(
            where,
            every_generation_has_an_ending=Outcome.RUNNING not in outcomes,
            history_knows_what_serves=not is_new or outcomes[0] is self.good_end,
            the_old_unit_is_kept=not is_new or self.before.text in {None, *kept},
            verify_agrees=serving is None or world.verify() == 0,
            nothing_is_left_to_recover=world.recover() is None,
        )
        return found

    def is_right(self) -> bool:
        """Whether all held; fails with everything that did not."""
        assert not self.problems, "\n".join(self.problems)
        assert self.n_tried > 2
        return True


def scenarios(first: int, every: int = 2) -> pytest.MarkDecorator:
    """All in a campaign, else one of so many."""
    chosen = SCENARIOS if IS_CAMPAIGN else SCENARIOS[first::every]
    return pytest.mark.parametrize("case", chosen, ids=str, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest, folder: Path) -> Case:
    return Case(folder, request.param)


@scenarios(0, every=1)
def test_after_a_kill_at_each_effect_recovery_leaves_one_whole_unit(case: Case) -> None:
    ends: list[bool] = []
    for number, world, step in case.kills(every=4):
        where = f"killed before {number} ({step.text})"
        case.note(where, nobody_is_said_to_have_edited="unit-edited" not in world.drift())
        world.recover()
        ends.append(case.check(world, where) == case.after)

    if not case.scenario.fails:
        assert set(ends) == {False, True}
    _keeps_what_it_kept(case, ends)


def _keeps_what_it_kept(case: Case, ends: list[bool]) -> None:
    assert case.is_right()
    if not case.scenario.fails:
        assert ends == sorted(ends), "once the new unit is kept, it is kept from then on"


@pytest.mark.parametrize("before", [None, 6])
@pytest.mark.parametrize(
    ("reason", "new"),
    [("promote", "tuned"), ("guard", "old"), ("rollback", "old"), ("rollback", "tuned")],
)
def test_after_a_kill_at_each_effect_the_tuned_layer_is_in_force_just_where_what_it_is_of_serves(
    folder: Path, reason: str, new: str, before: int | None
) -> None:
    """The layer was written, or taken away, after the swap: a kill in between was never mended."""
    seen = set[bool]()
    first = 0 if before is None else 2
    for number in range(MOST) if IS_CAMPAIGN else range(first, MOST, 4):
        with a_world(folder / f"{number}") as world:
            world.port, ctx = PORT, world.context()
            deploy(ctx, world, "first", profile="night")
            if before is not None:
                write_tuned(ctx, replace(TUNED, sweep=before, generation=1))
            deploy(ctx, world, "old", profile="night")
            if reason == "promote":  # a person took it back once
                remember_failure(ctx, "night", ARM, None, "rolled back", sweep=TUNED.sweep)
            else:
                deploy(ctx, world, "tuned", profile="night")
                write_tuned(ctx, replace(TUNED, generation=3))
            if (reason, new) == ("rollback", "tuned"):
                locked_swap(ctx, _of_profile(world, "old", reason))
            request, life = _of_profile(world, new, reason), Life(world.paths.lock)
            life.live(partial(locked_swap, world.context(Fuse(number, life.die)), request))
            if life.died_before is None:
                break
            world.recover()
            serves_tuned = world.serving_alias() == "tuned"
            where = f"killed before {number} ({life.died_before.text})"
            layer = read_tuned(ctx, "night")
            assert (layer and layer.sweep) == (TUNED.sweep if serves_tuned else before), where
            assert (failure_of(ctx, "night", ARM) is None) is serves_tuned, where
            if reason == "rollback":
                assert (read_declined(ctx, "night") is None) is serves_tuned, where
            seen.add(serves_tuned)
    assert seen == {False, True}


def _of_profile(world: World, alias: str, reason: str) -> SwapRequest:
    request = world.request(world.text(alias), alias=alias)
    made = replace(request.generation, profile="night", reason=reason)
    return replace(request, generation=made, tuned=None if reason == "rollback" else plain(TUNED))


@scenarios(0)
def test_after_a_kill_and_a_reboot_recovery_leaves_one_whole_unit(case: Case) -> None:
    ends: list[bool] = []
    for number, world, step in case.kills(every=_FEW):
        world.reboot()
        stands = case.after if world.outcomes()[:1] == [Outcome.SERVING] else case.before
        if stands.is_active and not stands.is_enabled:
            continue  # nothing of it starts at boot
        world.recover()
        ends.append(case.check(world, f"cut before {number} ({step.text})") == case.after)

    _keeps_what_it_kept(case, ends)


@scenarios(1)
def test_after_a_kill_in_the_recovery_from_a_kill_the_next_one_ends_it(case: Case) -> None:
    n_killed, number = 2, 0
    while n_killed > 0:
        seconds = range(MOST) if IS_CAMPAIGN else [number * 5 % 13]
        for second in seconds:
            n_killed = case.kill_twice(number, second)
            if n_killed < 2:
                break
        number += 1 if IS_CAMPAIGN else 6

    assert case.is_right()


def _is_as_said(case: Case, world: World, error: BaseException | None, where: str) -> None:
    """The machine is in the state that the end of the swap tells, before anybody recovers."""
    found = world.snapshot()
    if error is None:
        case.note(where, done_means_the_new_unit_serves=found == case.after)
    elif not isinstance(error, Stranded):
        case.note(
            where,
            an_error_is_one_of_a_swap=isinstance(error, DeployError | KeyboardInterrupt),
            refused_or_rolled_back_means_as_before=found == case.before,
        )


@scenarios(0)
def test_an_effect_that_fails_leaves_the_machine_as_the_error_says(case: Case) -> None:
    for where, world, error in case.attempts(full_disk):
        _is_as_said(case, world, error, where)
        if isinstance(error, Stranded):
            case.note(where, one_failure_strands_no_good_swap=case.scenario.fails)
        world.recover()
        case.check(world, where)

    assert case.is_right()


@scenarios(1)
@pytest.mark.parametrize("kind", Kind)
def test_effects_that_fail_from_one_on_leave_what_recovery_can_mend(case: Case, kind: Kind) -> None:
    failing = case.attempts(full_disk, until=MOST, of=kind, every=2 if kind is Kind.UNITS else _FEW)
    for where, world, error in failing:
        _is_as_said(case, world, error, where)
        world.recover()
        case.check(world, where)

    assert case.is_right()


@scenarios(1)
def test_a_question_that_fails_leaves_the_machine_as_the_error_says(case: Case) -> None:
    for where, world, error in case.attempts(full_disk, of=Kind.UNITS, asks=True):
        is_early = isinstance(error, TunerdError) and not isinstance(error, DeployError)
        # What is asked before the swap begins fails as itself.
        _is_as_said(case, world, RolledBack("") if is_early else error, where)
        world.recover()
        case.check(world, where)

    assert case.is_right()


@scenarios(0)
def test_ctrl_c_at_each_effect_leaves_the_machine_as_before_or_comes_too_late(case: Case) -> None:
    for where, world, error in case.attempts(ctrl_c):
        _is_as_said(case, world, error, where)
        case.check(world, where)

    assert case.is_right()


@scenarios(1)
def test_an_edit_by_hand_in_the_middle_is_never_overwritten(case: Case) -> None:
    def edit(_step: Step) -> None:
        case.world.unit_path.write_bytes(EDITED)

    for where, world, error in case.attempts(edit):
        world.recover()
        case.note(
            where,
            the_edit_stands=world.standing == EDITED,
            nothing_is_left=world.leftovers() == [],
            every_generation_has_an_ending=Outcome.RUNNING not in world.outcomes(),
        )
        if case.before.text is not None:
            kept = [path.read_bytes() for path in world.backups()]
            was_kept = case.before.text in kept or error is not None
            case.note(where, the_old_unit_is_kept=was_kept)

    assert case.is_right()
