"""Orders of events that nobody thought of: after each the owner of a machine finds what they rely on.

`TUNERD_TEST_EXAMPLES=1000 pytest tests/unit/production/test_histories.py` lives through so many, at random.
"""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fault.histories import Histories
from tests.support.fuzz import is_asked_for, often

# Of a sample a history is shown as it was found: shortening it takes minutes.
STEPS = 15


def test_the_server_is_as_its_owner_wished_whatever_came_before() -> None:
    phases = [Phase.generate, Phase.shrink] if is_asked_for() else [Phase.generate]
    how = settings(often(30), stateful_step_count=STEPS, phases=phases)
    run_state_machine_as_test(Histories, settings=how)
