"""What every clock must do."""

from __future__ import annotations

from tunerd.machine.clock import Clock


class ClockContract:
    """Tests of any clock; a subclass gives the fixture `clock`."""

    def test_sleeping_lets_both_clocks_go_on_and_is_no_suspension(self, clock: Clock) -> None:
        def slept_s() -> float:
            """Between its looks at two clocks a busy machine may pause: the most is right."""
            return max(clock.suspended_s() for _ in range(9))

        wall_s, monotonic_s, suspended_s = clock.now_s(), clock.monotonic_s(), slept_s()

        clock.sleep(0.05)

        assert 0.04 < clock.monotonic_s() - monotonic_s < 5
        assert 0.04 < clock.now_s() - wall_s < 5
        assert abs(slept_s() - suspended_s) < 0.01

    def test_sleeping_for_nothing_or_less_returns_at_once(self, clock: Clock) -> None:
        before_s = clock.monotonic_s()

        clock.sleep(0)
        clock.sleep(-3)

        assert 0 <= clock.monotonic_s() - before_s < 3
