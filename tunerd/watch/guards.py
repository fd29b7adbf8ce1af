"""The judgement of the guards: deaths, out of memory, hangs, upgrades. Readings in, decisions out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, TypeAlias

from tunerd.engine.health import FailureKind
from tunerd.profile.arm import Builds
from tunerd.watch.figures import Event, Reading

# A process that works on something uses more, one that waits for a lock that never comes does not; ik says
# nothing of its health while it reads a long prompt.
IDLE_CORES = 0.05


# What a guard may do: act, only say, or nothing at all.
Policy: TypeAlias = Literal["act", "advise", "off"]


class Act(StrEnum):
    """What is to be done about it."""

    NOTHING = "nothing"
    RAISE_MARGIN = "raise the fit margin"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Decision:
    """One change of state that a person should hear of, with its evidence, and what is done.

    `kind` is stable for scripts. `evidence` is what was seen, in numbers.
    """

    kind: str
    act: Act
    level: str
    text: str
    evidence: str
    hint: str | None = None


_HOUR_S = 3600.0
# One answer that is late may be the machine's fault.
_LEAST_FAILURES = 2
_ASK_AGAIN_S = 15.0
_SILENT_S = 60.0
# A restart of one that decays, which counts as well.
DECAYED = "drift-restart"
# What is told of a restart, and of having given up.
_RESTARTED, _GAVE_UP = "warning", "error"


@dataclass(slots=True)
class Hang:
    """What is known of a server that may hang, and how often it may be asked and restarted.

    `every_s` is how long nothing must have been generated before it is asked. Since when nothing was
    generated, how many questions went unanswered, and past restarts.
    """

    policy: Policy
    every_s: float
    restarts_per_hour: int
    restarts_s: tuple[float, ...] = ()
    has_given_up: bool = False
    life: str | None = None
    n_predicted: int | None = None
    good_s: float | None = None
    silent_since_s: float | None = None
    failures: int = 0
    asked_s: float | None = None

    def recall(self, told: Iterable[Event], now_s: float) -> None:
        """For a daemon that takes over: the hour's restarts count, whoever made them.

        Args:
            told: What daemons before it told, in any order.
            now_s: Seconds since the epoch.
        """
        recent = sorted(
            (
                event
                for event in told
                if event.kind in {"hang", DECAYED} and 0 <= now_s - event.at_s < _HOUR_S
            ),
            key=lambda event: event.at_s,
        )
        self.restarts_s = tuple(event.at_s for event in recent if event.level == _RESTARTED)
        self.has_given_up = bool(recent) and recent[-1].level == _GAVE_UP

    def forget(self) -> None:
        """Begin anew, but for what was done and said."""
        self.life = self.n_predicted = self.good_s = self.silent_since_s = self.asked_s = None
        self.failures = 0

    def look(self, seen: Reading, cores: float | None) -> bool:
        """Take a look into account; whether to ask for a tiny generation now.

        Args:
            seen: Now; its counter of tokens shows that it generates.
            cores: How many processors it kept busy since the look before.
        """
        engine = seen.engine
        if self.policy == "off" or engine.is_ready is not True or engine.is_asleep is not None:
            self.forget()
            return False
        n_predicted = None if engine.counters is None else engine.counters.n_predicted
        before = self.n_predicted
        has_generated = n_predicted is not None and before is not None and n_predicted > before
        if engine.life != self.life:
            self.forget()
            self.life, self.good_s = engine.life, seen.at_s
        elif has_generated or self.good_s is None:
            self.good_s, self.failures, self.has_given_up = seen.at_s, 0, False
        if max(self.good_s, self.asked_s or 0.0, self.silent_since_s or 0.0) > seen.at_s:
            # Times that a clock was set back from would keep it from asking until they come again.
            self.good_s, self.asked_s, self.silent_since_s = seen.at_s, None, None
        self.n_predicted = n_predicted
        is_silent = engine.is_busy is None and cores is not None and cores <= IDLE_CORES
        since_s = seen.at_s if self.silent_since_s is None else self.silent_since_s
        self.silent_since_s = since_s if is_silent else None
        return self._is_due(seen, cores)

    def _is_due(self, seen: Reading, cores: float | None) -> bool:
        is_busy, asked_s = seen.engine.is_busy, self.asked_s or 0.0
        if self.failures:
            # What was told of already is asked seldom: each question waits in a server that hangs.
            again_s = self.every_s if self.has_given_up else min(_ASK_AGAIN_S, self.every_s)
            # It rests, or is only busy with the question that it did not answer. Where it computes, somebody
            # else may have begun to wait for an answer: a restart would cut that.
            does_nothing = is_busy is False or (cores is not None and cores <= IDLE_CORES)
            return seen.at_s - asked_s >= again_s and does_nothing
        since_s = self.silent_since_s
        is_stuck = since_s is not None and seen.at_s - since_s >= _SILENT_S
        if is_busy is not False and not is_stuck:
            return False
        return seen.at_s - max(self.good_s or 0.0, asked_s) >= self.every_s

    def answered(self, at_s: float) -> None:
        """It generated."""
        self.good_s = self.asked_s = at_s
        self.failures, self.has_given_up = 0, False

    def refused(self, at_s: float) -> None:
        """It said that it does not do that: no sign of a hang, and none of the contrary."""
        self.asked_s, self.failures = at_s, 0

    def may_restart(self, at_s: float) -> bool:
        """Whether fewer restarts than allowed were in the last hour."""
        return len(self._recent(at_s)) < self.restarts_per_hour

    def _recent(self, at_s: float) -> tuple[float, ...]:
        """Those of the last hour; a time to come is one that a clock was set back from."""
        return tuple(one for one in self.restarts_s if 0 <= at_s - one < _HOUR_S)

    def unanswered(self, at_s: float, problem: str) -> Decision | None:
        """It did not generate; a decision when that happened often enough."""
        self.failures, self.asked_s = self.failures + 1, at_s
        if self.failures < _LEAST_FAILURES:
            return None
        evidence = f"health is ok, nobody else asks, and {self.failures} tiny generations failed: {problem}"
        recent = self._recent(at_s)
        text = "the server hangs"
        if self.policy == "advise" or not self.may_restart(at_s):
            if self.has_given_up:
                return None
            if self.policy == "act":
                text += f" again, though it was restarted {len(recent)} times within the hour; it is left alone now"
            hint = "restart it; `journalctl -k` may show errors of the card"
            self.has_given_up = True
            return Decision("hang", Act.NOTHING, _GAVE_UP, text, evidence, hint)
        self.forget()
        self.restarts_s, self.has_given_up = (*recent, at_s), False
        return Decision("hang", Act.RESTART, _RESTARTED, f"{text}, and is restarted", evidence)


_STEPS_MIB = (1664, 1792, 2048)
_STEP_BEYOND_MIB = 256
_STEP_MIB = 128
_LEAST_DEATHS = 2
_MOST_DEATHS = 5
# Deaths that are further apart are not one loop; as long without one, and it is over.
_WINDOW_S = 1800.0
# What a fit leaves free is seldom less than its margin, for it goes by whole layers.
_SHORT_RATIO = 2


@dataclass(frozen=True, slots=True)
class Seen:
    """What looks saw of one life: the least VRAM that was free, and whether it ever served."""

    life: str | None = None
    free_mib: int | None = None
    has_served: bool = False

    def then(self, life: str | None, free_mib: int | None, *, is_ready: bool) -> Seen:
        """After one more look, at a server that runs."""
        before = self if self.life == life else Seen(life)
        known = [mib for mib in (before.free_mib, free_mib) if mib is not None]
        return Seen(life, min(known, default=None), before.has_served or is_ready)


@dataclass(frozen=True, slots=True)
class Death:
    """A life of the server that ended by itself, and what the end of its log says of that.

    `has_given_up`: the service manager does not start it any more. `n` lives ended since the look before.
    """

    at_s: float
    kind: FailureKind
    words: str
    has_given_up: bool
    seen: Seen = Seen()
    n: int = 1


@dataclass(frozen=True, slots=True)
class Margin:
    """The deployed margin.

    `fit_mib` is None where the profile leaves it to the engine, or places the model by hand;
    `steps_taken` is how often this guard raised it since a person deployed something; `is_pinned` that
    a person fixed it; `left_alone` says why else it must not be touched. `counts_less`: it is ik's.
    """

    fit_mib: int | None
    steps_taken: int
    is_pinned: bool
    left_alone: str | None = None
    counts_less: bool = False

    @property
    def next_mib(self) -> int | None:
        """The next larger one."""
        fit_mib = self.fit_mib
        if fit_mib is None:
            return None
        if not self.counts_less:
            return fit_mib + _STEP_MIB
        return next((step for step in _STEPS_MIB if step > fit_mib), fit_mib + _STEP_BEYOND_MIB)


@dataclass(slots=True)
class Deaths:
    """When it died lately, and what was told of that last; empty where all is well."""

    deaths_s: tuple[float, ...] = ()
    said: str = ""

    def count(self, death: Death) -> int:
        """With these; those that are further apart are not one loop."""
        recent = (one for one in self.deaths_s if 0 <= death.at_s - one <= _WINDOW_S)
        self.deaths_s = (*recent, *[death.at_s] * min(death.n, _MOST_DEATHS))
        return len(self.deaths_s)

    def forget(self) -> None:
        """All is well."""
        self.deaths_s, self.said = (), ""


def look_at_oom(
    state: Deaths, death: Death, margin: Margin, policy: Policy, max_steps: int
) -> Decision | None:
    """Take a death into account.

    Args:
        state: Those with the signature count.
        death: That happened now.
        margin: As deployed now.
        policy: What may be done.
        max_steps: How many steps it may take by itself until a person deploys something.
    """
    if policy == "off" or death.kind is not FailureKind.OUT_OF_VRAM:
        return None
    n_deaths = state.count(death)
    if n_deaths < _LEAST_DEATHS and not death.has_given_up:
        return None
    decision = _decide(n_deaths, death, margin, policy, max_steps)
    if decision.act is Act.RAISE_MARGIN:
        state.forget()  # another generation, and a count of its own
    return decision


def _decide(
    n_deaths: int, death: Death, margin: Margin, policy: Policy, max_steps: int
) -> Decision:
    times = "once, with no restart" if n_deaths == 1 else f"{n_deaths} times"
    evidence = f"it died {times}, out of VRAM: {death.words}"
    begin = "the server runs out of VRAM again and again"
    target_mib = margin.next_mib
    if target_mib is None:
        why = f": {margin.left_alone}" if margin.left_alone else ""
        text = f"{begin}, and there is no fit margin that could be raised{why}"
        return _advice(text, evidence, "lower serving.ctx_size, or set memory.fit_mib; where the "
                       "model is placed by hand, raise memory.n_cpu_moe")  # fmt: skip
    hint = f"tunerd apply PROFILE --set memory.fit_mib={target_mib}"
    text = f"{begin} with a fit margin of {margin.fit_mib} MiB"
    if margin.is_pinned:
        return _advice(f"{text}, which is pinned and so is left alone", evidence, hint)
    left_alone = margin.left_alone or _not_seen(death.seen, margin)
    if left_alone is not None:
        return _advice(f"{text}, which is left alone: {left_alone}", evidence, hint)
    if margin.steps_taken >= max_steps:
        text = f"{begin} though its fit margin was raised {margin.steps_taken} times, to {margin.fit_mib} MiB"
        return _advice(text, evidence, "`tunerd doctor` says who uses VRAM; lower serving.ctx_size")
    if policy == "advise":
        return _advice(text, evidence, hint)
    return Decision("oom", Act.RAISE_MARGIN, "warning",
                    f"{text}, which is raised to {target_mib} MiB", evidence,
                    f"`tunerd rollback` undoes it; memory.fit_mib = {target_mib} in the profile keeps it")  # fmt: skip


def _not_seen(seen: Seen, margin: Margin) -> str | None:
    """Why its log alone is no reason: whoever may ask it something may write lines of that.

    In a life that never served nobody could.
    """
    if not seen.has_served:
        return None
    if seen.free_mib is not None and seen.free_mib < _SHORT_RATIO * (margin.fit_mib or 0):
        return None
    return "its log says so, but no look saw VRAM run short"


def _advice(text: str, evidence: str, hint: str) -> Decision:
    return Decision("oom", Act.NOTHING, "error", text, evidence, hint)


DIES, FAILED, BACK = "server-dies", "server-failed", "server-back"
# That one which was given up is started again.
AGAIN = "server-again"


def deaths_recalled(told: Iterable[Event]) -> Deaths:
    """The state of a daemon that takes over.

    Args:
        told: What daemons before it told, newest first.
    """
    newest = next((event for event in told if event.kind in {DIES, FAILED, AGAIN, BACK}), None)
    if newest is None or newest.kind == BACK:
        return Deaths()
    return Deaths((newest.at_s,), DIES if newest.kind == DIES else FAILED)


def look_at_deaths(state: Deaths, death: Death, *, was_deployed: bool = True) -> Decision | None:
    """Take a death into account; one goes back from what tunerd has deployed alone."""
    n_deaths = state.count(death)
    evidence = f"{death.kind}: {death.words}" if death.words else str(death.kind)
    back = "; `tunerd rollback` goes back to what served before" if was_deployed else ""
    hint = f"`tunerd doctor`{back}"
    if death.has_given_up:
        if state.said == FAILED:
            return None
        state.said = FAILED
        text = "the server died, and its service manager no longer starts it"
        return Decision(FAILED, Act.NOTHING, "error", text, evidence, hint)
    if n_deaths < _LEAST_DEATHS or state.said:
        return None
    state.said = DIES
    text = f"the server died {n_deaths} times within half an hour, and is started again"
    return Decision(DIES, Act.NOTHING, "warning", text, evidence, hint)


def look_for_deaths(state: Deaths, at_s: float, *, is_ready: bool) -> Decision | None:
    """Take a look into account: that it serves again is told once."""
    if not state.said or not is_ready:
        return None
    last_s = max(state.deaths_s, default=at_s)
    if state.said == DIES and 0 <= at_s - last_s <= _WINDOW_S:
        return None
    text = "the server serves again" if state.said == FAILED else "the server stays up again"
    state.forget()
    return Decision(BACK, Act.NOTHING, "note", text, "it says that it is ready")


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """What the next start of the server would run: a stamp of its files, and the driver's version.

    The stamp of a file that is not there is None: in the middle of an upgrade, or for good after it.
    """

    files: tuple[tuple[str, tuple[int, int] | None], ...]
    driver_version: str | None


@dataclass(frozen=True, slots=True)
class Replanned(Builds):
    """The deployed profile planned anew on what stands now, and the builds where it is another one.

    `refusals` are why it could not be started as it is, such as a flag that was removed;
    `identity_changed` whether the program or a library has other content, None if that is not known.
    """

    identity_changed: bool | None
    refusals: tuple[str, ...]
    driver_before: str | None
    driver_now: str | None


def look_at_engine(before: EngineSeen | None, seen: EngineSeen) -> tuple[EngineSeen | None, bool]:
    """What to hold the next look against, and whether this one may be gone by: two in a row see the same.

    Files of an upgrade arrive one by one, and a driver that is away for a moment is no other one.
    """
    if before is not None and seen.driver_version is None:
        seen = replace(seen, driver_version=before.driver_version)
    return seen, before in {None, seen}


def decide(found: Replanned, policy: Policy, *, has_nights: bool) -> Decision | None:
    """What to say of it; None where files were only touched, or nobody knows what stood before.

    Args:
        found: What was found.
        policy: `act` has the next night compare old and new.
        has_nights: Whether nights begin by themselves.
    """
    parts, before, now = [], found.driver_before, found.driver_now
    if found.identity_changed:
        parts.append("the engine was replaced by another build")
    if before and now and before != now:
        parts.append(f"the driver is {now} instead of {before}")
    if not parts and not found.refusals:
        return None
    what = " and ".join(parts)
    if found.refusals:
        text = ": ".join(filter(None, (what, "the server's next start will fail")))
        hint = (
            "deploy it again before anything restarts it: `tunerd plan PROFILE` shows what is wrong; "
            "`tunerd engines keep` and `tunerd rollback` keep an older build"
        )
        refusals = "; ".join(found.refusals)
        return Decision("upgrade-refused", Act.NOTHING, "error", text, refusals, hint)
    then, hint = _comparison(found, policy, has_nights=has_nights)
    text = f"{what}: what was measured before is stale, and the deployed profile can still be deployed{then}"
    hint = f"`tunerd results list` shows which; {hint}"
    return Decision("upgrade", Act.NOTHING, "warning", text, _builds(found), hint)


def _builds(found: Replanned) -> str:
    if found.identity_before is None or found.identity_now is None:
        return "the files or the driver changed"
    return f"build {found.identity_before} was deployed, {found.identity_now} is there now"


def _comparison(found: Replanned, policy: Policy, *, has_nights: bool) -> tuple[str, str]:
    """What becomes of old against new, and what a person can do about it."""
    if found.identity_changed is not True:
        return "", "the next sweep measures again"
    if found.compared is not None:
        return (
            f". Old and new were compared: {found.compared}",
            f"`tunerd results show {found.run}`; the old build is `{found.kept}`",
        )
    if found.kept is None:
        return (
            ". Old and new cannot be compared, because no copy of the old build was kept",
            "swap.keep_engine keeps each build that is deployed, `tunerd engines keep` one that is there now",
        )
    by_hand = f"`tunerd compare {found.kept} {found.engine or 'live'}`"
    if policy == "act" and has_nights:
        return (
            ". Once the server has been restarted, the next night compares old and new",
            f"{by_hand} then does so at once",
        )
    return "", f"{by_hand} compares old and new"
