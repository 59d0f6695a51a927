"""`python -m tools.move`: put every module where `moves.txt` has it, in the checkout that this is run in.

Nothing is committed. Left to do by hand: format, prose that names modules in words, tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.move.plan import FILE, read
from tools.move.relocate import relocate, remove_empty_packages, set_contract, write_packages

CONTRACT = Path(__file__).with_name("contract.toml")


def main() -> None:
    root, plan = Path.cwd(), read(FILE.read_text(encoding="utf-8"))
    relocate(root, plan.moves)
    write_packages(root, plan.packages)
    set_contract(root, CONTRACT.read_text(encoding="utf-8"))
    for name in remove_empty_packages(root):
        sys.stdout.write(f"removed {name}: nothing is left in it\n")


if __name__ == "__main__":
    main()
