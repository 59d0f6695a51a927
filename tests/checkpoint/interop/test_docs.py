"""The examples of docs/exchange.md work unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import DOCS

_DOCS = DOCS / "exchange.md"


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_snippets_of_the_guide_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="needs `pip install peft`")
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", _DOCS.read_text(), re.DOTALL)
    assert len(snippets) == 5
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/exchange.md", "exec"), names)  # noqa: S102  # our own documentation
