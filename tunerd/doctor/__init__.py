"""Rules over facts: what is wrong with how a server is run, and what to do about it."""
