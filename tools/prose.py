"""A check of plain technical English: `python -m tools.prose [PATH ...]`.

It names the words and sentences that the project does not use: in Markdown pages, but for code blocks and quoted
output; in docstrings, comments and the longer texts of Python modules. Without paths it reads `CHECKED`. Exit status 1:
something was found.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs"),
    *("raysharded", "examples", "benchmarks", "tools", ".ci"),
    *("benchmarks/limits.txt", "benchmarks/alone.txt"),
    "tests",
)
"""Files and folders whose prose is checked by `make lint`."""
SKIPPED = ("docs/benchmarks.md", "tests/golden")
"""A page made of results, whose prose is in `benchmarks`; and recordings, with the code that reads and writes them."""
RECORDED = (
    *("raysharded/driver", "raysharded/journal/entry_text.py", "raysharded/report/history"),
    *("raysharded/metrics/ray_metrics.py", "raysharded/ownership/lease.py", "raysharded/actors/step/update.py"),
    *("tools/prose.py", "tests"),
)
"""Modules whose texts are part of recorded histories and journals, expected messages, or the banned words themselves:
only their docstrings and comments are checked."""
MAX_WORDS = 30
"""Limit for a sentence of a page or a docstring."""
INSTEAD = {
    r"go(es)? on|going on|went on|gone on": "continue, resume",
    r"(tr(y|ies|ied|ying)) again": "retry",
    r"let(s|ting)? go": "release, abort the wait",
    r"beside (the )?(training|next step)": "in the background",
    r"on record": "recorded in the journal",
    r"(is|are|be|was|can be|cannot be) had": "is available, can be obtained",
    r"(that|who) (is|are) none": "invalid",
    r"without a word": "silently",
    r"in nobody's way": "not on the critical path",
    r"whole or not there": "atomic",
    r"(was|were|is|are|be|being) told": "is notified, is requested",
    r"tell(s|ing)?": "report, notify, send",
    r"say(s|ing)?|said": "report, state, log, print",
    r"hear(s|d|ing)?": "receive, observe",
    r"ask(s|ed|ing)?": "request, query",
    r"whoever|whatever|who ever": "name the actor",
    r"one's own|of (your|our|its|their) own": "own, custom",
    r"no news|news of": "message, report",
    r"be gone|is gone|are gone": "has exited, is lost, was deleted",
    r"for good": "permanently",
    r"look(s|ed|ing)? (at|after|around|into)": "inspect, check, maintain, poll",
    r"give(s|n)? up": "abandon, stop retrying",
    r"disowned|spared|doomed|last words|tenants?|house|rooms?": "see docs/glossary.md",
}
"""Expression -> what to write instead."""
OPENINGS = ("Who", "Whose", "Whom", "What", "Which", "How", "Of", "The same", "They", "As above", "So")
"""A docstring begins with a noun phrase or an imperative, never with one of these."""
_ANY = "|".join(f"(?:{one})" for one in INSTEAD).replace(" ", r"\s+")  # also where a line ends between two words
_BANNED = re.compile(rf"(?<![\w`-])({_ANY})(?![\w`-])", re.IGNORECASE)
_CLAUSE = re.compile(r"^(Who|Whoever|What|Whatever) [^?]*$")
_CODE = re.compile(r"``.+?``|`[^`]*`|!?\[([^\]]*)\]\([^)]*\)|https?://\S+|<[^>]+>")


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence that should be another."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def words_of(text: str, path: Path, line: int) -> Iterator[Finding]:
    """The banned words of a text that begins at a line."""
    plain = _CODE.sub(lambda match: _blank(match[0], match[1] or ""), text)
    for match in _BANNED.finditer(plain):
        words = " ".join(match[0].split())
        instead = next(new for old, new in INSTEAD.items() if re.fullmatch(old, words, re.IGNORECASE))
        yield Finding(path, line + plain.count("\n", 0, match.start()), f"{words!r}: {instead}")


def _blank(code: str, shown: str) -> str:
    """Code is one word without letters; of a link its text stays, on as many lines."""
    return (shown or "_") + "\n" * (code.count("\n") - shown.count("\n"))


def sentences_of(text: str, path: Path, line: int) -> Iterator[Finding]:
    """The sentences of a paragraph that are too long, or begin with a clause in place of the actor."""
    plain = _CODE.sub(lambda match: match[1] or "_", text)
    for sentence in re.split(r"(?<=[.!?:;|])\s+|(?<=[.!?:]\*\*)\s+", " ".join(plain.split())):
        count = len(re.findall(r"[\w'_]+", sentence))
        if count > MAX_WORDS:
            yield Finding(path, line, f"{count} words in a sentence: {sentence[:60]!r}")
        if _CLAUSE.match(sentence):
            yield Finding(path, line, f"name the actor first: {sentence[:60]!r}")


def of_page(path: Path) -> Iterator[Finding]:
    """Findings in a Markdown page. Code blocks and quoted output are not prose."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    yield from words_of(text, path, 1)
    line = 1
    for block in re.split(r"(\n\s*\n|\n(?=\s*[-*|>#] |\s*\d+\. ))", text):
        for part in block.split(" | ") if block.lstrip().startswith("|") else [block]:
            yield from sentences_of(part, path, line)
        line += block.count("\n")


def of_module(path: Path) -> Iterator[Finding]:
    """Findings in a module: docstrings, comments, and texts of four words and more."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstrings: dict[ast.Constant, str] = {}
    for node in ast.walk(tree):
        for one in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                docstrings[one.value] = one.value.value
    for docstring, text in docstrings.items():
        line = docstring.lineno
        yield from words_of(text, path, line)
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*] )|:\n", inspect.cleandoc(text)):
            if not paragraph.startswith("    "):  # a listing
                yield from sentences_of(paragraph, path, line)
        opening = next((one for one in OPENINGS if re.match(rf"{one}\b", text)), None)
        if opening:
            yield Finding(path, line, f"a docstring that begins with {opening!r}")
    for node in ast.walk(tree) if not _is_one_of(path, RECORDED) else ():
        if not isinstance(node, ast.Constant) or node in docstrings:
            continue
        if isinstance(node.value, str) and len(node.value.split()) > 3:
            yield from words_of(node.value, path, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from words_of(token.string, path, token.start[0])


def _is_one_of(path: Path, names: Sequence[str]) -> bool:
    """True for one of these files or folders, and for a file below one."""
    return any(path.resolve().is_relative_to(ROOT / name) for name in names)


def findings(paths: Sequence[Path]) -> Iterator[Finding]:
    """All findings in files and folders, by file and line."""
    for path in paths:
        files = [path] if path.is_file() else sorted({*path.rglob("*.md"), *path.rglob("*.py")})
        for file in files:
            if _is_one_of(file, SKIPPED):
                continue
            found = of_module(file) if file.suffix == ".py" else of_page(file)
            yield from sorted(found, key=lambda one: one.line)


def main(arguments: Sequence[str]) -> int:
    """Print the findings; the exit status."""
    found = list(findings([Path(one) for one in arguments] or [ROOT / one for one in CHECKED]))
    sys.stdout.writelines(f"{one}\n" for one in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
