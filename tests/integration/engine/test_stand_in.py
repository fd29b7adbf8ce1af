"""The stand-in keeps the contract of the engines that it plays, and plays what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.llama_server import EngineUnderTest, LlamaServerContract
from tests.support.stand_in import install

SLOW_ENOUGH: dict[str, Any] = {"time_scale": 1.0, "tg_tok_s": 1000.0, "pp_tok_s": 20000.0}


def a_model(folder: Path) -> Path:
    """A file that is there; the stand-in does not read it."""
    path = folder / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


class TestStandInAsMainline(LlamaServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path) -> EngineUnderTest:
        made = install(folder, dialect="main-lm", **SLOW_ENOUGH)
        return EngineUnderTest((str(made.program),), a_model(folder))


class TestStandInAsNewestMainline(LlamaServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path) -> EngineUnderTest:
        made = install(folder, dialect="main-0x", **SLOW_ENOUGH)
        return EngineUnderTest(
            (str(made.program),), a_model(folder), bad_json_status=400, metrics_wake=False
        )


class TestStandInAsIk(LlamaServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path) -> EngineUnderTest:
        made = install(folder, dialect="ik-now", **SLOW_ENOUGH)
        return EngineUnderTest(
            (str(made.program),),
            a_model(folder),
            is_ik=True,
            mtp=("--spec-type", "mtp:n_max=3,p_min=0.0"),
            extra=("-t", "1", "-tb", "1", "--jinja", "--context-shift", "off"),
            has_spec_metrics=False,
            metrics_wake=None,
        )
