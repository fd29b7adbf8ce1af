"""Orders of events around the night that nobody thought of: after each the owner of a machine finds what they rely on.

`TUNERD_TEST_EXAMPLES=100 pytest tests/unit/production/test_nights.py` lives through so many, at random.
"""

from __future__ import annotations

from hypothesis.stateful import run_state_machine_as_test

from tests.fault.histories import lives
from tests.fault.nights import Nights


def test_nights_leave_what_their_owner_relies_on_whatever_comes_between() -> None:
    run_state_machine_as_test(Nights, settings=lives(2, steps=12))
