"""One file per command: its options and help, and how its result is shown."""
