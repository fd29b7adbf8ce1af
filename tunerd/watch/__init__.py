"""The long-running half: readings, history, guards, probation, notices, the daemon."""
