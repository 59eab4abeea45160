"""`python -m retrofit`: the command line."""

from retrofit.cli import main

if __name__ == "__main__":
    main()
