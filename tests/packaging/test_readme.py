"""The README describes the real contents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import raysharded
from tests.paths import DOCS, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_examples_compile_and_use_names_that_exist() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "README.md", "exec")
        assert set(re.findall(r"\brs\.(\w+)", block)) <= set(raysharded.__all__)


def test_the_checkpoint_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    model = torch.nn.Linear(2, 2)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    for first_step in (0, 500):  # the first start, and the next
        exec(compile(example, "README.md", "exec"), names)  # noqa: S102 - the README's own text
        assert names["first_step"] == first_step


def test_the_commands_name_files_and_commands_that_exist() -> None:
    lines = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    files = {word for line in lines for word in line.split() if word.startswith("examples/")}
    assert "examples/quickstart.py" in files
    assert all((ROOT / file).is_file() for file in files)
    tested = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert tested is not None
    assert f"pip install {tested[1]}" in README


def test_every_page_installs_a_checkout_with_the_same_lines() -> None:
    pages = [README, (DOCS / "quickstart.md").read_text(encoding="utf-8")]
    found = [re.findall(r"^(?:python3 -m venv|pip install (?!')).*$", page, re.MULTILINE) for page in pages]
    assert len(found[0]) == 3
    assert found[0] == found[1]


def test_every_example_is_in_the_table_of_the_index() -> None:
    named = set(re.findall(r"\(\.\./examples/([^)]+)\)", (DOCS / "index.md").read_text(encoding="utf-8")))
    assert named == {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}


def test_the_configuration_in_the_readme_is_accepted() -> None:
    calls = re.findall(r"rs\.(?:BatchConfig|ScalingConfig|RunConfig)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", README)
    assert len(calls) == 3
    for call in calls:
        eval(call, {"rs": raysharded})  # noqa: S307 - the README's own text


def test_the_readme_is_short_and_shows_output_on_its_first_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130
    assert lines.index("```") < 10


def test_every_relative_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
