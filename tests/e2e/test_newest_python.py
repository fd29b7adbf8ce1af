"""What works with the oldest Python works with the newest, which Debian sid has."""

from __future__ import annotations

from tests.support.machine import Machine


def test_programs_are_run_and_servers_asked_by_the_newest_python(sid_machine: Machine) -> None:
    names = ("test_process", "test_http_request", "test_net")
    files = [f"tests/integration/machine/{name}.py" for name in names]
    done = sid_machine.pytest(*files, "-q", "--timeout=120")

    assert " passed" in done.stdout
