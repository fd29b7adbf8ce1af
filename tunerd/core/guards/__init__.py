"""Guards: what was seen goes in, a decision comes out. Nothing in here acts or knows the time."""
