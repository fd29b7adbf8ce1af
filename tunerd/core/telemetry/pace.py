"""How often to look: seldom enough that the server does not notice, least of all while it works."""

from __future__ import annotations

from dataclasses import dataclass

# Each look at its counters is work for a llama-server, and takes its turn among the requests.
# Source: ggml-org/llama.cpp#29104, a server that stalls when it is asked every second.
LEAST_SCRAPE_S = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """The time between two looks: `idle_s`, and up to `busy_s` while the server works on requests."""

    idle_s: float
    busy_s: float

    def next_s(self, last_s: float, *, is_busy: bool | None) -> float:
        """How long to wait until the next look; twice as long as last time while it stays busy.

        Args:
            last_s: The wait before this look.
            is_busy: What this look saw; None counts as idle, for then nothing was asked of it.
        """
        if not is_busy:
            return self.idle_s
        return min(max(2 * last_s, self.idle_s), max(self.busy_s, self.idle_s))
