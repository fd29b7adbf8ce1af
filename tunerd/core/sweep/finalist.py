"""Makes a leader fit to be challenged with: exact process, full context, tightest safe margin, tools."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.core.sweep.arm import Arm
from tunerd.core.sweep.grid import FamilyGrid
from tunerd.core.sweep.limits import Limits
from tunerd.core.sweep.night import Night
from tunerd.core.sweep.protocol import Policy, ServerDied
from tunerd.core.sweep.search import Search
from tunerd.core.sweep.server import CannotStart, Server

_STEPS = 4
# A smaller margin is worth another start if it is predicted to save so much (log ratio).
_WORTH = 0.003
_STEP_UP_MIB = 256.0
_TRIES = 2


@dataclass(frozen=True, slots=True)
class MarginStep:
    """One step of the bisection: a margin, and the VRAM that was left with the context full."""

    fit_mib: int
    free_mib: float | None
    failure: str = ""


class Finalist:
    """Bisects the margin of one arm on processes started exactly as they would be deployed.

    A smaller margin is never slower until it fails, so that MiB decide and not noisy times: what is
    left over the wanted headroom comes off the margin; a step that fails goes half way back.
    """

    def __init__(self, search: Search, policy: Policy) -> None:
        self._search = search
        self._policy = policy
        self.steps: list[MarginStep] = []

    @property
    def _limits(self) -> Limits:
        return self._search.limits

    @property
    def _night(self) -> Night:
        return self._search.night

    def prepare(self, leader: Arm) -> Arm | None:
        """The leader at the margin to deploy it with, its context filled once; None if it failed.

        Raises:
            TimeUp: The night has no time for it.
        """
        family = self._search.grid.of(leader)
        arm, good, tried, failures = leader, None, set[int](), 0
        for _ in range(_STEPS + _TRIES):
            tried.add(arm.fit_mib)
            step = self._try(arm)
            self.steps.append(step)
            if step.failure and step.failure != "oom":
                failures += 1
                if failures >= _TRIES:
                    self._limits.reject(leader, f"failed as it would be deployed: {step.failure}")
                    return good
                continue
            if self._is_broken(arm):
                return None
            if not step.failure and self._is_enough(step):
                good = arm
            following = None if family is None else self._next(arm, step, good, family)
            if following is None or following in tried or len(self.steps) >= _STEPS:
                break
            arm = arm.with_margin(following)
        if good is None:
            self._limits.reject(arm, "its context could not be filled with enough room to spare")
        return good

    def _try(self, arm: Arm) -> MarginStep:
        night = self._night
        night.require(night.process_s(arm))
        try:
            server = Server(night, arm, "finalist")
            server.warm_up(exact=False)
            server.block()
            self._ask_tools(server)
            free = self._search.fill(server)
        except CannotStart as failed:
            return MarginStep(arm.fit_mib, None, failed.failure)
        except ServerDied as died:
            return MarginStep(arm.fit_mib, None, died.kind or "crash")
        finally:
            self._search.learner.refresh()
        return MarginStep(arm.fit_mib, free)

    def _ask_tools(self, server: Server) -> None:
        judged, broken = self._limits.own_tool_calls(server.arm)
        if not broken:
            server.tool_calls(self._policy.tool_calls - judged)

    def _is_broken(self, arm: Arm) -> bool:
        """Whether it breaks tool calls; what may change the output has to prove that it does not."""
        search = self._search
        search.learn_usual_tools()
        if self._limits.own_tool_calls(search.incumbent)[1] and self._limits.own_tool_calls(arm)[1]:
            search.ask_all_tools(arm)  # a few calls are no rate to compare with another
        reason = self._limits.breaks_tools(arm)
        if reason is None and not self._limits.is_output_proven(arm):
            reason = "nothing shows that it leaves tool calls whole"
        if reason is not None:
            self._limits.reject(arm, reason)
        return reason is not None

    def _is_enough(self, step: MarginStep) -> bool:
        return step.free_mib is None or step.free_mib >= self._limits.headroom_mib

    def _next(self, arm: Arm, step: MarginStep, good: Arm | None, family: FamilyGrid) -> int | None:
        """Margin to try next; None to stop."""
        if arm.is_placed:
            return None
        target = self._limits.target_mib
        if step.failure == "oom" or (step.free_mib is not None and not self._is_enough(step)):
            if good is not None:  # half way back
                middle = family.margin_at_least((arm.fit_mib + good.fit_mib) / 2)
                return middle if middle is not None and middle < good.fit_mib else None
            short = _STEP_UP_MIB if step.free_mib is None else target - step.free_mib
            return family.margin_at_least(arm.fit_mib + max(short, 1.0))
        if step.free_mib is None or not self._search.learner.memory(arm.family).is_binding:
            return None
        lower = family.margin_at_least(arm.fit_mib - (step.free_mib - target))
        if lower is None or lower >= arm.fit_mib or self._saves(arm, lower) < _WORTH:
            return None
        return lower

    def _saves(self, arm: Arm, margin: int) -> float:
        log_turn, _ = self._search.learner.predictions([arm, arm.with_margin(margin)])
        return float(log_turn[0] - log_turn[1])
