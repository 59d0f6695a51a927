"""The audit of a run's data counts what each step read, with skipped samples and changed weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings, strategies as st

from raysharded.data import Bucketed, Mixture, sample_ids
from raysharded.errors import StorageError
from raysharded.overrides import Decisions, decided, skipped_before
from raysharded.report.data_audit import ALONE, audit, reasons, skipped_ranges, sources_read
from raysharded.report.read_samples import samples_of
from tests.cases import examples
from tests.cli.test_commands import invoke
from tests.report import entries
from tests.report.entries import started, write_run

SOURCES = {"web": list(range(40)), "books": list(range(9)), "code": list(range(5))}
BATCH = 6


PLANNED: list[tuple[int, dict[str, float]]] = [(0, {"web": 7, "books": 2, "code": 1}), (50, {"web": 1, "books": 1})]
LIMITS = st.dictionaries(st.sampled_from(sorted(SOURCES)), st.sampled_from([0.5, 1, 1.5, 2, 4]))
"""Epochs at most of any sources, none and all of them included."""


def _mixture(limits: dict[str, float] | None = None) -> Mixture:
    """A source at its limit leaves its part to the others."""
    return Mixture(SOURCES, PLANNED, seed=3, max_epochs=limits, at_limit="reweight" if limits else "stop")


def _reached(mixture: Mixture, decisions: Decisions, steps: range) -> int:
    """The last of the steps that the mixture has samples for."""
    within = [step for step in steps if step * BATCH + skipped_before(decisions.skips, step) <= len(mixture)]
    assume(within)
    return within[-1]


@given(
    last=st.integers(1, 30),
    skips=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), unique_by=lambda skip: skip[0], max_size=3),
    change=st.none() | st.integers(0, 200),
    limits=LIMITS,
)
@example(last=30, skips=[], change=None, limits={"books": 2})
@example(last=30, skips=[(4, 7)], change=60, limits={"books": 2, "code": 1.5, "web": 0.5})
@settings(max_examples=examples(50, of=100), deadline=None)
def test_sources_are_counted_as_if_each_position_were_looked_up(
    last: int, skips: list[tuple[int, int]], change: int | None, limits: dict[str, float]
) -> None:
    totals, told = 0, []
    for step, more in sorted(skips):
        totals += more
        told.append((step, totals))
    weights = () if change is None else ((change // BATCH + 1, change, (("books", 1.0), ("code", 3.0))),)
    decisions = Decisions(skips=tuple(told), weights=weights)
    mixture = _mixture(limits)
    data = {"num_samples": len(mixture), "mixture": json.loads(mixture.order_text)}
    as_read = mixture.with_changes([] if change is None else [(change, {"books": 1.0, "code": 3.0})])
    last = _reached(as_read, decisions, range(1, last + 1))
    passed = skipped_ranges(decisions, last, BATCH, {})
    found = sources_read(data, decisions, last, BATCH, passed)
    positions = [
        ((step - 1) * BATCH + skipped_before(decisions.skips, step) + place, step)
        for step in range(1, last + 1)
        for place in range(BATCH)
    ]
    counts = Counter(as_read.origin(position)[0] for position, _ in positions)
    assert {one.name: one.read for one in found} == {name: counts[name] for name in SOURCES}
    read = {position for position, _ in positions}
    left_out = set(range(max(read) + 1)) - read
    assert sum(one.samples for one in passed) == len(left_out)
    skipped = Counter(as_read.origin(position)[0] for position in left_out)
    assert {one.name: one.skipped for one in found} == {name: skipped[name] for name in SOURCES}
    assert sum(one.wanted for one in found) == pytest.approx(len(positions))
    assert sum(one.read for one in found) == len(positions)
    if not told:
        sets = max(3, len(as_read.weights) + len(as_read.ended))
        assert all(abs(one.read - one.wanted) <= sets for one in found), "within 1 under each set of weights"
        steps = dict(positions)
        for one in found:
            places = [position for position, _ in positions if as_read.origin(position)[0] == one.name]
            assert one.num_samples is not None
            for epoch in one.epochs:
                first = (epoch.number - 1) * one.num_samples
                assert epoch.first_step == steps[places[first]]
                assert epoch.last_step == steps[places[first + epoch.samples - 1]]


def test_data_that_are_no_mixture_are_one_source_with_epochs() -> None:
    (found,) = sources_read({"num_samples": 10}, Decisions(), 4, BATCH, ())
    assert (found.name, found.read, found.wanted, found.skipped) == (ALONE, 24, 24.0, 0)
    epochs = [(one.number, one.samples, one.first_step, one.last_step) for one in found.epochs]
    assert epochs == [(1, 10, 1, 2), (2, 10, 2, 4), (3, 4, 4, 4)]


def test_data_that_have_an_order_themselves_have_no_epochs(tmp_path: Path) -> None:
    data = Bucketed(list(range(10)), [1] * 10, microbatch_size=2)
    entry = {"num_samples": len(data), "samples_per_block": -data.order_digest}
    (found,) = sources_read(entry, Decisions(), 4, BATCH, ())
    assert (found.num_samples, found.read, found.wanted, found.epochs) == (None, 24, 24.0, ())
    steps = [entries.step(number) for number in (1, 2)]
    write_run(tmp_path / "run", [started(), ("data", entry), *entries.generation(1, [0, 1], 0), *steps])
    told = invoke("data", "audit", tmp_path / "run")
    assert str(len(data)) not in told.stdout
    assert "epoch 1" not in told.stdout


def test_skipped_samples_have_the_reason_for_which_they_were_skipped() -> None:
    told_entries: list[dict[str, Any]] = [
        {"kind": "started", "skips": [], "learning_rate": []},
        {"kind": "rewind", "to_step": 2, "skip_samples": 12, "skips": [[2, 12]]},
        {"kind": "rewind", "to_step": 4, "who": "asked", "skip_samples": 0, "skips": [[2, 12]], "learning_rate": []},
        {"kind": "rewind", "to_step": 5, "who": "asked", "skip_samples": 6, "skips": [[2, 12], [5, 18]]},
    ]
    found = skipped_ranges(decided(told_entries), 9, BATCH, reasons(told_entries))
    told = [(one.after_step, one.first_position, one.samples, one.reason) for one in found]
    assert told == [(2, 12, 12, "not finite"), (5, 42, 6, "asked")]


def test_tokens_are_counted_where_the_journal_has_the_length_of_a_sample(tmp_path: Path) -> None:
    steps = [entries.step(number) for number in (1, 2)]
    for name, about in (("tokens", {"seq_len": 128}), ("rows", {})):
        write_run(tmp_path / name, [started(**about), entries.data(), *entries.generation(1, [0, 1], 0), *steps])
    (read,) = audit(str(tmp_path / "tokens")).sources
    assert (read.read, read.tokens, read.wanted_tokens) == (8, 8 * 128, 8 * 128)
    assert audit(str(tmp_path / "rows")).sources[0].tokens is None
    told = invoke("data", "audit", tmp_path / "tokens").stdout
    assert told.count("1024") == 2
    assert "wanted tokens" in told
    assert "tokens" not in invoke("data", "audit", tmp_path / "rows").stdout


def _by_position(step: int, positions: Any) -> Any:
    return positions


@given(
    first=st.integers(1, 20),
    number=st.integers(1, 12),
    skips=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), unique_by=lambda skip: skip[0], max_size=3),
    change=st.none() | st.integers(0, 200),
    limits=LIMITS,
)
@example(first=1, number=12, skips=[(4, 7)], change=40, limits={"books": 1, "code": 1.5, "web": 0.5})
@settings(max_examples=examples(40, of=100), deadline=None)
def test_the_samples_of_steps_are_those_that_each_position_has_by_itself(
    first: int, number: int, skips: list[tuple[int, int]], change: int | None, limits: dict[str, float]
) -> None:
    totals, told = 0, []
    for step, more in sorted(skips):
        totals += more
        told.append((step, totals))
    weights = () if change is None else ((change // BATCH + 1, change, (("books", 1.0), ("code", 3.0))),)
    decisions, mixture = Decisions(skips=tuple(told), weights=weights), _mixture(limits)
    data = {"num_samples": len(mixture), "mixture": json.loads(mixture.order_text)}
    steps = range(first, first + number)
    as_read = mixture.with_changes([] if change is None else [(change, {"books": 1.0, "code": 3.0})])
    steps = range(first, _reached(as_read, decisions, steps) + 1)
    found = samples_of(data, decisions, BATCH, steps, _by_position)
    expected: dict[str, list[tuple[int, int, int]]] = {name: [] for name in SOURCES}
    for step in steps:
        start = (step - 1) * BATCH + skipped_before(decisions.skips, step)
        for position in range(start, start + BATCH):
            name, index = as_read.origin(position)
            expected[name].append((as_read.counts(position)[name], index, step))
    for source in found:
        size, rows = len(SOURCES[source.name]), list[tuple[int, int]]()
        assert source.samples == len(expected[source.name])
        for part in source.ranges:
            assert part.epoch is not None
            assert part.first + part.samples <= size, "it is in one epoch"
            assert len(part.ids) == part.samples
            begin = (part.epoch - 1) * size + part.first
            own = expected[source.name][len(rows) : len(rows) + part.samples]
            assert (own[0][2], own[-1][2]) == (part.first_step, part.last_step)
            rows += [(begin + place, index) for place, index in enumerate(part.ids)]
        assert rows == [(rank, index) for rank, index, _ in expected[source.name]]


def test_steps_of_data_without_sources_are_listed_with_the_ids_that_were_read(tmp_path: Path) -> None:
    steps = [entries.step(number) for number in range(1, 16)]
    start = [started(max_steps=15), entries.data(), *entries.generation(1, [0, 1], 0)]
    write_run(tmp_path / "run", [*start, *steps])
    listed = json.loads(invoke("data", "audit", tmp_path / "run", "--steps", "12:14", "--json").stdout)
    (read,) = listed["samples_read"]
    batch, positions = entries.BATCH.global_batch_size, np.arange(44, 56)
    ids = sample_ids(entries.BATCH.seed, positions, entries.NUM_SAMPLES).tolist()
    assert read == {
        "name": ALONE,
        "samples": 3 * batch,
        "ranges": [
            {"epoch": 1, "first": 44, "samples": 6, "first_step": 12, "last_step": 13, "ids": ids[:6]},
            {"epoch": 2, "first": 0, "samples": 6, "first_step": 13, "last_step": 14, "ids": ids[6:]},
        ],
    }
    told = invoke("data", "audit", tmp_path / "run", "--steps", "1:12").stdout
    assert "places 0 to 47 of epoch 1, in steps 1 to 12: " in told
    assert told.count(", ...") == 1, "a line shows a few ids"
    assert "places 4 to 7 of epoch 1, in steps 2 to 2" in invoke("data", "audit", tmp_path / "run", "--steps", 2).stdout
    for wrong, message in (("0:3", "the run has steps 1 to 15"), ("9:16", "steps 9:16"), ("x", "as in 100:120")):
        refused = invoke("data", "audit", tmp_path / "run", "--steps", wrong)
        assert refused.exit_code != 0
        assert message in refused.stderr


def test_samples_of_an_order_that_the_journal_has_as_a_digest_are_listed_by_place() -> None:
    data = Bucketed(list(range(10)), [1] * 10, microbatch_size=2)
    entry = {"num_samples": len(data), "samples_per_block": -data.order_digest}
    (found,) = samples_of(entry, Decisions(), BATCH, range(3, 5), _by_position)
    (part,) = found.ranges
    assert (part.epoch, part.first, part.samples, part.ids) == (None, 12, 12, ())


def test_samples_of_steps_that_the_ledger_does_not_prove_are_counted_by_source(tmp_path: Path) -> None:
    steps = [entries.step(1), entries.step(2, digest=["0" * 16, "1" * 16]), entries.step(3)]
    write_run(tmp_path / "run", [started(), entries.data(), *entries.generation(1, [0, 1], 0), *steps])
    assert [one.unproven for one in audit(str(tmp_path / "run")).sources] == [4]
    told = invoke("data", "audit", tmp_path / "run")
    assert told.exit_code == 1
    assert "unproven" in told.stdout
    mixture = _mixture()
    data = {"num_samples": len(mixture), "mixture": json.loads(mixture.order_text)}
    found = sources_read(data, Decisions(), 20, BATCH, (), (7, 12))
    origins = Counter(mixture.origin(position)[0] for position in (*range(36, 42), *range(66, 72)))
    assert {one.name: one.unproven for one in found} == {name: origins[name] for name in SOURCES}


def test_a_run_without_a_step_has_nothing_to_audit(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [started()])
    with pytest.raises(StorageError, match="has not read any data yet"):
        audit(str(tmp_path / "run"))
    with pytest.raises(StorageError):
        audit(str(tmp_path / "none"))


def test_the_audit_of_a_fork_counts_the_steps_that_its_own_journal_proves(tmp_path: Path) -> None:
    steps = [entries.step(number) for number in (4, 5, 6)]
    write_run(tmp_path / "fork", [started(3), entries.data(), *entries.generation(1, [0, 1], 3), *steps])
    told = invoke("data", "audit", tmp_path / "fork")
    assert told.exit_code == 0, told.output
    assert "12 samples in 3 steps, from step 4 on: 0 missing, 0 repeated" in told.stdout
