"""systemd and its units: state, start, stop, text, leases, sandboxes, and what was deployed before."""
