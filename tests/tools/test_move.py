"""Modules get other names, in code, strings and prose, and nothing else changes; the map can be carried out."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools.move.fold import SameName, fold
from tools.move.plan import FILE, read
from tools.move.relocate import modules_in, relocate
from tools.move.rewrite import NameTaken, Rewriter

MOVES = {
    "raysharded.driver.losing": "raysharded.driver.handlers.worker_loss",
    "raysharded.driver.state": "raysharded.driver.state.state",
    "raysharded.units": "raysharded.quantities",
}
MODULES = frozenset({*MOVES, "raysharded", "raysharded.driver", "raysharded.errors"})
REWRITER = Rewriter(moves=MOVES, modules=MODULES)


def rewritten(text: str) -> str:
    return REWRITER.python(textwrap.dedent(text), "here")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from raysharded.units import size", "from raysharded.quantities import size"),
        ("import raysharded.units as u", "import raysharded.quantities as u"),
        ("from raysharded.driver import losing as lost", "from raysharded.driver.handlers import worker_loss as lost"),
        ("from raysharded.driver.state import State", "from raysharded.driver.state.state import State"),
        (
            "import raysharded.units\nraysharded.units.size(1)",
            "import raysharded.quantities\nraysharded.quantities.size(1)",
        ),
        ("x = 'raysharded.driver.losing.on_lost'", "x = 'raysharded.driver.handlers.worker_loss.on_lost'"),
        ("# see raysharded/driver/losing.py", "# see raysharded/driver/handlers/worker_loss.py"),
        ("from raysharded.errors import text_of", "from raysharded.errors import text_of"),
        ("x = 'raysharded.driver.states'", "x = 'raysharded.driver.states'"),
    ],
)
def test_imports_strings_and_comments_name_the_new_module(before: str, after: str) -> None:
    assert rewritten(before) == after


def test_uses_of_a_module_follow_its_name_but_for_local_names_of_a_function() -> None:
    found = rewritten(
        """
        from raysharded.driver import losing

        def act(event, default=losing.DEFAULT):
            return losing.on_lost(event), [losing for losing in event]

        def other(losing):
            return losing.on_lost
        """
    )
    assert "default=worker_loss.DEFAULT" in found
    assert "return worker_loss.on_lost(event), [losing for losing in event]" in found
    assert "return losing.on_lost\n" in found


def test_a_logger_keeps_the_name_that_it_shares_with_a_module() -> None:
    rewriter = Rewriter(moves=MOVES, modules=MODULES, loggers=frozenset({"raysharded.units"}))
    assert rewriter.python("import raysharded.units\nx = 'raysharded.units'", "here") == (
        "import raysharded.quantities\nx = 'raysharded.units'"
    )


def test_a_name_that_a_file_has_already_is_refused() -> None:
    with pytest.raises(NameTaken, match="here: module losing becomes worker_loss, which is bound there already"):
        rewritten("from raysharded.driver import losing\nworker_loss = losing.on_lost")


def test_prose_names_the_new_module_by_its_dots_and_by_its_path() -> None:
    text = "`raysharded.units`, `driver/losing.py`, raysharded/units.py, data/losing.py and raysharded.driver"
    assert REWRITER.prose(text) == (
        "`raysharded.quantities`, `driver/handlers/worker_loss.py`, raysharded/quantities.py, data/losing.py and "
        "raysharded.driver"
    )


def test_folded_modules_have_their_imports_together_and_each_after_what_it_imports() -> None:
    first = '"""One."""\n\nimport os\nfrom raysharded.b import B\n\nA = B\n'
    second = '"""Two."""\n\nimport sys\n\n# why\nB = sys.path\n'
    assert fold({"raysharded.a": first, "raysharded.b": second}) == (
        '"""One.\n\nTwo.\n"""\n\nfrom __future__ import annotations\n\nimport os\nimport sys\n\n\n'
        "# why\nB = sys.path\n\n\nA = B\n"
    )
    with pytest.raises(SameName, match=r"A: of raysharded\.a and of raysharded\.b"):
        fold({"raysharded.a": "A = 1\n", "raysharded.b": "A = 2\n"})


def test_files_are_moved_into_packages_that_have_the_name_of_one_of_them(tmp_path: Path) -> None:
    package = tmp_path / "raysharded"
    package.mkdir()
    (package / "__init__.py").write_text('"""All."""\n')
    (package / "state.py").write_text('"""State."""\n\nS = 1\n')
    (package / "loop.py").write_text('"""Loop."""\n\nfrom raysharded import state\n\nL = state.S\n')
    (tmp_path / "README.md").write_text("See `raysharded/loop.py`.\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    relocate(tmp_path, {"raysharded.state": "raysharded.state.state", "raysharded.loop": "raysharded.driver"})
    assert (package / "state" / "state.py").read_text() == '"""State."""\n\nS = 1\n'
    assert (package / "driver.py").read_text() == '"""Loop."""\n\nfrom raysharded.state import state\n\nL = state.S\n'
    assert (tmp_path / "README.md").read_text() == "See `raysharded/driver.py`.\n"


def test_every_module_in_the_map_is_in_its_place_before_or_after_the_move() -> None:
    plan, modules = read(FILE.read_text(encoding="utf-8")), modules_in(ROOT).keys()
    before = [old for old in plan.moves if old not in modules]
    after = [new for new in plan.moves.values() if new not in modules]
    assert not before or not after, "a module of the map was renamed, or is gone: change the map, too"
    packages = {new.rpartition(".")[0] for new in plan.moves.values()}
    there = {name for name, path in modules_in(ROOT).items() if path.name == "__init__.py"}
    assert packages - there <= plan.packages.keys(), "say what each new package is for"
