"""One owner per effect; foreign errors become ours here."""
