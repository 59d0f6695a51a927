"""Sphinx configuration of the site that `make docs` makes of README.md and this folder.

The pages stay plain Markdown, readable on GitHub.

The source folder is the repository's root, so that links between pages are the same here and there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import raysharded

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "raysharded"
author = "the raysharded maintainers"
project_copyright = "the raysharded maintainers; Apache-2.0"
version = release = raysharded.__version__

NAVIGATION = {
    "Begin": [
        "Overview </README>",
        "quickstart",
        "tasks",
        "own-loop",
        "adapters-transformers",
        "adapters-accelerate",
        "adapters-torchtitan",
        "checking",
        "running",
        "saving",
        "resuming",
        "kubernetes",
        "gpus",
        "cli",
        "limits",
        "security",
    ],
    "When something happens": ["faults", "recovery", "control", "troubleshooting"],
    "Coming from": [
        "coming-from-ray-train",
        "coming-from-torchrun",
        "coming-from-torchft",
        "coming-from-hugging-face",
        "coming-from-torchtitan",
    ],
    "How exactness works": ["architecture", "glossary", "determinism", "how-it-works", "layouts", "memory"],
    "During and after a run": ["planning", "report", "metrics", "testing", "benchmarks"],
    "Checkpoints": ["checkpoints", "exchange", "storage", "security", "format"],
    "Reference": [
        "api/index",
        "dev/log",
        "dev/long-runs",
        "dev/laboratory",
        "dev/session",
        "dev/open-findings",
        "/CONTRIBUTING",
        "Changelog </CHANGELOG>",
    ],
}
"""The pages by heading, in the order of the sidebar."""

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md"]
exclude_patterns = ["**/.*", "actors", "benchmarks", "build", "checkpoint", "dist", "examples", "raysharded", "tests"]

myst_heading_anchors = 4
suppress_warnings = ["ref.python"]  # of `.name`, which several classes may have: it is shown without a link

# Docstrings are plain text: what is between backticks is a name, linked if this reference has it.
default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"raysharded {version}"
html_extra_path = ["_site"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}


def add_navigation(_: Sphinx, name: str, source: list[str]) -> None:
    """The sidebar, which would be noise in index.md."""
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            source[0] += "\n".join(
                ["\n\n```{toctree}", ":hidden:", ":maxdepth: 1", f":caption: {caption}", "", *pages, "```\n"]
            )


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
