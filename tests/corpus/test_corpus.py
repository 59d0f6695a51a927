"""The corpus of programs: each row is equal at every size and right beside plain torch, or refused in its words."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.cases import tried_each_time
from tests.corpus.plain import Plain
from tests.corpus.programs import NEED_TRANSFORMERS, PROGRAMS, program_of
from tests.corpus.rows import KINDS, MODELS, ROWS
from tests.corpus.runs import Ran
from tests.corpus.variants import EACH_TIME, VARIANTS, VARIED
from tests.corpus.verdicts import beside_plain, verdict, verdict_varied, wrong
from tests.paths import ROOT

OWN = [name for name in ROWS if name not in NEED_TRANSFORMERS]
TENTH = [name for name, row in ROWS.items() if row.tenth]
OWN_EACH_TIME = ("experts_by_data", "data_draws_sometimes", "submodule_in_loss", "none_samples")
"""Rows of the tenth that are tried each time: equal bits beside plain torch, and refusals of data and
of a loss. The code of the others has tests in `tests/training` and `tests/actors`."""
STOCK_SHORT = ("llama", "wav2vec2")
"""Rows that need transformers: a decoder with a tied head, and an encoder of sound that draws from NumPy and has weight
norm. Those of a session are in `tests/adapters`."""
MOST_REFUSED_MODELS, MOST_REFUSED_OTHERS = 6, 8


# -- the list --


def test_each_row_has_a_program_and_each_program_a_row() -> None:
    assert PROGRAMS.keys() == ROWS.keys()
    assert len(ROWS) >= 207, "the list only grows"


def test_few_models_optimizers_and_idioms_are_refused() -> None:
    refused = [row for row in ROWS.values() if row.is_refused]
    assert len([row for row in refused if row.kind in MODELS]) <= MOST_REFUSED_MODELS
    assert len([row for row in refused if row.kind in ("optimizer", "idiom")]) <= MOST_REFUSED_OTHERS


def test_a_tenth_is_varied_and_a_tenth_has_separate_workers() -> None:
    assert set(VARIED) <= ROWS.keys()
    assert len(VARIED) * 10 >= len(ROWS)
    assert sum(row.separate for row in ROWS.values()) * 10 >= len(ROWS)


# -- the comparison --

KEPT = {"weight.mean": torch.ones(2)}
NUMBERS = {"loss": 1.5, "gradient_norm": 0.5}


def ran(weight: float = 2.0, **numbers: float) -> Ran:
    return Ran(
        numbers=({**NUMBERS, **numbers},), fingerprint="0", weights={"weight": torch.tensor([1.0, weight])}, kept=KEPT
    )


def plain(weight: float = 2.0, loss: float = 1.5, **others: torch.Tensor) -> Plain:
    weights = {"weight": torch.tensor([1.0, weight]), **others}
    return Plain(losses=(loss,), norms=(0.5,), evaluations=(), weights=weights, without_gradient=(), kept=KEPT)


def test_what_is_further_from_plain_torch_than_the_tolerance_is_named() -> None:
    assert not beside_plain(ran(), plain(), 1e-5)
    assert not beside_plain(ran(loss=1.50001), plain(), 1e-5)
    assert beside_plain(ran(loss=1.5001), plain(), 1e-5) == "not plain torch's: loss 1: 1.5001 for 1.5"
    assert "gradient_norm 1: nan for 0.5" in beside_plain(ran(gradient_norm=float("nan")), plain(), 1e-5)
    assert "weight is 1.0e-02 of its largest from it" in beside_plain(ran(2.02), plain(), 1e-5)
    assert "weight is nan" in beside_plain(ran(float("nan")), plain(), 1e-5)
    other = dataclasses.replace(plain(), weights={"weight": torch.ones(2, dtype=torch.float64)})
    assert "weight is torch.float32 (2,) for torch.float64 (2,)" in beside_plain(ran(), other, 1e-5)
    assert "weight is not in plain torch's state" in beside_plain(ran(), dataclasses.replace(plain(), weights={}), 1e-5)
    assert not beside_plain(ran(2.02), dataclasses.replace(plain(), without_gradient=("weight",)), 1e-5)
    stale = dataclasses.replace(ran(), kept={**KEPT, "weight.square": torch.ones(2)})
    assert "weight.square is not in plain torch's state" in beside_plain(stale, plain(), 1e-5)
    assert "missing is not in the checkpoint" in beside_plain(ran(), plain(missing=torch.ones(1)), 1e-5)


def test_the_first_bit_that_differs_between_two_sizes_is_named() -> None:
    one = ran()
    for other, words in (
        (ran(loss=1.5 + 2**-52), "in step 1: loss 1.5000000000000002 for 1.5"),
        (dataclasses.replace(ran(2.0 + 2**-22), fingerprint="1"), "at the end: weight"),
        (dataclasses.replace(ran(), fingerprint="1"), "in what the optimizer keeps"),
    ):
        assert wrong({"1 worker": one, "3 workers": other}) == f"3 workers and 1 worker differ {words}"
    assert not wrong({"1 worker": one, "3 workers": ran()})


# -- the rows --


@pytest.mark.procs
@pytest.mark.parametrize("name", tried_each_time(OWN_EACH_TIME, [name for name in TENTH if name in OWN]))
def test_a_row_is_as_expected_in_a_short_trial(name: str) -> None:
    found = verdict(ROWS[name], program_of(name), is_short=True)
    assert found.is_right, f"{ROWS[name].about}: {found.outcome}: {found.why}"


@pytest.mark.procs
@pytest.mark.long
@pytest.mark.parametrize("name", OWN)
def test_a_row_is_as_expected(name: str) -> None:
    found = verdict(ROWS[name], program_of(name))
    assert found.is_right, f"{ROWS[name].about}: {found.outcome}: {found.why}"


def as_it_says(folder: Path, *arguments: str) -> None:
    """Run it in a separate process, whose workers have imported transformers; its output names the differences."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.corpus", "--folder", str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert " equal " in done.stdout


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.long
def test_two_stock_models_are_as_expected(tmp_path: Path) -> None:
    as_it_says(tmp_path, "--short", "--rows", *STOCK_SHORT)


def of_transformers() -> Mapping[str, list[str]]:
    """Kind -> its rows that need transformers."""
    found = {kind: [name for name in NEED_TRANSFORMERS if ROWS[name].kind == kind] for kind in KINDS}
    return {kind: sorted(names) for kind, names in found.items() if names}


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", of_transformers())
def test_the_stock_models_of_a_kind_are_as_expected(tmp_path: Path, kind: str) -> None:
    as_it_says(tmp_path, "--rows", *of_transformers()[kind])


OWN_VARIED = [
    (name, variant)
    for name in VARIED
    if name in OWN
    for variant in VARIANTS
    if VARIANTS[variant].applies(program_of(name))
]


@pytest.mark.procs
@pytest.mark.parametrize(("name", "variant"), tried_each_time(EACH_TIME, OWN_VARIED))
def test_a_row_is_equal_otherwise(name: str, variant: str) -> None:
    found = verdict_varied(name, VARIANTS[variant], program_of(name))
    assert found.is_right, f"{VARIANTS[variant].about}: {found.outcome}: {found.why}"


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in VARIED if name not in OWN])
def test_a_stock_model_is_equal_otherwise(tmp_path: Path, name: str) -> None:
    as_it_says(tmp_path, "--rows", name, "--varied")
