"""What tunerd sets where no profile does, each with its reason: the weakest layer."""

from __future__ import annotations

from tunerd.core.profile_check import nest
from tunerd.core.resolve import Layer, LayerFile

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080

_DEFAULTS: dict[str, tuple[object, str]] = {
    "serving.host": (DEFAULT_HOST, "nobody else is let in unless a profile says so"),
    "serving.port": (DEFAULT_PORT, "builds differ (8080, 9931), so it is always passed"),
    "serving.n_parallel": (1, "builds differ (1, auto = 4), and speculation wants one slot"),
    "serving.flash_attn": ("on", "a quantised KV cache needs it, and builds differ"),
    "serving.jinja": (True, "tool calls and most templates need it, and builds differ"),
    "serving.context_shift": (False, "silently dropping context is worse than an error"),
    "serving.metrics": (True, "tunerd reads the server's own counters"),
    "serving.log_verbosity": (4, "memory and placement lines are at level 4 since May 2026"),
    "speculation.type": ("off", "speculation is a choice"),
    "memory.fit_mib": (1024, "the engines' own margin, stated because builds differ"),
}

# Only where the profile asks for speculation with a probability: defaults of builds moved between
# (16, 0.75), (16, 0.0) and (3, 0.0), so both numbers are always passed.
_DRAFT_DEFAULTS: dict[str, tuple[object, str]] = {
    "speculation.n_max": (3, "today's mainline default, stated because builds differ"),
    "speculation.p_min": (0.0, "today's mainline default, stated because builds differ"),
}


def default_layer() -> LayerFile:
    """Tunerd's own defaults, with the reason for each."""
    chosen = {**_DEFAULTS, **_DRAFT_DEFAULTS}
    return LayerFile(
        layer=Layer.TUNERD,
        source="tunerd",
        data=nest({key: value for key, (value, _) in chosen.items()}),
        reasons={key: reason for key, (_, reason) in chosen.items()},
    )
