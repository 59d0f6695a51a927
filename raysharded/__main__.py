"""`python -m raysharded`: the same as the `raysharded` command."""

from raysharded.cli import main

if __name__ == "__main__":
    main()
