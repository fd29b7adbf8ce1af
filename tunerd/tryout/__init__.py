"""To see tunerd work anywhere: a small manager, a small engine, small models."""
