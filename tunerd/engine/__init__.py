"""A llama-server build: what it accepts, command line, HTTP, log, deaths."""
