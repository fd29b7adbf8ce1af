"""What builds were proved to do, remembered by the identity of the program and its libraries."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tunerd.core.engine import Effect, EngineIdentity, Proof
from tunerd.errors import HostError
from tunerd.system.files import Files

SCHEMA = 1


def read_proofs(cache_dir: Path, files: Files, identity: EngineIdentity) -> tuple[Proof, ...]:
    """The remembered proofs of a build; empty if there are none, or they cannot be read."""
    try:
        data = files.read_json(_path(cache_dir, identity))
        if data is None or data["schema"] != SCHEMA or data["identity"] != identity.sha256:
            return ()
        return tuple(
            Proof(str(row["feature"]), Effect(row["effect"]), str(row["detail"]))
            for row in data["proofs"]
        )
    except (HostError, KeyError, TypeError, ValueError):
        return ()


def remember_proofs(
    cache_dir: Path, files: Files, identity: EngineIdentity, proofs: tuple[Proof, ...]
) -> None:
    """Keep the proofs of a build.

    Raises:
        HostError: they cannot be written.
    """
    files.make_folder(cache_dir)
    rows = [{**asdict(proof), "effect": str(proof.effect)} for proof in proofs]
    data = {"schema": SCHEMA, "identity": identity.sha256, "proofs": rows}
    files.write_json(_path(cache_dir, identity), data)


def _path(cache_dir: Path, identity: EngineIdentity) -> Path:
    return cache_dir / f"proofs-{identity.sha256[:32]}.json"
