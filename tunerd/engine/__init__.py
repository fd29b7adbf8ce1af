"""A llama-server build: what it accepts, its command line, its HTTP, its log, and why it died."""
