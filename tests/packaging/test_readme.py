"""The README says what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import raysharded
from tests.paths import DOCS, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
NOT_PACKAGES = {"build", "dist"}


def layout() -> tuple[list[str], list[str]]:
    """The names in the two tables of the repository's layout: top level, and inside raysharded/."""
    text = README.split("## Repository layout")[1].split("\n## ")[0]
    top, inside = text.split("In `raysharded/`")
    return [re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE) for part in (top, inside)]  # type: ignore[return-value]


def entries_of(folder: Path) -> set[str]:
    """Folders as `name/`, links as `name`, modules as `name.py`, without what is hidden or generated."""
    found = set()
    for path in folder.iterdir():
        if path.name.startswith((".", "__pycache__", "__init__")) or path.name.endswith(".egg-info"):
            continue
        if path.is_symlink():
            found.add(path.name)
        elif path.is_dir() and path.name not in NOT_PACKAGES:
            found.add(f"{path.name}/")
        elif path.suffix == ".py":
            found.add(path.name)
    return found


def test_the_layout_names_every_path_at_the_top_and_no_other() -> None:
    top, _ = layout()
    assert sorted(top) == sorted(entries_of(ROOT))


def test_the_layout_names_every_package_and_module_of_the_library_and_no_other() -> None:
    _, inside = layout()
    assert sorted(inside) == sorted(entries_of(ROOT / "raysharded"))


def test_the_examples_compile_and_use_names_that_exist() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        compile(block, "README.md", "exec")
        assert set(re.findall(r"\brs\.(\w+)", block)) <= set(raysharded.__all__)


def test_the_checkpoint_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[2]
    model = torch.nn.Linear(2, 2)
    monkeypatch.chdir(tmp_path)
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(compile(example, "README.md", "exec"), names)  # noqa: S102 - the README's own text
    assert capsys.readouterr().out == "500\n"


def test_the_commands_name_files_and_commands_that_exist() -> None:
    lines = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    files = {word for line in lines for word in line.split() if word.startswith("examples/")}
    assert {"examples/quickstart.py", "examples/train_gpt.py", "examples/train_gpt.yaml"} <= files
    assert all((ROOT / file).is_file() for file in files)
    tested = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert tested is not None
    assert f"pip install {tested[1]}" in README


def test_every_example_is_in_the_table_of_the_readme() -> None:
    named = set(re.findall(r"\(examples/([^)]+)\)", README))
    assert named == {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}


def test_the_configuration_in_the_readme_is_accepted() -> None:
    calls = re.findall(r"rs\.(?:BatchConfig|ScalingConfig|RunConfig)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", README)
    assert len(calls) == 3
    for call in calls:
        eval(call, {"rs": raysharded})  # noqa: S307 - the README's own text


def test_every_relative_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
