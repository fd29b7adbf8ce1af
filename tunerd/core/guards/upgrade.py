"""The engine's files or the driver are not those that were deployed: what was measured is stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunerd.core.guards.decision import Act, Decision, Policy


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """What the next start of the server would run: a stamp of its files, and the driver's version.

    `files` is None while they cannot be read, as in the middle of an upgrade.
    """

    files: tuple[tuple[str, int, int], ...] | None
    driver_version: str | None


@dataclass(frozen=True, slots=True)
class UpgradeState:
    """What stood when it was last looked into; None before the first look.

    `settling` is a change that was seen once: files of an upgrade arrive one by one.
    """

    known: EngineSeen | None = None
    settling: EngineSeen | None = None


@dataclass(frozen=True, slots=True)
class Replanned:
    """The deployed profile planned anew on what stands now.

    `refusals` are why it could not be started as it is, such as a flag that was removed;
    `identity_changed` whether the program or a library has other content, None if that is not known.
    `identity_before` and `identity_now` are the builds' short hashes. `kept` is the name of a copy of
    the build before, None where there is none, `engine` that of the build now. `compared` is what a
    comparison of the two came to, in the run of that number.
    """

    identity_changed: bool | None
    refusals: tuple[str, ...]
    driver_before: str | None
    driver_now: str | None
    identity_before: str | None = None
    identity_now: str | None = None
    kept: str | None = None
    engine: str | None = None
    compared: str | None = None
    run: int | None = None


def look(state: UpgradeState, seen: EngineSeen, policy: Policy) -> tuple[UpgradeState, bool]:
    """The state after a look, and whether to plan the deployed profile anew now.

    A change counts when two looks in a row see the same.
    """
    if policy is Policy.OFF or seen.files is None:
        return state, False
    if state.known is None:
        return UpgradeState(known=seen), False
    if _is_same(state.known, seen):
        return UpgradeState(known=state.known), False
    if state.settling is None or not _is_same(state.settling, seen):
        return UpgradeState(known=state.known, settling=seen), False
    return UpgradeState(known=seen), True


def _is_same(one: EngineSeen, other: EngineSeen) -> bool:
    """An unknown driver is no other driver: it may be away for a moment."""
    drivers = {one.driver_version, other.driver_version} - {None}
    return one.files == other.files and len(drivers) <= 1


def decide(found: Replanned, policy: Policy, *, has_nights: bool) -> Decision | None:
    """What to say of it; None where files were only touched, or nobody knows what stood before.

    Args:
        found: What was found.
        policy: `act` has the next night compare old and new.
        has_nights: Whether nights begin by themselves.
    """
    parts: Sequence[str] = [
        *(["the engine is another build"] if found.identity_changed else []),
        *(
            [f"the driver is {found.driver_now} instead of {found.driver_before}"]
            if found.driver_before and found.driver_now and found.driver_before != found.driver_now
            else []
        ),
    ]
    if not parts and not found.refusals:
        return None
    what = " and ".join(parts) or "what stands was planned anew"
    if found.refusals:
        return Decision(
            "upgrade-refused",
            Act.NOTHING,
            "error",
            f"{what}: the server's next start will fail with it",
            "; ".join(found.refusals),
            "deploy it anew before anything restarts it: `tunerd plan PROFILE` shows what is wrong; "
            "`tunerd engines keep` and `tunerd rollback` keep an older build",
        )
    then, hint = _comparison(found, policy, has_nights=has_nights)
    return Decision(
        "upgrade",
        Act.NOTHING,
        "warning",
        f"{what}: what was measured before is stale, and the deployed profile still plans well{then}",
        _builds(found),
        f"`tunerd results stale` lists it; {hint}",
    )


def _builds(found: Replanned) -> str:
    if found.identity_before is None or found.identity_now is None:
        return "the files or the driver changed"
    return f"build {found.identity_before} was deployed, {found.identity_now} is there now"


def _comparison(found: Replanned, policy: Policy, *, has_nights: bool) -> tuple[str, str]:
    """What becomes of old against new, and what a person can do about it."""
    if found.identity_changed is not True:
        return "", "the next sweep measures anew"
    if found.compared is not None:
        return (
            f". Old and new were compared: {found.compared}",
            f"`tunerd results show {found.run}`; the old build is `{found.kept}`",
        )
    if found.kept is None:
        return (
            ". Old and new cannot be compared, for no copy of the old build was kept",
            "swap.keep_engine keeps the build that serves before each swap, `tunerd engines keep` now",
        )
    by_hand = f"`tunerd compare {found.kept} {found.engine or 'live'}`"
    if policy is Policy.ACT and has_nights:
        return ". The next night compares old and new", f"{by_hand} does so at once"
    return "", f"{by_hand} compares old and new"
