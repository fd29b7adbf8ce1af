"""For how long a service manager goes on starting a unit whose every start fails at once."""

from __future__ import annotations

import math

from tunerd.core.local_service import Restart, ServiceSpec

# Linux keeps the port of ended connections for 60 s (TCP_TIMEWAIT_LEN); a start takes a moment too.
LEAST_WINDOW_S = 65.0
_AFTER_EXIT = frozenset({Restart.ALWAYS, Restart.ON_FAILURE})


def restart_window_s(spec: ServiceSpec) -> float:
    """Seconds from the first start to the last that its manager tries; infinite without a limit.

    systemd refuses a start that would be one more than the burst within the interval, so starts that
    are far enough apart are never refused (systemd.unit(5), StartLimitIntervalSec=).
    """
    if spec.restart not in _AFTER_EXIT:
        return 0.0
    window_s = spec.start_limit_burst * spec.restart_s
    has_limit = spec.start_limit_burst > 0 and spec.start_limit_interval_s > 0
    if not has_limit or window_s >= spec.start_limit_interval_s:
        return math.inf
    return window_s
