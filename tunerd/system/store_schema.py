"""The tables of the evidence store, and the steps by which an older store becomes a newer one.

Definitions are those of today. A new store is made from them at once; an older one goes through the
migrations that it lacks, which end at the same tables (a test compares both).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

METADATA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class ForeignText(sa.types.TypeDecorator[str]):
    """Text from outside, such as paths: what no database takes in a text is replaced."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        """Bytes that are no UTF-8 (surrogates, in Python) and NUL become marks."""
        del dialect
        if value is None or value.isascii():
            return value if value is None else value.replace("\0", "�")
        clean = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return clean.replace("\0", "�")


# SQLite numbers rows by itself only where the type is spelled INTEGER.
_Key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Json = sa.JSON(none_as_null=True)


def _key() -> sa.Column[int]:
    return sa.Column("id", _Key, sa.Identity(), primary_key=True)


def _belongs_to(table: sa.Table, name: str, *, index: bool = True) -> sa.Column[int]:
    """A row that goes when the row goes that it belongs to."""
    link = sa.ForeignKey(table.c.id, ondelete="CASCADE")
    return sa.Column(name, _Key, link, nullable=False, index=index)


def _fingerprint() -> sa.Column[int]:
    link = sa.ForeignKey("fingerprints.id", ondelete="RESTRICT")
    return sa.Column("fingerprint_id", _Key, link, nullable=False, index=True)


schema_versions = sa.Table(
    "schema_versions",
    METADATA,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("written_by", sa.Text, nullable=False),
)

fingerprints = sa.Table(
    "fingerprints",
    METADATA,
    _key(),
    sa.Column("sha256", sa.Text, nullable=False, unique=True),
    sa.Column("parts", _Json, nullable=False),
)

runs = sa.Table(
    "runs",
    METADATA,
    _key(),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("suites", _Json, nullable=False),
    sa.Column("started_s", sa.Double, nullable=False, index=True),
    sa.Column("ended_s", sa.Double),
    sa.Column("outcome", sa.Text),
    sa.Column("reason", ForeignText),
    sa.Column("target", ForeignText, nullable=False),
    sa.Column("seed", sa.BigInteger),
    sa.Column("unit", ForeignText),
    sa.Column("profile", ForeignText),
    sa.Column("model_name", ForeignText),
    sa.Column("workload", ForeignText),
    sa.Column("tunerd_version", sa.Text),
    sa.Column("host", _Json, nullable=False),
)

arms = sa.Table(
    "arms",
    METADATA,
    _key(),
    _belongs_to(runs, "run_id", index=False),
    sa.Column("name", ForeignText, nullable=False),
    _fingerprint(),
    sa.Column("engine", ForeignText),
    sa.Column("family", sa.Text),
    sa.Column("engine_version", ForeignText),
    sa.Column("program", ForeignText),
    sa.Column("model_path", ForeignText),
    sa.Column("argv", _Json),
    sa.Column("environment", _Json, nullable=False),
    sa.Column("origins", _Json, nullable=False),
    sa.Column("generation", sa.Integer),
    sa.UniqueConstraint("run_id", "name"),
)

samples = sa.Table(
    "samples",
    METADATA,
    _key(),
    _belongs_to(runs, "run_id"),
    _belongs_to(arms, "arm_id"),
    sa.Column("suite", sa.Text, nullable=False),
    sa.Column("case_name", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("prompt_id", sa.Text, nullable=False),
    sa.Column("process", sa.Text, nullable=False),
    sa.Column("position", sa.Integer, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("n_predict", sa.Integer, nullable=False),
    sa.Column("concurrency", sa.Integer, nullable=False),
    sa.Column("has_timings", sa.Boolean, nullable=False),
    sa.Column("cache_n", sa.Integer),
    sa.Column("prompt_n", sa.Integer),
    sa.Column("prompt_ms", sa.Double),
    sa.Column("predicted_n", sa.Integer),
    sa.Column("predicted_ms", sa.Double),
    sa.Column("draft_n", sa.Integer),
    sa.Column("draft_n_accepted", sa.Integer),
    sa.Column("accepted_by_position", _Json),
    sa.Column("wall_ms", sa.Double),
    sa.Column("ttft_ms", sa.Double),
    sa.Column("vram_free_min_mib", sa.Integer),
    sa.Column("marks", _Json, nullable=False),
    sa.Column("problem", ForeignText),
    sa.Column("is_usable", sa.Boolean, nullable=False),
    sa.Column("details", _Json, nullable=False),
)

summaries = sa.Table(
    "summaries",
    METADATA,
    _key(),
    _belongs_to(runs, "run_id"),
    sa.Column("arm_id", _Key, sa.ForeignKey(arms.c.id, ondelete="CASCADE")),
    sa.Column("suite", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("figures", _Json, nullable=False),
)

verdicts = sa.Table(
    "verdicts",
    METADATA,
    _key(),
    _belongs_to(runs, "run_id"),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("sentence", ForeignText, nullable=False),
    sa.Column("arm_a", ForeignText),
    sa.Column("arm_b", ForeignText),
    sa.Column("what", ForeignText),
    sa.Column("ratio", sa.Double),
    sa.Column("ratio_low", sa.Double),
    sa.Column("ratio_high", sa.Double),
    sa.Column("level", sa.Double, nullable=False),
    sa.Column("n_pairs", sa.Integer),
    sa.Column("reasons", _Json, nullable=False),
    sa.Column("details", _Json, nullable=False),
)

sweep_events = sa.Table(
    "sweep_events",
    METADATA,
    _key(),
    _belongs_to(runs, "run_id"),
    sa.Column("event", _Json, nullable=False),
)

memory_loads = sa.Table(
    "memory_loads",
    METADATA,
    _key(),
    _fingerprint(),
    sa.Column("memory_key", sa.Text, nullable=False, index=True),
    sa.Column("observed_s", sa.Double, nullable=False),
)

memory_observations = sa.Table(
    "memory_observations",
    METADATA,
    _key(),
    _belongs_to(memory_loads, "load_id"),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("part_group", sa.Text, nullable=False),
    sa.Column("estimated_mib", sa.Double),
    sa.Column("reported_mib", sa.Double, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Migration:
    """One step forward: the version that it leads to, what it is for, and what it does."""

    version: int
    purpose: str
    apply: Callable[[sa.Connection], None]


def _add_memory_tables(connection: sa.Connection) -> None:
    METADATA.create_all(connection, tables=[memory_loads, memory_observations])


def _add_sweep_events(connection: sa.Connection) -> None:
    METADATA.create_all(connection, tables=[sweep_events])


MIGRATIONS: tuple[Migration, ...] = (
    Migration(2, "what loads showed of memory estimates", _add_memory_tables),
    Migration(
        3, "starts and requests of sweeps, from which one that was cut goes on", _add_sweep_events
    ),
)
VERSION = max(migration.version for migration in MIGRATIONS)
"""The version that this tunerd reads and writes."""
