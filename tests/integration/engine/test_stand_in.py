"""The stand-in and the engines that it plays keep one contract."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.llama_server import EngineUnderTest, LlamaServerContract
from tests.support.folders import ROOT
from tests.support.needs import engine as engine_program
from tests.support.stand_in import install
from tunerd.tryout.designed import SHAPES, design, write

SLOW_ENOUGH: dict[str, Any] = {"time_scale": 1.0, "tg_tok_s": 1000.0, "pp_tok_s": 20000.0}
OF_IK: dict[str, Any] = {
    "is_ik": True,
    "mtp": ("--spec-type", "mtp:n_max=3,p_min=0.0"),
    "extra": ("-t", "1", "-tb", "1", "--jinja", "--context-shift", "off"),
    "has_spec_metrics": False,
    "metrics_wake": None,
}


class TestStandInAsMainline(LlamaServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path, mtp_model: Path) -> EngineUnderTest:
        made = install(folder, dialect="main-lm", **SLOW_ENOUGH)
        return EngineUnderTest((str(made.program),), mtp_model)


class TestStandInAsNewestMainline(LlamaServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path, mtp_model: Path) -> EngineUnderTest:
        made = install(folder, dialect="main-0x", **SLOW_ENOUGH)
        argv = (str(made.program),)
        return EngineUnderTest(argv, mtp_model, bad_json_status=400, metrics_wake=False)


class TestStandInAsIk(LlamaServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path, mtp_model: Path) -> EngineUnderTest:
        made = install(folder, dialect="ik-now", **SLOW_ENOUGH)
        return EngineUnderTest((str(made.program),), mtp_model, **OF_IK)


@pytest.fixture(scope="session")
def mtp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny designed model with an MTP block; the stand-in does not read it."""
    return write(design(SHAPES["tiny"]), tmp_path_factory.mktemp("model") / "designed.gguf")


@pytest.mark.engine
class TestMainline(LlamaServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, mtp_model: Path) -> EngineUnderTest:
        return EngineUnderTest((str(engine_program("mainline-2026-08-18")),), mtp_model)


@pytest.mark.engine
class TestIk(LlamaServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, mtp_model: Path) -> EngineUnderTest:
        return EngineUnderTest((str(engine_program("ik-2026-08")),), mtp_model, **OF_IK)


@pytest.mark.llama
class TestEmbedded(LlamaServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, mtp_model: Path) -> EngineUnderTest:
        paths = f"sys.path.insert(0, {str(ROOT)!r})"
        script = f"import sys; {paths}; from tunerd.tryout.embedded import main; sys.exit(main())"
        return EngineUnderTest(
            (sys.executable, "-c", script),
            mtp_model,
            forced_status=-signal.SIGTERM,
            bad_json_status=400,
            metrics_wake=None,
        )
