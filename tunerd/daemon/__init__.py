"""The long-running half: it recovers, watches, guards, and begins nights. See docs/daemon.md."""

from __future__ import annotations

from tunerd.daemon.run import run_daemon

__all__ = ["run_daemon"]
