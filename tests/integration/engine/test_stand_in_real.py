"""Real engines keep the contract that the stand-in keeps."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.contracts.llama_server import EngineUnderTest, LlamaServerContract
from tests.support.folders import ROOT
from tests.support.needs import engine as engine_program
from tests.support.needs import missing
from tunerd.tryout.designed import SHAPES, design, write


@pytest.fixture(scope="session")
def mtp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny designed model with an MTP block."""
    path = tmp_path_factory.mktemp("model") / "designed.gguf"
    write(design(SHAPES["tiny"]), path)
    return path


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
        return EngineUnderTest(
            (str(engine_program("ik-2026-08")),),
            mtp_model,
            is_ik=True,
            mtp=("--spec-type", "mtp:n_max=3,p_min=0.0"),
            extra=("-t", "1", "-tb", "1", "--jinja", "--context-shift", "off"),
            has_spec_metrics=False,
            metrics_wake=None,
        )


@pytest.mark.llama
class TestEmbedded(LlamaServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, mtp_model: Path) -> EngineUnderTest:
        try:
            import xllamacpp  # noqa: F401, PLC0415 # only whether it is there
        except ImportError:
            missing("llama", "the embedded engine is not installed", "pip install xllamacpp")
        paths = f"sys.path.insert(0, {str(ROOT)!r})"
        script = f"import sys; {paths}; from tunerd.tryout.embedded import main; sys.exit(main())"
        return EngineUnderTest(
            (sys.executable, "-c", script),
            mtp_model,
            forced_status=-signal.SIGTERM,
            bad_json_status=400,
            metrics_wake=None,
        )
