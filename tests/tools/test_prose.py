"""The check of prose finds banned words, long sentences and clauses in place of actors, and passes over code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.prose import INSTEAD, findings, main


def found(tmp_path: Path, name: str, text: str) -> list[str]:
    (tmp_path / name).write_text(text)
    return [f"{one.line}: {one.message}" for one in findings([tmp_path / name])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("The run goes on.", "1: 'goes on': continue, resume"),
        ("Fine.\n\nIt is\ntold so.", "3: 'is told': is notified, is requested"),
        ("Who asks, waits.", "1: name the actor first: 'Who asks, waits.'"),
        (" ".join(["word"] * 31) + ".", "1: 31 words in a sentence: " + repr("word " * 12)[:-1] + "'"),
        ("| a | What was lost is gone. |", "1: name the actor first: 'What was lost is gone.'"),
    ],
)
def test_a_page_is_read_sentence_by_sentence(tmp_path: Path, text: str, message: str) -> None:
    assert message in found(tmp_path, "page.md", text)


@pytest.mark.parametrize(
    "text",
    [
        "```\nit goes on\n```\n",
        "`goes on`, and [resume](go-on.md).",
        "What is lost?",
        "A list:\n\n- " + " ".join(["word"] * 20) + ".\n- " + " ".join(["word"] * 20) + ".\n",
    ],
)
def test_code_links_and_questions_are_passed_over(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, "page.md", text) == []


def test_docstrings_comments_and_long_texts_of_a_module_are_read(tmp_path: Path) -> None:
    module = '''"""What it does."""

LIMIT = 3
"""Of the run."""
SHORT = "it goes on"
LONG = "the run goes on then"  # and is told


def f() -> None:
    """Names.

        this listing goes on: it is banned all the same, but it is no sentence
    """
'''
    assert found(tmp_path, "module.py", module) == [
        "1: name the actor first: 'What it does.'",
        "1: a docstring that begins with 'What'",
        "4: a docstring that begins with 'Of'",
        "6: 'goes on': continue, resume",
        "6: 'is told': is notified, is requested",
        "12: 'goes on': continue, resume",
    ]


def test_the_command_says_where_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.md").write_text("It goes on.\n")
    (tmp_path / "b.md").write_text("It continues.\n")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/a.md:1: 'goes on': continue, resume\n"
    assert main([str(tmp_path / "b.md")]) == 0


def test_every_banned_expression_has_a_replacement_that_is_not_banned() -> None:
    for instead in INSTEAD.values():
        assert instead
        assert "go on" not in instead
