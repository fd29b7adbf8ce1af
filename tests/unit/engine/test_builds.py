"""What an engine is asked to judge: the command line without all that only a unit's life has."""

from __future__ import annotations

import pytest

from tunerd.engine.builds import dry_arguments


def test_a_dry_run_has_no_model_no_key_file_and_a_port_of_its_own() -> None:
    served = "-m /srv/a.gguf --port 8080 --api_key_file /run/credentials/x/api-key -c 4096 --jinja"

    asked = dry_arguments(served.split())

    assert asked[:5] == ["-m", "/nonexistent/a.gguf", "-c", "4096", "--jinja"]
    assert asked[5] == "--port"
    assert asked[6] != "8080"
    assert len(asked) == 7


def test_a_dry_run_of_a_unit_that_names_no_port_does_not_take_the_engines_own() -> None:
    assert dry_arguments(["--model", "a.gguf"])[:3] == ["--model", "/nonexistent/a.gguf", "--port"]


@pytest.mark.parametrize(
    "served", ["-c 4096 --spec-default", "--models-dir /srv", "-hf a/b:Q4 -hff c.gguf", "-mu http://x/y.gguf",
               "--gpt-oss-20b-default"],
)  # fmt: skip
def test_a_dry_run_of_a_unit_whose_model_comes_from_elsewhere_loads_and_fetches_none(
    served: str,
) -> None:
    asked = dry_arguments(served.split())
    assert asked[-4:-1] == ["--model", "/nonexistent/none.gguf", "--port"]
    assert not {"-hf", "a/b:Q4", "-hff", "-mu", "--gpt-oss-20b-default"} & set(asked)


def test_the_usual_speculation_is_asked_for_in_a_dry_run_too() -> None:
    assert "--spec-default" in dry_arguments(["--spec-default"])
