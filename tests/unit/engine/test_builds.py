"""What an engine is asked to judge: the command line without all that only a unit's life has."""

from __future__ import annotations

from tunerd.engine.builds import dry_arguments


def dry(served: str) -> list[str]:
    """Without the port, of which all that is known is that it is another."""
    *asked, flag, port = dry_arguments(served.split())
    assert flag == "--port"
    assert port != "8080"
    return asked


def test_a_dry_run_has_no_model_no_key_file_and_a_port_of_its_own() -> None:
    served = "-m /srv/a.gguf --port 8080 --api_key_file /run/credentials/x/api-key -c 4096 --jinja"

    assert dry(served) == ["-m", "/nonexistent/a.gguf", "-c", "4096", "--jinja"]
    assert dry("--model a.gguf") == ["--model", "/nonexistent/a.gguf"], "nor the engine's own port"


def test_a_dry_run_of_a_unit_whose_model_comes_from_elsewhere_loads_and_fetches_none() -> None:
    none = ["--model", "/nonexistent/none.gguf"]
    for served in ("--models-dir /srv", "-hf a/b:Q4 -hff c.gguf", "-mu http://x/y.gguf", "--gpt-oss-20b-default"):  # fmt: skip
        assert dry(served)[-2:] == none
        assert not {"-hf", "a/b:Q4", "-hff", "-mu", "--gpt-oss-20b-default"} & set(dry(served))
    assert dry("-c 4096 --spec-default") == ["-c", "4096", "--spec-default", *none]
