"""The bits of the first version under the first number of each rule, and the decisions of a run's number of a rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysharded import numerics
from raysharded.actors.process import environment
from raysharded.actors.step import forward_backward
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.catalog import newest_complete
from raysharded.data import order
from raysharded.data.ledger import expected_digest
from raysharded.data.order import Int64s
from raysharded.errors import InexactError
from raysharded.ids import WorkerId, derive_seed
from raysharded.journal.log import read
from raysharded.report import load
from tests import patches
from tests.cases import tried_each_time
from tests.paths import GOLDEN
from tests.training.harness import Collector, SmallTask, make_driver, make_job, make_limits
from tests.training.rule_tasks import (
    COMPILED,
    PROGRAMS,
    RESUMED,
    SOME,
    STOPPED_AFTER,
    Bits,
    Program,
    bits_of,
    slug,
    trainer_of,
)

pytestmark = pytest.mark.procs

WHEEL = GOLDEN / "wheels" / "raysharded-0.1.0-py3-none-any.whl"
COMMIT = "1b7a2dc"
"""Commit of the wheel."""


# -- beside the first version --


def of_the_wheel(folder: Path, which: str) -> dict[str, Any]:
    """The results of the first version, in separate processes."""
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder / "version")
    runs = folder / "runs"
    runs.mkdir()
    script = Path(__file__).with_name("rule_tasks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(runs), which],
        cwd=runs,  # or else its workers would find this version in their folder
        env={**os.environ, "PYTHONPATH": str(folder / "version"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["version"] == "0.1.0"
    assert found["from"].startswith(str(folder))
    return found


def differences(name: str, program: Program, old: Bits, new: Bits) -> list[str]:
    """A line for each of the program's rules if its bits are others."""
    what = [f"{key}: {old[key]} then, {new[key]} now" for key in old if old[key] != new[key]]
    return [
        f"{rule}: this version computes other bits than {COMMIT} under {rule} 1, in {name!r}: {'; '.join(what)}"
        for rule in program.rules
        if what
    ]


def is_dropped(program: Program) -> list[str]:
    """The rules of the program whose first number this version no longer has."""
    return [rule for rule in program.rules if 1 not in numerics.RULES[rule].listed]


def beside(programs: Mapping[str, Program], old: Mapping[str, Bits], folder: Path) -> list[str]:
    """Differences of the programs of which this version has all rules: others are refused."""
    found = []
    for name, program in programs.items():
        if not is_dropped(program):
            new = bits_of(trainer_of(slug(name), program, str(folder)), program.compared)
            found += differences(name, program, old[name], new)
    return found


@pytest.fixture
def first_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """New runs begin under the first number of each rule that has it, as the first version's did."""
    monkeypatch.setattr(numerics, "newest", lambda: numerics.kept(""))


@pytest.mark.usefixtures("first_numbers")
@pytest.mark.parametrize("which", tried_each_time(["some"], ["some", "quick"]))
def test_each_rule_gives_the_bits_of_the_first_version_and_its_runs_continue_with_them(
    tmp_path: Path, which: str
) -> None:
    programs = {"some": SOME, "quick": PROGRAMS}[which]
    tried = {rule for program in (*programs.values(), *COMPILED.values(), RESUMED) for rule in program.rules}
    assert tried == numerics.RULES.keys()
    old = of_the_wheel(tmp_path / "old", which)
    assert old["bits"].keys() == programs.keys()
    found = beside(programs, old["bits"], tmp_path / "new")
    assert not found, "\n".join(found)

    begun = trainer_of("stopped", RESUMED, str(tmp_path / "old" / "runs"))
    if dropped := is_dropped(RESUMED):
        with pytest.raises(InexactError, match=f"under .*{dropped[0]} 1"):
            bits_of(begun, RESUMED.compared)
        return
    went_on, whole = bits_of(begun, RESUMED.compared), old["to its end"]
    for name in set(RESUMED.compared) - {"fingerprint"}:
        assert old["stopped"][name].keys() == {str(step + 1) for step in range(STOPPED_AFTER)}
        went_on[name] = {**old["stopped"][name], **went_on[name]}
    found = differences("a run that is gone on with", RESUMED, whole, went_on)
    assert not found, "\n".join(found)
    assert load(begun.url).ok


@pytest.mark.usefixtures("first_numbers")
@pytest.mark.long
@pytest.mark.slow
def test_compiled_blocks_give_the_bits_of_the_first_version(tmp_path: Path) -> None:
    old = of_the_wheel(tmp_path / "old", "compiled")
    found = beside(COMPILED, old["bits"], tmp_path / "new")
    assert not found, "\n".join(found)


# -- a rule with one more number --


def _other_order(seed: int, positions: Int64s, num_samples: int, blocks: order.Blocks) -> Int64s:
    return np.asarray(num_samples - 1 - order.ORDERS[1](seed, positions, num_samples, blocks), dtype=np.int64)


def _drawn_otherwise(*of: int | str) -> None:
    torch.manual_seed(derive_seed("drawn otherwise", *of))


