"""Orders of events around the night that nobody thought of: after each the owner of a machine finds what they rely on.

`TUNERD_TEST_EXAMPLES=100 pytest tests/unit/production/test_nights.py` lives through so many, at random.
"""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fault.nights import Nights
from tests.support.fuzz import is_asked_for, often

STEPS = 12


def test_nights_leave_what_their_owner_relies_on_whatever_comes_between() -> None:
    phases = [Phase.generate, Phase.shrink] if is_asked_for() else [Phase.generate]
    how = settings(often(3), stateful_step_count=STEPS, phases=phases)
    run_state_machine_as_test(Nights, settings=how)
