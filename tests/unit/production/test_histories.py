"""Orders of events that nobody thought of: after each the owner of a machine finds what they rely on.

`TUNERD_TEST_EXAMPLES=1000 pytest tests/unit/production/test_histories.py` lives through so many, at random.
"""

from __future__ import annotations

from hypothesis.stateful import run_state_machine_as_test

from tests.fault.histories import Histories, lives


def test_the_server_is_as_its_owner_wished_whatever_came_before() -> None:
    run_state_machine_as_test(Histories, settings=lives(15, steps=15))
