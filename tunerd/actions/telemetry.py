"""What was seen of the server lately: the seam between whoever watches and whoever shows.

The daemon adds readings; pages, the API and `/metrics` take them. Any thread may read at any time.
"""

from __future__ import annotations

from tunerd.core.telemetry.reading import Reading


class Telemetry:
    """The newest reading, and those of the last while.

    Args:
        kept_s: How far back readings are kept [s].
    """

    def __init__(self, *, kept_s: float = 3600.0) -> None:
        self._kept_s = kept_s
        # Replaced as a whole, never changed: a reader in another thread sees one or the other.
        self._readings: tuple[Reading, ...] = ()

    def add(self, reading: Reading) -> None:
        """One more reading; those that are too old, or from a time that the clock has left, go."""
        oldest_s = reading.at_s - self._kept_s
        kept = (one for one in self._readings if oldest_s <= one.at_s <= reading.at_s)
        self._readings = (*kept, reading)

    def latest(self) -> Reading | None:
        """The newest reading; None before the first."""
        found = self._readings
        return found[-1] if found else None

    def readings(self) -> tuple[Reading, ...]:
        """All that are kept, oldest first."""
        return self._readings
