"""The site of `make docs`: it builds, its links lead somewhere, its reference is complete."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import inspect
import io
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from tests.forked import in_a_fork
from tests.paths import DOCS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]

PUBLIC = ["", ".checkpoint", ".data", ".metrics", ".report", ".testing", ".errors"]
LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, for all processes that the tests are run in."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "site" / "objects.inv").exists():
            build(folder / "site")
    return folder / "site"


def build(folder: Path) -> None:
    """Build the site as `make docs` does."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ndocs:")[1].split("\n\n")[0]
    (options,) = re.findall(r"-m sphinx (.*) \. build/site", recipe)
    source = folder.with_name("site-source")  # without .venv and build, which Sphinx would search for pages, twice
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    shutil.copytree(DOCS, source / DOCS.name)
    for path in ROOT.iterdir():
        if path.suffix == ".md":
            shutil.copy(path, source)
        elif not path.name.startswith(".") and path.name not in (DOCS.name, "build", "dist"):
            (source / path.name).symlink_to(path)
    code, errors = in_a_fork(sphinx, str(source), [*options.split(), ".", str(folder)], timeout_s=280)
    if code != 0:
        shutil.rmtree(folder, ignore_errors=True)
    assert code == 0, errors


def sphinx(source: str, arguments: list[str]) -> tuple[int, str]:
    """The exit status and the stderr, in a process that has imported most of the documented modules."""
    from sphinx.cmd.build import main
    from sphinx.search.en import SearchEnglish

    gc.disable()  # nearly all that is made is kept until the end, and the process ends then
    SearchEnglish.stem = functools.cache(SearchEnglish.stem)  # type: ignore[method-assign]
    os.chdir(source)
    sys.path.insert(0, str(ROOT))
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        return main(arguments), errors.getvalue()


@dataclass
class Page(HTMLParser):
    """The links of a page, the files it loads, and the targets of links in it."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif tag == "a" and name == "href" and value:
                self.links.append(value)
            elif (tag, name) in LOADS and value:
                self.loads.append(value)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


def is_elsewhere(target: str) -> bool:
    return bool(urlsplit(target).scheme) or target.startswith("//")


def test_every_link_within_the_site_leads_to_a_page_and_a_place_on_it(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 25
    followed = 0
    for path, page in pages.items():
        for link in page.links:
            if is_elsewhere(link):
                continue
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.relative_to(site)}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.relative_to(site)}: {link}"
            followed += 1
    assert followed > 1000


def test_the_site_loads_nothing_from_a_network(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert [target for target in page.loads if is_elsewhere(target)] == [], path
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", text), path


def test_every_page_of_the_docs_is_in_the_sidebar(site: Path, pages: dict[Path, Page]) -> None:
    front = pages[site / "docs" / "index.html"]
    listed = {(site / "docs" / urlsplit(link).path).resolve() for link in front.links if not is_elsewhere(link)}
    ours = [path.relative_to(ROOT) for path in DOCS.glob("*.md") if path.name != "index.md"]
    assert [page for page in ours if (site / page).with_suffix(".html") not in listed] == []


# -- the reference --


def documented(site: Path) -> set[str]:
    """The names in the reference, from the site's inventory (of Sphinx's format 2)."""
    data = (site / "objects.inv").read_bytes()
    at = 0
    for _ in range(4):  # lines of text before the compressed ones
        at = data.index(b"\n", at) + 1
    lines = zlib.decompress(data[at:]).decode().splitlines()
    return {line.split(" py:")[0] for line in lines if " py:" in line}


def public_names(module: ModuleType) -> Iterator[tuple[str, object]]:
    names = getattr(module, "__all__", None)
    for name in names if names is not None else vars(module):
        value = getattr(module, name)
        ours = (getattr(value, "__module__", "") or "").startswith("raysharded")
        if ours and not name.startswith("_") and not inspect.ismodule(value):
            yield name, value


def left_out() -> dict[str, set[str]]:
    """Members that a page of the reference excludes, by class; `*`: all of them."""
    found: dict[str, set[str]] = {}
    for page in (DOCS / "api").glob("*.md"):
        entries = re.findall(r"\.\. autoclass:: ([\w.]+)\S*\n((?:   :.*\n)*)", page.read_text(encoding="utf-8"))
        for name, options in entries:
            listed = re.findall(r":exclude-members: (.*)", options)
            found[name] = {"*"} if ":no-members:" in options else set(", ".join(listed).split(", "))
    return found


def members_of(kind: type) -> set[str]:
    """Methods, properties and fields of a class of ours, with those that it inherits from others of ours."""
    ours = [one for one in kind.__mro__ if one.__module__.startswith("raysharded")]
    names = {name for one in ours for name in [*vars(one), *getattr(one, "__annotations__", {})]}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference_with_its_docstring(site: Path, module: str) -> None:
    """A class may be known by several names. Sphinx leaves out what has no docstring."""
    module = f"raysharded{module}"
    known, excluded = documented(site), left_out()
    missing, seen = [], 0
    for name, value in public_names(importlib.import_module(module)):
        seen += 1
        entries = [entry for entry in known if entry.rpartition(".")[2] == name and resolve(entry) is value]
        if not entries:
            missing.append(f"{module}.{name}: add it to a page of docs/api, and a docstring")
        elif inspect.isclass(value) and not issubclass(value, BaseException):
            without = set().union(*(excluded.get(entry, set()) for entry in entries))
            members = set() if without == {"*"} else members_of(value) - without
            known_members = {entry.removeprefix(f"{own}.") for own in entries for entry in known}
            missing += [f"{module}.{name}.{one} has no docstring" for one in sorted(members - known_members)]
    assert seen > 0
    assert missing == []


def resolve(name: str) -> object:
    """The object of a name of the reference; None if it is not at the top of a module."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last, None)
    except ModuleNotFoundError:
        return None


def test_what_the_docs_import_is_in_the_reference(site: Path) -> None:
    known = {id(resolve(name)) for name in documented(site)}
    seen = 0
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for module, names in re.findall(r"^from (raysharded[\w.]*) import (.+)$", text, re.MULTILINE):
            for name in names.split(", "):
                value = resolve(f"{module}.{name}") or importlib.import_module(f"{module}.{name}")
                assert inspect.ismodule(value) or id(value) in known, f"{page.name}: {module}.{name}"
                seen += 1
    assert seen > 15
