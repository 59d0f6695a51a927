"""Writers receive all events, in order, and never hurt the run: not by their errors, nor by their slowness."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import pytest

from raysharded.clock import SystemClock
from raysharded.metrics import MetricsWriter
from raysharded.metrics.feed import Feed, close
from raysharded.metrics.translation import Translator
from tests.metrics.writers import WAIT_S, Failing, Kept, Stuck
from tests.report.entries import Entry, data, late, lost, run_with_a_loss, started, step

URL = "runs/tiny"


def feed_of(writer: MetricsWriter, limit: int = 100) -> Feed:
    return Feed(writer, Translator(URL, samples_per_step=4, tokens_per_step=32), SystemClock(), limit=limit)


def tell(feed: Feed, entries: list[Entry]) -> None:
    for kind, fields in entries:
        feed.put(kind, fields)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_writer_gets_steps_and_events_in_order_and_is_closed() -> None:
    writer = Kept()
    feed = feed_of(writer)
    tell(feed, [late(0, 0), *run_with_a_loss()])  # what comes before the beginning is left out
    close([feed], WAIT_S)
    assert [(begun.run, begun.url, begun.after_step) for begun in writer.beginnings] == [("tiny", URL, 0)]
    assert writer.beginnings[0].settings["batch"]["seed"] == 3
    assert [seen.step for seen in writer.steps] == [1, 2, 3, 3, 4, 5, 6], "step 3 was done once more"
    assert [seen.kind for seen in writer.events] == [
        "worker_lost", "recovery", "checkpoint", "step", "checkpoint", "finished",
    ]  # fmt: skip
    assert [seen.step for seen in writer.events] == [3, 3, 3, 5, 6, 6]
    assert writer.events[0].text == "worker 1 lost: the process died"
    assert writer.closed == 1
    assert len(writer.threads) == 1


def test_names_and_texts_of_others_reach_a_writer_harmlessly() -> None:
    """A terminal, a page of TensorBoard or Prometheus's lines may show them."""
    hostile = "a\x1b[2J\u202eb\nc"
    writer = Kept()
    feed = feed_of(writer)
    reason = f"{hostile} sftp://me:hunter2@host"
    tell(feed, [started(), step(1, metrics={hostile: 2.0}), ("worker_lost", {**lost(1, 1)[1], "reason": reason})])
    close([feed], WAIT_S)
    assert "metrics/a\ufffd[2J\ufffdb c" in writer.steps[0].values
    (event,) = writer.events
    assert "\x1b" not in event.text
    assert "sftp://me:***@host" in event.text


def test_the_use_of_a_gpu_is_among_a_steps_values() -> None:
    writer = Kept()
    feed = feed_of(writer)
    kind, fields = step(1)
    tell(feed, [started(), (kind, {**fields, "gpu": {"used_bytes": 5.0}}), step(2)])
    close([feed], WAIT_S)
    assert [values.values.get("gpu/used_bytes") for values in writer.steps] == [5.0, None]


def test_a_steps_values_have_names_that_do_not_meet() -> None:
    writer = Kept()
    feed = feed_of(writer)
    tell(feed, [started(), step(1, 3, loss=math.nan, metrics={"loss": 2.0}, evaluation={"loss": 1.5})])
    close([feed], WAIT_S)
    values = dict(writer.steps[0].values)
    assert math.isnan(values.pop("loss"))
    assert values == {
        "gradient_norm": 1.0,
        "lr": 0.1,
        "workers": 3,
        "step_seconds": 1.0,
        "samples_per_second": 4.0,
        "tokens_per_second": 32.0,
        "seconds/compute": 0.75,
        "seconds/apply": 0.25,
        "metrics/loss": 2.0,
        "evaluation/loss": 1.5,
    }


@pytest.mark.parametrize("error", [OSError("the disk of metrics is full"), SystemExit(3)], ids=["raises", "exits"])
def test_a_writer_that_fails_is_named_once_and_left_out(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    failing, other = Failing(error=error), Kept()
    feeds = [feed_of(failing), feed_of(other)]
    with caplog.at_level(logging.WARNING, "raysharded.metrics"):
        for feed in feeds:
            tell(feed, [started(), *(step(number) for number in range(1, 6))])
        close(feeds, WAIT_S)
        tell(feeds[0], [step(6)])
    assert [seen.step for seen in failing.steps] == [1, 2]
    assert failing.closed == 0
    assert [seen.step for seen in other.steps] == [1, 2, 3, 4, 5]
    (said,) = caplog.records
    assert "Failing failed and is disabled" in said.getMessage()
    assert said.exc_info is not None
    assert said.exc_info[1] is error


def test_what_overflows_is_counted_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    writer = Stuck()
    feed = feed_of(writer, limit=10)
    with caplog.at_level(logging.WARNING, "raysharded.metrics"):
        tell(feed, [started(), step(1)])
        assert writer.entered.wait(WAIT_S)
        tell(feed, [step(number) for number in range(2, 32)])  # 10 are kept
        writer.go_on.set()
        until(lambda: len(writer.steps) == 11)
        tell(feed, [step(32)])
        close([feed], WAIT_S)
    assert [seen.step for seen in writer.steps] == [*range(1, 12), 32]
    assert feed.missed == 20
    first, last = (record.getMessage() for record in caplog.records)
    assert "slower than the run: 10 entries are queued" in first
    assert "too slow for 20 entries; 0 of them were left at the end" in last


def test_a_writer_that_hangs_holds_up_neither_the_run_nor_its_end(caplog: pytest.LogCaptureFixture) -> None:
    stuck, other = Stuck(), Kept()
    feeds = [feed_of(stuck), feed_of(other)]
    with caplog.at_level(logging.WARNING, "raysharded.metrics"):
        for feed in feeds:
            tell(feed, [started(), data(), step(1)])
        assert stuck.entered.wait(WAIT_S)
        began = time.monotonic()
        for feed in feeds:
            tell(feed, [step(2), step(3)])
        close(feeds, 0.2)
        assert time.monotonic() - began < WAIT_S / 2
        said = [record.getMessage() for record in caplog.records]
    assert [seen.step for seen in other.steps] == [1, 2, 3]
    assert (feeds[0].missed, feeds[1].missed) == (2, 0)
    assert any("Stuck did not finish its entries in time and is abandoned" in text for text in said)
    assert any("too slow for 2 entries; 2 of them were left at the end" in text for text in said)
    stuck.go_on.set()
    until(lambda: stuck.closed == 1)  # and it is closed if it continues after all
