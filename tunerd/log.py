"""structlog, configured once by the entry points.

Pretty on a terminal; under systemd one line per event with the `<N>` prefix that journald turns into
a priority.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def _with_priority(
    _logger: object, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    event["_priority"] = _PRIORITY.get(method, 6)
    return event


class _JournalRenderer:
    """`<6>swap.applied generation=14 ...`: journald removes the prefix and keeps the priority."""

    def __init__(self) -> None:
        self._render = structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True)

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        priority = event.pop("_priority", 6)
        name = event.pop("event", "")
        rest = self._render(logger, method, event)
        line = f"{name} {rest}".strip().replace("\n", "\\n")
        return f"<{priority}>{line}"


def configure(*, level: str = "info", journal: bool | None = None) -> None:
    """Set up logging to standard error.

    Args:
        level: debug, info, warning or error.
        journal: Whether lines go to journald; None looks whether standard error is a terminal.
    """
    to_journal = not sys.stderr.isatty() if journal is None else journal
    renderer: Any = _JournalRenderer() if to_journal else structlog.dev.ConsoleRenderer()
    processors: list[Any] = [structlog.contextvars.merge_contextvars]
    if to_journal:
        processors.append(_with_priority)
    else:
        processors += [structlog.processors.add_log_level, structlog.processors.TimeStamper("iso")]
    structlog.configure(
        processors=[*processors, structlog.processors.format_exc_info, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
