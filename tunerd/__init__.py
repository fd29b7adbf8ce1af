"""tunerd: tuning and safe deployment of llama-server."""

__version__ = "0.2.0.dev0"
