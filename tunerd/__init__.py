"""tunerd: tuning and safe deployment of llama-server."""

__version__ = "0.1.0"
