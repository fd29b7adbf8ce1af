"""To see tunerd work anywhere: the manager of `--local`, a small engine, and small models, by which `engine.prove` proves builds too."""