def have_another(*rules: str) -> None:
    """This process's raysharded has one more number of these rules."""
    for rule in rules:
        listed = numerics.RULES[rule].listed
        numerics.RULES[rule] = replace(numerics.RULES[rule], listed=(*listed, listed[-1] + 1))
    if "order" in rules:
        order.ORDERS[numerics.RULES["order"].listed[-1]] = _other_order
    if "draws" in rules:
        forward_backward.DRAWS[numerics.RULES["draws"].listed[-1]] = _drawn_otherwise


@pytest.fixture
def tables() -> Iterator[None]:
    """The tables of rules; they are restored at the end."""
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
        (table, dict(table)) for table in (numerics.RULES, order.ORDERS, forward_backward.DRAWS)
    ]
    yield
    for table, before in kept:
        table.clear()
        table.update(before)


def trained(
    url: str, steps: int, *, prepare: Callable[[], None] | None = None, **limits: Any
) -> tuple[Collector, str | None]:
    """A run of one worker, from its newest checkpoint on; `prepare`: called first in the worker's process."""
    job = make_job(url, task=SmallTask(), steps=steps, microbatches=2)
    listener = Collector()
    first = {} if prepare is None else {WorkerId(0): prepare}
    driver = make_driver(
        job, make_limits(job, 1, **limits), listener, prepare=first, metadata={"batch": asdict(job.batch)}
    )
    driver.restore()
    return listener, driver.run().result_fingerprint


def is_read_right(url: str) -> bool:
    report = load(url)
    assert report.ledger is not None
    return report.ok


def rules_in_checkpoint(url: str) -> str:
    newest = newest_complete(open_storage(url)).checkpoint
    assert newest is not None
    return str(newest.manifest.metadata["arithmetic"][numerics.KEY])


@pytest.mark.usefixtures("tables")
def test_a_run_continues_under_the_number_that_it_began_with_and_a_new_one_takes_the_newest(tmp_path: Path) -> None:
    batch = make_job("", steps=1, microbatches=2).batch

    def was_read(listener: Collector, number: int) -> bool:
        return all(
            numbers["digest"] == [f"{word:016x}" for word in expected_digest(step, batch, 301, order=number)]
            for step, numbers in listener.numbers.items()
        )

    before = numerics.newest()
    undisturbed, fingerprint = trained(f"{tmp_path}/undisturbed", 4)
    trained(f"{tmp_path}/begun", 2)
    have_another("order", "draws")
    gone_on, same = trained(f"{tmp_path}/begun", 4, prepare=partial(have_another, "order", "draws"))
    assert same == fingerprint
    assert gone_on.numbers == {step: undisturbed.numbers[step] for step in (3, 4)}
    assert rules_in_checkpoint(f"{tmp_path}/begun") == before
    assert is_read_right(f"{tmp_path}/begun")

    fresh, other = trained(f"{tmp_path}/fresh", 2, prepare=partial(have_another, "order", "draws"))
    assert other != fingerprint
    assert was_read(undisturbed, numerics.number_of(before, "order"))
    assert was_read(fresh, numerics.number_of(numerics.newest(), "order"))
    assert is_read_right(f"{tmp_path}/fresh"), "the report knows under which order it read"
    assert rules_in_checkpoint(f"{tmp_path}/fresh") == numerics.newest() != before
    (started,) = [entry for entry in read(open_storage(f"{tmp_path}/fresh")) if entry["kind"] == "started"]
    assert started[numerics.KEY] == numerics.newest()


@pytest.mark.usefixtures("tables")
def test_the_number_of_draws_arrives_where_the_dropout_is_drawn(tmp_path: Path) -> None:
    before, _ = trained(f"{tmp_path}/before", 1)
    have_another("draws")
    after, _ = trained(f"{tmp_path}/after", 1, prepare=partial(have_another, "draws"))
    assert before.numbers[1]["digest"] == after.numbers[1]["digest"]
    assert before.numbers[1]["loss"] != after.numbers[1]["loss"]


# -- another machine --


def be_elsewhere() -> None:
    """In a worker's process: make it believe to compute with another version of torch."""
    here = environment.arithmetic
    patches.replace(environment, "arithmetic", lambda *args: {**here(*args), "torch": "9.9.0"})


def test_a_run_that_finds_another_torch_is_refused_once_or_continues_and_its_report_shows_from_where(
    tmp_path: Path,
) -> None:
    url = f"{tmp_path}/run"
    trained(url, 2)
    with pytest.raises(InexactError, match=r"up to step 2 with torch .*, and its worker started with torch 9.9.0"):
        trained(url, 4, prepare=be_elsewhere)
    refused = load(url).summary
    assert not [event for event in refused.worker_events if event.what in ("refused", "start failed")]
    assert not refused.avoided_nodes

    trained(url, 4, prepare=be_elsewhere, accept_arithmetic=True)
    trained(url, 5, prepare=be_elsewhere)  # it is in the journal: nobody has to accept it again
    report = load(url)
    assert report.ok
    (change,) = report.summary.arithmetic_changes
    assert (change.from_step, change.changes) == (3, {"torch": (torch.__version__, "9.9.0")})
    with pytest.raises(InexactError, match="to step 5 with torch 9"):
        trained(url, 6)
