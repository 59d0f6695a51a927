"""`python -m raysharded`: an alias of the `raysharded` command."""

from raysharded.cli import main

if __name__ == "__main__":
    main()
