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
    """

    identity_changed: bool | None
    refusals: tuple[str, ...]
    driver_before: str | None
    driver_now: str | None


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


def decide(found: Replanned) -> Decision | None:
    """What to say of it; None where files were only touched."""
    parts: Sequence[str] = [
        *(["the engine is another build"] if found.identity_changed is not False else []),
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
    return Decision(
        "upgrade",
        Act.NOTHING,
        "warning",
        f"{what}: what was measured before is stale, and the deployed profile still plans well",
        "the files or the driver changed",
        "`tunerd results stale` lists it; the next sweep measures anew, `tunerd compare` old against new",
    )
