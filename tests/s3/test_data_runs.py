"""Runs whose token store is on S3: the bits of a local store, no keys in what they write, and little waiting."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import raysharded as rs
from raysharded.checkpoint import open_storage
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter
from raysharded.driver.state.state import State
from raysharded.errors import DataError
from raysharded.ids import WorkerId
from raysharded.locations import join_url
from raysharded.report import load
from raysharded.testing import Fault, FaultPlan
from tests.cli.test_commands import invoke
from tests.s3.server import S3Server
from tests.training.harness import SEQUENCE, VOCABULARY, Collector, make_driver, make_job, make_limits

pytestmark = [pytest.mark.s3, pytest.mark.procs]
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 5_000, dtype=np.uint32)


def written(url: str) -> str:
    with StoreWriter(url, Kind(tokenizer="bytes", vocab_size=VOCABULARY), 1_000) as writer:
        writer.write(TOKENS)
    return url


def prepared(environment: Mapping[str, str], log: Path) -> None:
    """In a worker's process: use these keys, and write all that is logged or printed into a file."""
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    logging.basicConfig(level=logging.INFO, force=True)
    logging.getLogger("raysharded.worker").info("begins with the key %s", os.environ.get("AWS_ACCESS_KEY_ID"))


def trained(
    url: str, store: str, steps: int, workers: int, log: Path, faults: FaultPlan | None = None
) -> tuple[State, Collector]:
    data = rs.TokenDataset(store, seq_len=SEQUENCE, disk_cache_bytes=0)
    job = make_job(url, steps=steps, microbatches=4, data=data, save_every=2, faults=faults)
    losses = len(faults.faults) if faults else 0
    limits = make_limits(job, workers, min_workers=1 if losses else workers, max_worker_losses=losses, join_wait_s=60.0)
    keys = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    prepare = {WorkerId(worker): partial(prepared, keys, log) for worker in range(workers + losses)}
    listener = Collector()
    driver = make_driver(job, limits, listener, metadata={"batch": asdict(job.batch)}, prepare=prepare)
    driver.restore()
    return driver.run(), listener


def test_a_store_on_the_server_trains_the_bits_of_a_local_one_and_no_file_has_the_key(
    s3_server: S3Server, s3_url: str, tmp_path: Path
) -> None:
    """One worker and two, of which one is killed; then a shard that was deleted."""
    local, log = written(str(tmp_path / "store")), tmp_path / "workers.log"
    store, url = written(join_url(s3_url, "store")), join_url(s3_url, "run")
    undisturbed, alone = trained(str(tmp_path / "run"), local, 6, 1, log)
    kill = Fault(worker=WorkerId(1), step=3, phase="backward")
    plan = FaultPlan(faults=(kill,), folder=str(tmp_path))
    _, some = trained(url, store, 4, 2, log, plan)
    assert plan.fired(kill)
    state, more = trained(url, store, 6, 1, log)
    assert state.result_fingerprint == undisturbed.result_fingerprint
    assert repr(sorted((some.numbers | more.numbers).items())) == repr(sorted(alone.numbers.items()))

    storage = open_storage(store)
    gone = next(key for key in storage.list() if key.endswith(".tokens"))
    storage.delete([gone])
    with pytest.raises(DataError, match=f"{gone}.*the shard is missing") as caught:
        trained(url, store, 8, 1, log)

    report, page = load(url), tmp_path / "report.html"
    assert report.ok
    told = invoke("report", url, "--html", page)
    assert told.exit_code == 0, told.output
    run = open_storage(url)
    texts = {key: run.read(key) for key in run.list()} | {"log": log.read_bytes(), "page": page.read_bytes()}
    texts |= {"report": json.dumps(report.as_dict(), default=str).encode(), "shown": told.output.encode()}
    texts["error"] = "".join(traceback.format_exception(caught.value)).encode()
    assert any(key.startswith("journal/") for key in texts)
    assert s3_server.access_key.encode() in texts["log"], "the workers had the keys, and the file is theirs"
    secret = s3_server.secret_key.encode()
    assert [name for name, text in texts.items() if secret in text] == []
