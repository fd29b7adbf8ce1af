"""`python -m tunerd` is the command line."""

from tunerd.cli.main import main

if __name__ == "__main__":
    main()
