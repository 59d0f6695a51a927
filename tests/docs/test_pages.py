"""The sources of the site of `make docs`: their links lead somewhere, and public names are in the reference.

`test_site.py` builds the site, which takes half a minute, and compares more of it before a release.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.test_site import PUBLIC, is_elsewhere, left_out, members_of, public_names, resolve
from tests.paths import DOCS, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


@cache
def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^( *)(```+).*?^\1\2$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@cache
def places(page: Path) -> set[str]:
    """The names of the headings of a page, as links have them, and its other targets."""
    found: set[str] = set(re.findall(r"^\(([\w-]+)\)=$", prose(page), re.MULTILINE))
    for heading in re.findall(r"^#+ (.+?)\s*$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number = sum(re.sub(r"-\d+$", "", one) == slug for one in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    for link in re.findall(r"\]\(([^()\s]+)\)", text):
        if is_elsewhere(link):
            continue
        name, _, place = unquote(link).partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (place and target.suffix == ".md" and place not in places(target)):
            found.append(link)
    return found


def test_every_link_between_pages_leads_to_a_page_and_a_heading_on_it() -> None:
    assert len(PAGES) > 40
    assert sum(len(places(page)) for page in PAGES) > 300
    assert {str(page.relative_to(ROOT)): found for page in PAGES if (found := broken(page))} == {}


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A *heading*: two\n\n```\n# none\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-heading-two) [b](other.md#none) [c](gone.md) [d](#here) `[e](gone)`\n# Here\n")
    assert broken(page) == ["other.md#none", "gone.md"]


def test_every_page_is_in_the_navigation() -> None:
    spec = importlib.util.spec_from_file_location("conf_of_docs", DOCS / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    listed = {name for names in conf.NAVIGATION.values() for name in names}
    assert {path.stem for path in DOCS.glob("*.md")} - {"index"} - listed == set()


@cache
def documented() -> set[str]:
    """The names in the sources of the reference."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    found = set(re.findall(r"^\.\. auto(?:class|exception|function|data):: ([\w.]+)", text, re.MULTILINE))
    for module in re.findall(r"^\.\. automodule:: ([\w.]+)", text, re.MULTILINE):
        found |= {f"{module}.{name}" for name, _ in public_names(importlib.import_module(module))}
    return found


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_sources_of_the_reference_and_has_docstrings(module: str) -> None:
    module, excluded, missing = f"raysharded{module}", left_out(), []
    for name, value in public_names(importlib.import_module(module)):
        entries = [one for one in documented() if one.rpartition(".")[2] == name and resolve(one) is value]
        if not entries or not inspect.getdoc(value):
            missing.append(f"{module}.{name}: add it to a page of docs/api, and a docstring")
        elif inspect.isclass(value) and not issubclass(value, BaseException):
            without = set().union(*(excluded.get(entry, set()) for entry in entries))
            for one in () if without == {"*"} else sorted(members_of(value) - without):
                member = inspect.getattr_static(value, one, None)
                if isinstance(member, property | staticmethod | classmethod) or inspect.isfunction(member):
                    missing += [] if inspect.getdoc(member) else [f"{module}.{name}.{one} has no docstring"]
    assert missing == []


def test_what_pages_import_is_in_the_sources_of_the_reference() -> None:
    known = {id(resolve(name)) for name in documented()}
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for module, names in re.findall(r"^from (raysharded[\w.]*) import (.+)$", text, re.MULTILINE):
            for name in names.split(", "):
                value = resolve(f"{module}.{name}") or importlib.import_module(f"{module}.{name}")
                assert inspect.ismodule(value) or id(value) in known, f"{page.name}: {module}.{name}"
