"""Modules of the library under other names, in the whole repository: folded where several become one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.move.fold import fold
from tools.move.rewrite import ROOT_PACKAGE, NameTaken, Rewriter

_PROSE = (".md", ".toml", ".yaml", ".yml", ".txt", ".cfg", ".sh", ".json", ".html", ".js", ".css", "")
_KEPT = ("CHANGELOG.md", "tools/move/", "tests/tools/", ".git-blame-ignore-revs")
"""Files and folders that use the names that modules had."""
_LOGGERS = frozenset({"raysharded.driver.events"})
_RECORDED = "tests/golden/"
"""Folder of which the same holds, except for code."""


def modules_in(root: Path) -> dict[str, Path]:
    """The library's modules by their dotted names, packages among them."""
    found = {}
    for path in sorted((root / ROOT_PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def relocate(root: Path, moves: Mapping[str, str]) -> None:
    """Move the modules, and all mentions of them in files that git knows. Raises NameTaken before it writes."""
    modules = modules_in(root)
    rewriter = Rewriter(moves=moves, modules=frozenset(modules), loggers=_LOGGERS)
    texts = {module: path.read_text(encoding="utf-8") for module, path in modules.items()}
    folded = _folded(moves, texts)
    paths = {path: module for module, path in modules.items()}
    written: dict[Path, str] = {}
    taken: list[str] = []
    for path in _known_files(root):
        if not path.is_file() or path.is_symlink() or _is_kept(root, path):
            continue
        module = paths.get(path)
        if module in folded and folded[module] is None:
            continue
        text = folded[module] if module in folded else _read(path)
        if text is None:
            continue
        where = str(path.relative_to(root))
        try:
            new = rewriter.python(text, where) if path.suffix == ".py" else rewriter.prose(text)
        except NameTaken as error:
            taken.append(str(error))
            continue
        if new != text or module in folded:
            written[path] = new
    if taken:
        raise NameTaken("\n".join(taken))
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    _move_files(root, modules, moves, folded)


def write_packages(root: Path, packages: Mapping[str, str]) -> None:
    """Give each package that has no `__init__.py` one with a docstring of its purpose."""
    for name, purpose in packages.items():
        path = root / Path(*name.split(".")) / "__init__.py"
        if not path.exists():
            path.write_text(f'"""{purpose}"""\n', encoding="utf-8")
            _git(root, "add", str(path))


def set_contract(root: Path, contract: str) -> None:
    """Replace the layers, which are the end of pyproject.toml."""
    path = root / "pyproject.toml"
    before, _, _ = path.read_text(encoding="utf-8").partition("[tool.importlinter]")
    path.write_text(before + contract, encoding="utf-8")


def remove_empty_packages(root: Path) -> list[str]:
    """Remove packages that have nothing but their `__init__.py`; their paths."""
    found = []
    for path in sorted((root / ROOT_PACKAGE).rglob("__init__.py"), reverse=True):
        if [one for one in path.parent.iterdir() if one.name != "__pycache__"] == [path]:
            _git(root, "rm", "-q", "--force", str(path))
            found.append(path.parent.relative_to(root).as_posix())
    return found


def _folded(moves: Mapping[str, str], texts: Mapping[str, str]) -> dict[str, str | None]:
    """Module -> its text where several become one: at the first of them; None at the others."""
    groups: dict[str, list[str]] = {}
    for old, new in moves.items():
        groups.setdefault(new, []).append(old)
    found: dict[str, str | None] = {}
    for olds in groups.values():
        if len(olds) > 1:
            found[olds[0]] = fold({old: texts[old] for old in olds})
            found.update(dict.fromkeys(olds[1:]))
    return found


def _move_files(
    root: Path, modules: Mapping[str, Path], moves: Mapping[str, str], folded: Mapping[str, str | None]
) -> None:
    gone = [path for module, path in modules.items() if module in folded and folded[module] is None]
    if gone:
        _git(root, "rm", "-q", "--force", *map(str, gone))
    waiting = []
    for old, new in moves.items():
        if modules[old] in gone or old == new:
            continue
        target = root / Path(*new.split(".")).with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        between = target.with_suffix(".moving")  # another module may still be where this one goes
        _git(root, "mv", str(modules[old]), str(between))
        waiting.append((between, target))
    for between, target in waiting:
        _git(root, "mv", str(between), str(target))


def _known_files(root: Path) -> Iterable[Path]:
    names = _git(root, "ls-files", "-z").split("\0")
    return [root / name for name in names if name and (name.endswith(".py") or Path(name).suffix in _PROSE)]


def _is_kept(root: Path, path: Path) -> bool:
    name = path.relative_to(root).as_posix()
    return name.startswith(_KEPT) or (name.startswith(_RECORDED) and path.suffix != ".py")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout
