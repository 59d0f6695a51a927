"""Runs whose data are read in blocks: the order of samples that they keep."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import raysharded as rs
from raysharded.checkpoint import newest_complete, open_storage
from raysharded.data import TokenDataset, dataset as data_set
from raysharded.data.ledger import expected_digest
from raysharded.data.order import WINDOW_BLOCKS, Blocks
from raysharded.data.store.find import find_stores
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter
from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.journal.log import read
from raysharded.report import load
from tests import patches
from tests.training.harness import VOCABULARY, Collector, SmallTask, make_driver, make_job, make_limits

SAMPLES = 4 * WINDOW_BLOCKS


class InBlocks:
    """Tokens whose samples are read in blocks."""

    def __init__(self, samples_per_block: int = 2) -> None:
        self.samples_per_block = samples_per_block

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return np.arange(index, index + 9, dtype=np.int64) % 32


def _trained(url: str, steps: int, *, workers: int = 1, microbatches: int = 2, samples_per_block: int = 2) -> Collector:
    job = make_job(
        url,
        task=SmallTask(),
        steps=steps,
        microbatches=microbatches,
        data=InBlocks(samples_per_block),
        engine=rs.EngineConfig(prefetch=workers > 1),  # a worker alone starts no process that reads
    )
    limits = make_limits(job, workers, global_batch_size=job.batch.global_batch_size)
    listener = Collector()
    driver = make_driver(job, limits, listener, metadata={"batch": asdict(job.batch)})
    driver.restore()
    driver.run()
    return listener


def test_a_run_keeps_the_blocks_and_the_batch_that_its_order_began_with(tmp_path: object) -> None:
    url = f"{tmp_path}/run"
    batch = make_job("", steps=1, microbatches=2).batch
    blocks = Blocks(samples=2, batch=batch.global_batch_size)

    first = _trained(url, 2)
    again = _trained(url, 4, workers=2)
    for step, numbers in {**first.numbers, **again.numbers}.items():
        expected = expected_digest(step, batch, SAMPLES, order=2, blocks=blocks)
        assert numbers["digest"] == [f"{word:016x}" for word in expected]
        assert numbers["digest"] != [f"{word:016x}" for word in expected_digest(step, batch, SAMPLES, order=1)]

    larger = _trained(url, 6, microbatches=4)
    wide = replace(batch, global_batch_size=2 * batch.global_batch_size)
    skipped = -4 * batch.global_batch_size  # larger steps, after four smaller ones
    for step, numbers in larger.numbers.items():
        expected = expected_digest(step, wide, SAMPLES, skipped=skipped, order=2, blocks=blocks)
        assert numbers["digest"] == [f"{word:016x}" for word in expected]

    report = load(url)
    assert report.ok, report.ledger
    assert {span.blocks for span in report.summary.spans} == {(2, batch.global_batch_size)}
    newest = newest_complete(open_storage(url)).checkpoint
    assert newest is not None
    assert newest.manifest.metadata["blocks"] == [2, batch.global_batch_size]
    starts = [entry for entry in read(open_storage(url)) if entry["kind"] == "started"]
    assert [entry.get("blocks") for entry in starts] == [None, [2, 4], [2, 4]]

    with pytest.raises(ConfigError, match="finds data whose blocks have 4 samples, the run began with 2"):
        _trained(url, 8, samples_per_block=4)


def test_a_store_with_as_many_other_tokens_is_refused(tmp_path: Path) -> None:
    """At the same path after the run, and on the disk of one worker from the beginning."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 8 * 301 + 1, dtype=np.uint32)
    for name, some in (("store", tokens), ("other", tokens[::-1])):
        with StoreWriter(str(tmp_path / name), Kind(tokenizer="bytes", vocab_size=VOCABULARY), 1000) as writer:
            writer.write(some)

    def trained(name: str, steps: int, workers: int = 1, **others: Any) -> None:
        data = TokenDataset(tmp_path / "store", seq_len=8)
        engine = rs.EngineConfig(prefetch=False)  # no process that reads has to start
        job = make_job(f"{tmp_path}/{name}", task=SmallTask(), steps=steps, microbatches=2, data=data, engine=engine)
        driver = make_driver(
            job, make_limits(job, workers), Collector(), metadata={"batch": asdict(job.batch)}, **others
        )
        driver.restore()
        driver.run()

    other = {WorkerId(1): partial(_find_at, str(tmp_path / "other"))}
    with pytest.raises(ConfigError, match="of a token store, other shards"):
        trained("both", 1, workers=2, prepare=other)
    trained("run", 1)
    trained("run", 2)
    (tmp_path / "store").rename(tmp_path / "before")
    (tmp_path / "other").rename(tmp_path / "store")
    with pytest.raises(ConfigError, match="of the same length with other contents than the run began with"):
        trained("run", 3)


def _find_at(folder: str) -> None:
    """In a worker's process: find this store at every path."""
    patches.replace(data_set, "find_stores", lambda _: find_stores([folder]))


def test_a_run_that_began_with_the_first_order_keeps_it(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from raysharded import numerics

    url = f"{tmp_path}/run"
    batch = make_job("", steps=1, microbatches=2).batch
    newest = numerics.newest()
    monkeypatch.setattr(numerics, "newest", lambda: newest.replace("order 2", "order 1"))
    first = _trained(url, 2)
    monkeypatch.undo()
    again = _trained(url, 4)
    for step, numbers in {**first.numbers, **again.numbers}.items():
        expected = expected_digest(step, batch, SAMPLES, order=1)
        assert numbers["digest"] == [f"{word:016x}" for word in expected]
    assert set(again.numbers) == {3, 4}
    assert load(url).ok
