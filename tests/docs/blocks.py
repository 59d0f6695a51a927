"""The code blocks of the documentation, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.paths import DOCS, ROOT

PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")], key=lambda path: (path.name != "README.md", path.name))


def page(name: str) -> Path:
    """README.md, or a page of docs/."""
    (found,) = (path for path in PAGES if path.name == name)
    return found


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order; "" are those that name none."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(path: Path) -> Iterator[str]:
    """Every command of the page's bash blocks, without comments; continued lines are one."""
    for block in blocks(path, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s+)#.*$", "", line).strip()
            if command:
                yield " ".join(command.split())


def all_commands() -> dict[str, list[str]]:
    """command -> the pages that have it."""
    found: dict[str, list[str]] = {}
    for path in PAGES:
        for command in commands(path):
            found.setdefault(command, []).append(path.name)
    return found
