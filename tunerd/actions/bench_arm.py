"""What is stored of a server that was measured: its fingerprint, its engine, and its arguments."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.find_engines import engine_of, find_programs
from tunerd.actions.fingerprint import FingerprintReader
from tunerd.core.evidence import ArmRecord
from tunerd.core.fingerprint_arguments import compared_environment, without_secrets
from tunerd.core.flags import owner_of
from tunerd.core.generation import Generation
from tunerd.system.engine_programs import Found


def arm_of(
    ctx: Context,
    name: str,
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    generation: Generation | None,
    reader: FingerprintReader | None = None,
) -> tuple[ArmRecord, tuple[str, ...]]:
    """The record of an arm, and why parts of its fingerprint are unknown.

    Args:
        ctx: Where.
        name: Of the arm.
        argv: The whole argument vector, program first.
        environment: What its unit sets.
        generation: What deployed it, where something did.
        reader: One that read the machine already.
    """
    found = (reader or FingerprintReader(ctx)).of(argv, environment)
    program = next((one for one in find_programs(ctx) if str(one.program) == argv[0]), None)
    engine = engine_of(ctx, program or Found(Path(argv[0]), "command line"))
    capabilities, version = engine.capabilities, engine.version
    arm = ArmRecord(
        name=name,
        fingerprint=found.fingerprint,
        engine=engine.name,
        family=str(capabilities.family) if capabilities is not None else None,
        engine_version=version.text if version is not None else None,
        program=argv[0],
        model_path=_value_of(argv, "model.path"),
        argv=without_secrets(argv),
        environment=compared_environment(environment),
        origins=generation.origins if generation is not None else (),
        generation=generation.number if generation is not None else None,
    )
    return arm, found.problems


def _value_of(argv: tuple[str, ...], key: str) -> str | None:
    pairs = itertools.pairwise(argv[1:])
    return next((value for word, value in pairs if owner_of(word) == key), None)
