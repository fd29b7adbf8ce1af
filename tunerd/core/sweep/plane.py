"""The plane of every family, each point at the margin it needs, and which point to try next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from tunerd.core.sweep.arm import Arm, simplicity, wording_of
from tunerd.core.sweep.grid import FamilyGrid, Grid, Variant, planes, variant_of
from tunerd.core.sweep.learner import Belief, Learner
from tunerd.core.sweep.limits import Limits, without_margin

Array = NDArray[np.float64]

# Only points predicted this near the best are worth the exact arithmetic.
_PRUNE = 0.15
_PER_FAMILY = 60
_VARIANT_POINTS = 6
# Measured already if its margin was this near what is thought to be needed now [MiB].
_SAME_MARGIN_MIB = 192
_WORTH = 0.002
# Processes after which an arm would be known: one alone says little, since a start has its luck.
_PROCESSES = 3
_EXPLORING_SDS = 1.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """An arm, what is believed of it, and how much it is expected to save (as a log ratio)."""

    belief: Belief
    improvement: float


class Planes:
    """Candidates of all families, with their predictions kept until a family's laws change."""

    def __init__(self, learner: Learner, grid: Grid, limits: Limits) -> None:
        self._learner = learner
        self._grid = grid
        self._limits = limits
        self._kept: dict[tuple[tuple[str, str], Variant], tuple[object, list[Arm], Array]] = {}

    def proposals(self, leader: Belief, *, limit: int = 400) -> list[Proposal]:
        """Points that were not measured, the most promising first."""
        return self.improvements(self._candidates(leader.arm, limit), leader)

    def improvements(self, arms: Sequence[Arm], leader: Belief) -> list[Proposal]:
        """What knowing more of each arm is expected to save against the leader, the most first.

        Knowing more means a few more processes of it, with the noise of their starts: an arm that
        was measured often promises little, however near the leader it is.
        """
        beliefs = [one for one in self._learner.beliefs(arms) if one is not None]
        if not beliefs:
            return []
        spread = self._learner.differences_sd([one.arm for one in beliefs], leader.arm)
        known = self._learner.noise
        noise = (known.process**2 + known.answer**2) / _PROCESSES
        found = []
        for belief, sd in zip(beliefs, spread.tolist(), strict=True):
            moves = sd * sd / math.hypot(sd, math.sqrt(noise))
            gain = leader.mean - _WORTH - belief.mean
            found.append(Proposal(belief, expected_improvement(gain, moves)))
        found.sort(key=lambda one: (-round(one.improvement, 5), simplicity(one.belief.arm)))
        return found

    def best_of_family(self, family: FamilyGrid) -> Belief | None:
        """The point of a family that is believed to be fastest, measured or not."""
        arms, _ = self._plane(family, family.home)
        beliefs = [one for one in self._learner.beliefs(arms[:_PER_FAMILY]) if one is not None]
        return min(beliefs, key=lambda one: one.mean) if beliefs else None

    def _candidates(self, leader: Arm, limit: int) -> list[Arm]:
        found: list[tuple[float, Arm]] = []
        for family in self._grid.families.values():
            if not self._learner.is_known(family.key):
                continue
            if self._limits.family_fails(family.key) is not None:
                continue
            centre = variant_of(leader) if family.key == leader.family else family.home
            arms, log_turn = self._plane(family, centre)
            kept = list(zip(log_turn[:_PER_FAMILY].tolist(), arms, strict=False))
            found += kept
            found += self._variants(family, centre, kept[:_VARIANT_POINTS])
        best = min((time for time, _ in found), default=0.0)
        measured = self._measured()
        near = sorted(
            (
                (time, index, arm)
                for index, (time, arm) in enumerate(found)
                if time < best + _PRUNE and not self._is_measured(arm, measured)
            ),
        )[:limit]
        return [arm for _, _, arm in near if self._limits.fails(arm) is None]

    def _plane(self, family: FamilyGrid, variant: Variant) -> tuple[list[Arm], Array]:
        """Feasible points of one variant at the margins they need, fastest prediction first."""
        model = self._learner.models.get(family.key)
        kept = self._kept.get((family.key, variant))
        if kept is not None and kept[0] is model:
            return kept[1], kept[2]
        arms = list(self._points(family, variant))
        log_turn, _ = self._learner.predictions(arms)
        order = np.argsort(np.where(np.isfinite(log_turn), log_turn, np.inf), kind="stable")
        sorted_arms = [arms[at] for at in order]
        self._kept[family.key, variant] = (model, sorted_arms, log_turn[order])
        return sorted_arms, log_turn[order]

    def _points(self, family: FamilyGrid, variant: Variant) -> Iterable[Arm]:
        for ubatch in family.ubatch:
            if not family.allows_batches(ubatch, variant.batch):
                continue
            margins: dict[int, int | None] = {}
            for n_max, p_min in planes(family):
                if n_max not in margins:
                    first = family.arm(n_max, p_min, ubatch, family.fit_mib[0], variant)
                    margins[n_max] = self._limits.margin_for(first, _EXPLORING_SDS)
                margin = margins[n_max]
                if margin is not None:
                    yield family.arm(n_max, p_min, ubatch, margin, variant)

    def _variants(
        self, family: FamilyGrid, centre: Variant, best: Sequence[tuple[float, Arm]]
    ) -> list[tuple[float, Arm]]:
        """The best points with one other thing changed: threads, KV type, batch, extra keys."""
        changed = [
            moved
            for variant in family.variants_near(centre)
            if variant != centre
            for _, arm in best[: _points_of(variant, centre)]
            if family.allows_batches(arm.ubatch, variant.batch)
            if (moved := self._moved(family, arm, variant)) is not None
        ]
        if not changed:
            return []
        log_turn, _ = self._learner.predictions(changed)
        return list(zip(log_turn.tolist(), changed, strict=True))

    def _moved(self, family: FamilyGrid, arm: Arm, variant: Variant) -> Arm | None:
        """A point in another variant; None where it does not fit as it is placed there."""
        made = family.arm(arm.n_max, arm.p_min, arm.ubatch, arm.fit_mib, variant)
        if not made.is_placed and not arm.is_placed:
            return made
        margin = self._limits.margin_for(made, _EXPLORING_SDS)
        return None if margin is None else made.with_margin(margin)

    def _measured(self) -> dict[Arm, list[int]]:
        found: dict[Arm, list[int]] = {}
        for arm in self._learner.measured():
            found.setdefault(without_margin(arm), []).append(arm.fit_mib)
        return found

    def _is_measured(self, arm: Arm, measured: dict[Arm, list[int]]) -> bool:
        margins = measured.get(without_margin(arm), ())
        return any(abs(margin - arm.fit_mib) <= _SAME_MARGIN_MIB for margin in margins)


def _points_of(variant: Variant, centre: Variant) -> int:
    """How many points are tried with a variant: a placement goes with one depth and not with another."""
    is_wording = wording_of(variant.extra) != wording_of(centre.extra)
    return 1 if is_wording else _VARIANT_POINTS


def expected_improvement(gain: float, sd: float) -> float:
    """Expected value of what is gained beyond 0, of a normal gain."""
    z = gain / max(sd, 1e-9)
    density = float(np.exp(-z * z / 2) / np.sqrt(2 * np.pi))
    return gain * float(ndtr(z)) + sd * density
