"""Pages for people: values in, HTML out."""
