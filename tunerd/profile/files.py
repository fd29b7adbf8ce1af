"""Profiles on disk, their layers, and what a sweep found: `STATE/tuned/PROFILE.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd import records
from tunerd.app import Context
from tunerd.errors import ConfigError, HostError, UnknownName
from tunerd.machine.files import Files
from tunerd.profile.layers import (
    SET_SOURCE,
    Layer,
    LayerFile,
    ProfileSources,
    Resolved,
    chain_of,
    layers_of,
    parse_set,
    resolve,
    set_layer,
)
from tunerd.profile.schema import nest
from tunerd.words import NAME_WORDS, Problem, counted, is_name

if TYPE_CHECKING:
    from tunerd.profile.arm import Arm


_MAX_BYTES = 1024 * 1024
_SUFFIX = ".toml"


def read_profile(path: Path, files: Files) -> Mapping[str, Any] | Problem:
    """One parsed profile file, or why it cannot be read or parsed."""
    try:
        content = files.read(path)
    except HostError as error:  # a folder, a pipe, a file that may not be read
        why = error.words
        return Problem(str(path), "file", why, "a profile file that can be read")
    if content is None:
        return Problem(str(path), "file", "no such file", "a profile file")
    if len(content) > _MAX_BYTES:
        return Problem(str(path), "file", f"{len(content)} bytes", f"at most {_MAX_BYTES} bytes")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        return Problem(str(path), "file", str(error), "valid TOML in UTF-8")


def load_sources(ctx: Context) -> ProfileSources:
    """Every profile file of this machine.

    Raises:
        HostError: a folder cannot be read.
    """
    found: dict[tuple[Layer, str], LayerFile] = {}
    unread: dict[tuple[Layer, str], Problem] = {}
    for layer, folder in (
        (Layer.SHIPPED, ctx.data_dir / "profiles"),
        (Layer.SITE, ctx.paths.site_profiles),
        (Layer.TUNED, ctx.paths.tuned_dir),
    ):
        for path in _toml_files(ctx.files, folder):
            data = misnamed(path) or read_profile(path, ctx.files)
            if isinstance(data, Problem):
                unread[layer, path.stem] = data
            else:
                source = path.name if layer is Layer.SHIPPED else str(path)
                found[layer, path.stem] = LayerFile(layer, source, data)
    return ProfileSources(found, unread)


def misnamed(path: Path) -> Problem | None:
    """Why no profile or workload can be in a file of this name; None where one can."""
    if path.suffix == _SUFFIX and is_name(path.stem):
        return None
    return Problem(str(path), "its name", repr(path.name), f"{NAME_WORDS}; then `{_SUFFIX}`")


def _toml_files(files: Files, folder: Path) -> list[Path]:
    found = sorted(path for path in files.listed(folder) if path.suffix.lower() == _SUFFIX)
    return [path for path in found if not path.name.startswith(".")]  # as editors have them


WORKLOADS = "workloads"
LEARNED = "learned"


def workload_files(ctx: Context) -> dict[str, tuple[str, Path]]:
    """Every workload file by name with its layer, later folders before earlier ones.

    Raises:
        HostError: a folder cannot be read.
    """
    folders = (
        ("shipped", ctx.data_dir / "profiles" / WORKLOADS),
        (LEARNED, ctx.paths.state_dir / WORKLOADS),
        ("site", ctx.paths.site_profiles / WORKLOADS),
    )
    return {
        path.stem: (layer, path)
        for layer, folder in folders
        for path in _toml_files(ctx.files, folder)
    }


def load_profile(
    ctx: Context,
    name: str,
    *,
    options: Mapping[str, Any],
    engine_names: Sequence[str] = (),
    with_tuned: bool = True,
    tuned: Mapping[str, Any] | None = None,
    sources: ProfileSources | None = None,
) -> Resolved:
    """One profile with all its layers.

    Args:
        ctx: Where.
        name: Of the profile.
        options: What was given with `--set`, by dotted key.
        engine_names: Which `[engines.NAME]` tables apply.
        with_tuned: Whether the tuned layer takes part.
        tuned: What takes the place of the tuned layer on disk, as a parsed file.
        sources: The files, by whoever needs them for more than this; otherwise they are read.

    Raises:
        ConfigError: there is no such profile, or one of its layers is wrong.
    """
    sources = sources or load_sources(ctx)
    if tuned is not None:
        file = LayerFile(Layer.TUNED, str(_tuned_path(ctx, name)), tuned)
        sources = replace(sources, files={**sources.files, (Layer.TUNED, name): file})
    chain = chain_of(name, sources)
    names = {name} if isinstance(chain, Problem) else {*chain}
    related = tuple(  # what cannot be read is not left out
        problem
        for (layer, of), problem in sources.unread.items()
        if (with_tuned and of == name if layer is Layer.TUNED else of in names)
    )
    if related:
        raise config_error(name, related)
    layers = layers_of(name, sources, with_tuned=with_tuned)
    if isinstance(layers, Problem):
        raise config_error(name, (layers,))
    chosen = (*layers, set_layer(options)) if options else layers
    resolved = resolve(name, chosen, engine_names)
    if not isinstance(resolved, Resolved):
        raise config_error(name, resolved)
    return resolved


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """What was given with `--set`.

    Raises:
        UsageError: one of them is not `key=value`.
    """
    return dict(parse_set(option) for option in options)


def config_error(name: str, problems: Sequence[Problem]) -> ConfigError:
    """All problems of a profile as one error."""
    first, state = problems[0], "nothing was touched"
    if first.key == "name":
        nearest = f"did you mean `{first.nearest}`? " if first.nearest else ""
        return UnknownName(
            f"there is no profile `{name}`",
            cause=f"known: {first.allowed}",
            state=state,
            hint=f"{nearest}`tunerd profiles list` shows what there is",
        )
    count = f"{len(problems)} place{'s' if len(problems) > 1 else ''}"
    is_typed = all(problem.source == SET_SOURCE for problem in problems)
    return ConfigError(
        f"{SET_SOURCE if is_typed else f'profile `{name}`'} is wrong in {count}",
        cause="\n".join(str(problem) for problem in problems),
        state=state,
        hint="`tunerd profiles show PROFILE` shows keys and values; a list needs quotes for the shell: "
        "--set 'engine.prefer=[\"mainline\"]'"
        if is_typed
        else "correct the file; `tunerd profiles check FILE` checks one",
    )


SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRecord:
    """Where a tuned layer comes from, and what it is valid for.

    `values` are the keys it sets, `sweep` the number of the run that proved them, `arm` the winner as
    JSON, `generation` what was deployed with it. Hashes are None where they could not be told.
    """

    profile: str
    values: Mapping[str, Any]
    sweep: int
    promoted_s: float
    sentence: str
    engine: str
    engine_sha256: str | None
    model_sha256: str | None
    driver_version: str | None
    gpu_names: tuple[str, ...] = ()
    workload: str | None = None
    measured_again: Mapping[str, Any] = field(default_factory=dict)
    generation: int | None = None
    arm: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FailedArm:
    """An arm that was promoted and did worse in service than its evidence said.

    `arm` is its JSON, `engine_sha256` the build it ran on: another build gets another chance. `sweep`
    is the one that proved it, where a person took it back.
    """

    arm: Mapping[str, Any]
    engine_sha256: str | None
    reason: str
    failed_s: float
    sweep: int | None = None


def _tuned_path(ctx: Context, profile: str) -> Path:
    """Where the tuned layer of a profile is."""
    return ctx.paths.tuned_dir / f"{profile}.toml"


def read_tuned(ctx: Context, profile: str) -> TunedRecord | None:
    """Where the tuned layer of a profile comes from; None where there is none that says so."""
    return _read(ctx, profile, "evidence") if _tuned_path(ctx, profile).exists() else None


def write_tuned(ctx: Context, record: TunedRecord) -> None:
    """Make this the tuned layer of its profile; the record is there before the layer is.

    Raises:
        HostError: it cannot be written.
    """
    before = read_tuned(ctx, record.profile)
    if before is not None and before.sweep != record.sweep:
        _write(ctx, before, "previous")
    _write(ctx, record, "evidence")
    ctx.files.write(_tuned_path(ctx, record.profile), _toml(record).encode())
    ctx.files.remove(_beside(ctx, record.profile, "declined"))


def take_out_tuned(ctx: Context, record: TunedRecord, *, by_hand: bool) -> None:
    """Take the layer in force away; the one before it holds again.

    What a person took away (`by_hand`) is put aside, where `read_declined` finds it.

    Raises:
        HostError: it cannot be written.
    """
    if by_hand:
        _write(ctx, record, "declined")
    before = _read(ctx, record.profile, "previous")
    if before is not None and before.sweep != record.sweep:
        # The layer before its record: who is killed in between still finds which one is to be taken away.
        ctx.files.write(_tuned_path(ctx, record.profile), _toml(before).encode())
        _write(ctx, before, "evidence")
    else:
        ctx.files.remove(_tuned_path(ctx, record.profile))
        ctx.files.remove(_beside(ctx, record.profile, "evidence"))
    ctx.files.remove(_beside(ctx, record.profile, "previous"))


def take_back_tuned(
    ctx: Context, profile: str, sweep: int, arm: Arm, engine_sha256: str | None, reason: str
) -> None:
    """A promoted server that did worse was taken back: so is its layer, and its arm stays out of later sweeps.

    Raises:
        HostError: a file cannot be written.
    """
    remember_failure(ctx, profile, arm, engine_sha256, reason)
    record = read_tuned(ctx, profile)
    if record is not None and record.sweep == sweep:
        take_out_tuned(ctx, record, by_hand=False)


def read_declined(ctx: Context, profile: str) -> TunedRecord | None:
    """The layer that a person took out of force last; None where there is none."""
    return _read(ctx, profile, "declined")


def failed_arms(
    ctx: Context, profile: str, identities: Mapping[str, str | None]
) -> Iterator[tuple[Arm, str]]:
    """Arms that failed in service on builds that are still the same, with the reason."""
    from tunerd.profile.arm import Arm

    for failed in _failures(ctx, profile):
        arm = records.read(Arm, failed.arm)
        if arm.engine in identities and identities[arm.engine] == failed.engine_sha256:
            by_hand = failed.sweep is not None
            yield arm, failed.reason if by_hand else f"it failed in service: {failed.reason}"


def failure_of(ctx: Context, profile: str, arm: Arm) -> FailedArm | None:
    """What is kept of an arm that failed in service, or that a person took back."""
    wanted = records.plain(arm.canonical())
    return next((one for one in _failures(ctx, profile) if one.arm == wanted), None)


def forget_failure(ctx: Context, profile: str, arm: Arm) -> None:
    """Let an arm take part in sweeps again.

    Raises:
        HostError: it cannot be written.
    """
    known = _failures(ctx, profile)
    kept = [one for one in known if one.arm != records.plain(arm.canonical())]
    if len(kept) < len(known):
        _keep_failures(ctx, profile, kept)


def remember_failure(
    ctx: Context,
    profile: str,
    arm: Arm,
    engine_sha256: str | None,
    reason: str,
    *,
    sweep: int | None = None,
) -> None:
    """Keep an arm out of later sweeps; `sweep` is that which proved it, where a person took it back.

    Raises:
        HostError: it cannot be written.
    """
    failed = FailedArm(
        records.plain(arm.canonical()), engine_sha256, reason, ctx.clock.now_s(), sweep
    )
    known = [one for one in _failures(ctx, profile) if one.arm != failed.arm]
    ctx.files.make_folder(ctx.paths.tuned_dir)
    _keep_failures(ctx, profile, [*known, failed])


def _failures(ctx: Context, profile: str) -> list[FailedArm]:
    from tunerd.profile.arm import Arm

    path = _beside(ctx, profile, "failed")
    data = ctx.files.read_json(path)
    rows = data.get("failed") if isinstance(data, dict) else None
    rows = rows if isinstance(rows, list) else []
    known = filter(None, (records.read_or_none(FailedArm, row) for row in rows))
    found = [one for one in known if records.read_or_none(Arm, one.arm) is not None]
    if len(found) < len(rows):
        lost = counted(len(rows) - len(found), "row")
        ctx.say(f"{lost} of `{path}` cannot be read, and count for nothing")
    return found


def _keep_failures(ctx: Context, profile: str, failures: Sequence[FailedArm]) -> None:
    rows = [records.plain(one) for one in failures]
    ctx.files.write_json(_beside(ctx, profile, "failed"), {"failed": rows})


def _read(ctx: Context, profile: str, what: str) -> TunedRecord | None:
    data = ctx.files.read_json(_beside(ctx, profile, what))
    return records.read_or_none(TunedRecord, data, schema=SCHEMA)


def _write(ctx: Context, record: TunedRecord, what: str) -> None:
    ctx.files.keep(_beside(ctx, record.profile, what), record, schema=SCHEMA)


def _beside(ctx: Context, profile: str, what: str) -> Path:
    return ctx.paths.tuned_dir / f"{profile}.{what}.json"


def _toml(record: TunedRecord) -> str:
    day = datetime.fromtimestamp(record.promoted_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = (
        f"Found by sweep {record.sweep} and promoted on {day}: {record.sentence}",
        f"Valid for engine {record.engine}; its evidence is in {record.profile}.evidence.json.",
        "`tunerd apply --untuned` ignores this file; removing it forgets what was found.",
    )
    return to_toml(nest(dict(sorted(record.values.items()))), head)


def to_toml(data: Mapping[str, Any], head: Sequence[str]) -> str:
    """Profile data as a TOML file, below these lines of comment."""
    import tomlkit

    document = tomlkit.document()
    for line in head:
        document.add(tomlkit.comment(line))
    for key, value in sorted(data.items(), key=lambda item: isinstance(item[1], Mapping)):
        document.add(key, tomlkit.item(value))
    return tomlkit.dumps(document)
