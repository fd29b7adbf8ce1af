"""structlog, configured once by the entry points.

Pretty on a terminal. Under systemd an entry of the journal with its priority and every field
(`journalctl -o json`), or, where journald does not take it, a line with the `<N>` prefix.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from tunerd.system.journal import Journal, field_name

_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def _with_priority(
    _logger: object, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    event["_priority"] = _PRIORITY.get(method, 6)
    return event


class _JournalRenderer:
    """`<6>swap.applied generation=14 ...`: journald removes the prefix and keeps the priority.

    What the journal has taken itself is not rendered any more.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._render = structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True)

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        priority = event.pop("_priority", 6)
        name = event.pop("event", "")
        fields = {field_name(key): value for key, value in event.items() if value is not None}
        rest = self._render(logger, method, event)
        line = f"{name} {rest}".strip().replace("\n", "\\n")
        fields["TUNERD_EVENT"] = name
        if self._journal is not None and self._journal.send(line, priority, fields):
            raise structlog.DropEvent
        return f"<{priority}>{line}"


def configure(*, level: str = "info", journal: bool | None = None, is_native: bool = False) -> None:
    """Set up logging to standard error.

    Args:
        level: debug, info, warning or error.
        journal: Whether lines go to journald; None looks whether standard error is a terminal.
        is_native: Whether journald is spoken to by its own protocol, with every field.
    """
    to_journal = not sys.stderr.isatty() if journal is None else journal
    native = Journal() if to_journal and is_native else None
    renderer: Any = _JournalRenderer(native) if to_journal else structlog.dev.ConsoleRenderer()
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
