"""The code blocks of the documentation, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
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


def sides(diff: str) -> tuple[str, str]:
    """The programs before and after a diff that has all lines."""
    rows = [(line[:1], line[1:]) for line in diff.splitlines(keepends=True)]
    before, after = ("".join(text for mark, text in rows if mark != other) for other in "+-")
    return before, after


def changed_lines(before: str, after: str) -> tuple[int, int]:
    """(added, removed), white space and empty lines left out."""
    one, two = ([line.strip() for line in text.splitlines() if line.strip()] for text in (before, after))
    changes = [code for code in SequenceMatcher(None, one, two, autojunk=False).get_opcodes() if code[0] != "equal"]
    return sum(end - start for *_, start, end in changes), sum(end - start for _, start, end, *_ in changes)


def programs(path: Path) -> tuple[str, str]:
    """(theirs, ours) of a page that shows a program and its diff, with a sentence that counts the changed lines."""
    (diff,) = blocks(path, "diff")
    before, after = sides(diff)
    assert before in blocks(path, "python")
    added, removed = changed_lines(before, after)
    assert f"{added} lines are added and {removed} removed" in path.read_text(encoding="utf-8")
    return before, after
