"""Kept copies of engines: which of them `doctor` calls to be removed, and which never."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.world import a_generation
from tests.support.local_box import Box
from tunerd.app import Context
from tunerd.doctor.doctor import needless_engines
from tunerd.machine.files import lock
from tunerd.units.generations import Ending, Outcome
from tunerd.words import sha256

IDENTITY = "0123456789abcdef" * 4
ID = IDENTITY[:12]
Names = Callable[[Context, Path], None]


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return Box(tmp_path).context


def kept(ctx: Context, name: str = ID) -> Path:
    """A copy of 3 MiB."""
    folder = ctx.paths.engines_dir / name
    written(folder / "bin/llama-server", bytes(3 * 1024 * 1024))
    written(folder / "identity.json", b"{}")
    return folder


def written(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def deployed(
    ctx: Context, text: bytes, replaced: bytes | None = None, identity: str | None = None,
    backup: str | None = None,
) -> None:  # fmt: skip
    number = ctx.generations.next_number()
    made = replace(
        a_generation(sha256(text)), number=number, engine_sha256=identity, replaced_backup=backup
    )
    ctx.generations.create(made, text, replaced)
    ctx.generations.end(number, Ending(Outcome.SERVING, 1.0, None, None, None))


def test_a_copy_that_nothing_names_is_told_with_its_size_and_the_command_that_removes_it(
    ctx: Context,
) -> None:
    folder = kept(ctx)
    found = needless_engines(ctx)
    assert found is not None
    assert "1 kept engine" in found.text
    assert "3 MiB" in found.text
    assert found.hint is not None
    subprocess.run(shlex.split(found.hint), check=True)
    assert not folder.exists()
    assert needless_engines(ctx) is None


STAMP = "20260101T000000Z-apply"
NAMING = {
    "unit/llama-server.service": "[Service]\nExecStart={0}/bin/llama-server",
    f"unit/other.service.pre-{STAMP}": "[Service]\nExecStart={0}/bin/x",
    "unit/llama-server.service.d/own.conf": "[Service]\nExecStart=\nExecStart={0}/bin/x",
    "config/tunerd.toml": '[engines.old]\npath = "{0}/bin/x"',
    "config/profiles/mine.toml": '[engine]\nprefer = ["kept-{0.name}"]',
    "state/tuned/mine.toml": '[engine]\nprefer = ["kept-{0.name}"]',
    "state/journal/x.service.json": '{{"text": "{0}/bin/x"}}',
}


def _file(where: str) -> Names:
    """One that names the copy."""

    def put(ctx: Context, folder: Path) -> None:
        kind, _, name = where.partition("/")
        place: Path = getattr(ctx.paths, f"{kind}_dir")
        written(place / name, NAMING[where].format(folder).encode())

    return put


def _old_generation(ctx: Context, folder: Path) -> None:
    """`rollback --to 1` starts it, though no backup stands any more."""
    deployed(ctx, f"[Service]\nExecStart={folder}/bin/x".encode())


def _unit_that_was_adopted(ctx: Context, folder: Path) -> None:
    """Its backup was pruned, and `rollback --to` that finds its text still."""
    deployed(ctx, b"own", f"[Service]\nExecStart={folder}/bin/x".encode())


def _link(ctx: Context, folder: Path) -> None:
    """Such as `/usr/local/bin/llama-server`, by which a unit that was made by hand, or its backup, starts the copy."""
    link = ctx.paths.state_dir / "links/llama-server"
    link.parent.mkdir(parents=True)
    link.symlink_to(folder / "bin/llama-server")
    name = f"other.service.pre-{STAMP}"
    written(ctx.paths.unit_dir / name, f"[Service]\nExecStart={link} -m x".encode())


def _environment_file(ctx: Context, folder: Path) -> None:
    variables = ctx.paths.state_dir / "elsewhere/env"
    written(variables, f"BIN={folder}/bin/llama-server\n".encode())
    text = f"[Service]\nEnvironmentFile={variables}\nExecStart=/usr/bin/env $BIN -m x"
    written(ctx.unit_path, text.encode())


def _build_that_serves(ctx: Context, folder: Path) -> None:
    """Replaced in place, it is compared with the copy, however its unit was edited."""
    assert folder.exists()
    deployed(ctx, b"own", identity=IDENTITY)
    written(ctx.unit_path, b"edited")


def _build_of_a_backup_of_another_unit(ctx: Context, folder: Path) -> None:
    """Its unit starts what stands in its place by now; the copy is the way round that."""
    assert folder.exists()
    deployed(ctx, b"before", identity=IDENTITY)
    deployed(ctx, b"after")
    written(ctx.paths.unit_dir / f"other.service.pre-{STAMP}", b"before")


def _build_before_an_upgrade_in_place(ctx: Context, folder: Path) -> None:
    """The unit's text stayed the same, and going back to the build is by the copy alone."""
    assert folder.exists()
    backup = f"llama-server.service.pre-{STAMP}"
    deployed(ctx, b"same", identity="d" * 64, backup="gone")
    deployed(ctx, b"same", identity=IDENTITY, backup="gone")
    deployed(ctx, b"same", identity="e" * 64, backup=backup)
    for name in (backup, ctx.unit):
        written(ctx.paths.unit_dir / name, b"same")


def _build_in_the_place_of_a_unit_by_hand(ctx: Context, folder: Path) -> None:
    assert folder.exists()
    backups = [f"llama-server.service.pre-2026010{day}T000000Z-apply" for day in (1, 2)]
    deployed(ctx, b"same", identity=IDENTITY, backup=backups[0])
    deployed(ctx, b"same", identity="e" * 64, backup=backups[1])
    for name, text in zip((*backups, ctx.unit), (b"by hand", b"same", b"same"), strict=True):
        written(ctx.paths.unit_dir / name, text)


@pytest.mark.parametrize(
    "name",
    [*map(_file, NAMING), _link, _environment_file,
     _old_generation, _unit_that_was_adopted, _build_that_serves, _build_of_a_backup_of_another_unit, _build_before_an_upgrade_in_place, _build_in_the_place_of_a_unit_by_hand],
)  # fmt: skip
def test_a_copy_that_a_step_back_may_need_is_not_told(ctx: Context, name: Names) -> None:
    folder, other = kept(ctx), kept(ctx, "f" * 12)
    name(ctx, folder)
    found = needless_engines(ctx)
    assert found is not None
    assert str(other) in str(found.hint)
    assert str(folder) not in str(found.hint)


def test_a_build_whose_backups_are_gone_is_told_though_history_knows_it(ctx: Context) -> None:
    kept(ctx)
    backup = f"llama-server.service.pre-{STAMP}"
    deployed(ctx, b"same", identity=IDENTITY)
    deployed(ctx, b"same", identity="e" * 64, backup="gone")
    deployed(ctx, b"same", identity="e" * 64, backup=backup)
    for name in (backup, ctx.unit):
        written(ctx.paths.unit_dir / name, b"same")
    assert needless_engines(ctx) is not None


def test_a_copy_that_was_cut_short_is_told_and_one_that_is_being_made_is_not(ctx: Context) -> None:
    written(ctx.paths.engines_dir / f".{ID}.tmp/bin/llama-server", b"x")
    with lock(ctx.paths.lock, purpose="engines keep", since="now"):
        assert needless_engines(ctx) is None
    assert needless_engines(ctx) is not None
