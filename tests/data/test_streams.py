"""Sources that are read in their order, and items of shards: the same samples for any reader, or an error by name."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysharded.config import BatchConfig, EngineConfig
from raysharded.data import Mixture, ShardedItems, Stream
from raysharded.data.access.repeat_check import differ
from raysharded.data.sources import Sources
from raysharded.data.streams.stream import superseded
from raysharded.errors import ConfigError, DataError, RayshardedError
from tests.cases import tried_each_time

BATCH = BatchConfig(global_batch_size=4, microbatch_size=2, seed=1)


def nothing() -> None:
    pass


class Counting:
    """Items of one shard, from a place."""

    opened = 0
    drawn = 0

    def __init__(self, shard: int, epoch: int, number: int, *, skips: int = 0) -> None:
        self.shard, self.epoch, self.number, self.skips, self.at = shard, epoch, number, skips, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < self.number:
            at = self.at
            self.at += 1
            Counting.drawn += 1
            yield {"at": (self.shard, self.epoch, at), "tokens": np.arange(at, at + 3)}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: Mapping[str, int], /) -> None:
        Counting.opened += 1
        self.at = state_dict["at"] + self.skips


class Shards:
    """Shards of different lengths."""

    def __init__(self, lengths: tuple[int, ...], *, skips: int = 0) -> None:
        self.lengths, self.skips = lengths, skips
        self.num_shards = len(lengths)

    def open_shard(self, shard: int, epoch: int) -> Counting:
        return Counting(shard, epoch, self.lengths[shard], skips=self.skips)


def wanted(lengths: tuple[int, ...], position: int) -> tuple[int, int, int]:
    item, shard = divmod(position, len(lengths))
    return shard, item // lengths[shard], item % lengths[shard]


@pytest.mark.parametrize("shared", [True, False], ids=["states in a folder", "states in memory"])
def test_a_position_has_the_same_item_for_every_reader_whatever_it_read_before(tmp_path: Path, shared: bool) -> None:
    lengths = (7, 3, 40)
    data = Stream(Shards(lengths), states=tmp_path if shared else None, every=5)
    data.validate()
    rng = np.random.default_rng(0)
    for position in [*range(200), *rng.integers(0, 400, 60).tolist(), *range(170, 330, 3)]:
        if position % 50 == 7:
            data = pickle.loads(pickle.dumps(data))
        assert data[position]["at"] == wanted(lengths, position), position


def test_a_reader_that_begins_in_the_middle_reads_from_the_nearest_state(tmp_path: Path) -> None:
    lengths, every = (30, 30), 8
    first = Stream(Shards(lengths), states=tmp_path, every=every)
    for position in range(2000):
        first[position]
    later = pickle.loads(pickle.dumps(first))
    before = Counting.drawn
    assert later[1990]["at"] == wanted(lengths, 1990)
    assert Counting.drawn - before <= every + 1
    for position in (1992, 1994):
        later[position]
    before = Counting.drawn
    later[1990]  # a step is computed again
    assert Counting.drawn - before <= every + 1
    without = Stream(Shards(lengths), every=every)
    assert without[1990]["at"] == wanted(lengths, 1990)


def test_workers_read_the_items_that_one_reads(tmp_path: Path) -> None:
    told = []
    for number, states in ((1, "one"), (2, "two")):
        readers = [
            Sources(
                Stream(Shards((9, 5, 6, 4)), states=tmp_path / states, every=3), None, BATCH, EngineConfig(), nothing
            )
            for _ in range(number)
        ]
        seen: dict[tuple[int, int], Any] = {}
        try:
            for reader in readers:
                reader.check()
                reader.training.skip((), 2, (reader.training.samples_per_block, 4))
            for step, microbatch in itertools.product((3, 4, 5, 12), (0, 1)):
                read = readers[microbatch % number].training.load(step, microbatch)
                seen[step, microbatch] = [one["at"] for one in read.samples], read.digest
                first = 4 * (step - 1) + 2 * microbatch
                assert seen[step, microbatch][0] == [wanted((9, 5, 6, 4), first + place) for place in (0, 1)]
        finally:
            for reader in readers:
                reader.close()
        told.append(seen)
    assert told[0] == told[1]


class Moody(Shards):
    """Gives another item in each process, or each time it is opened."""

    def open_shard(self, shard: int, epoch: int) -> Any:
        class Other(Counting):
            def __iter__(self) -> Iterator[Any]:
                for item in super().__iter__():
                    yield item if item["at"][2] != 6 else {**item, "opened": next(_opened)}

        return Other(shard, epoch, self.lengths[shard])


_opened = itertools.count()


def test_a_source_that_does_not_repeat_itself_is_found(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"after load_state_dict\(\) the source does not continue with the item"):
        Stream(Shards((50,), skips=1)).validate()
    data = Stream(Moody((50,)), states=tmp_path, every=5)
    data.validate()
    for position in range(20):
        data[position]
    other = pickle.loads(pickle.dumps(data))
    assert [other[position]["at"][2] for position in range(9)] == list(range(9))
    with pytest.raises(DataError, match="items 5 to 9 of shard 0 are others than when they were read before"):
        other[9]


def test_another_distance_of_states_is_not_taken_for_another_source(tmp_path: Path) -> None:
    def read(*, every: int, source: Any, begin: int = 0) -> None:
        data = Stream(source, states=tmp_path, every=every)
        assert [data[position]["at"][2] for position in range(begin, 40)] == list(range(begin, 40))

    read(every=10, source=Shards((50,)))
    read(every=5, source=Shards((50,)), begin=12)
    read(every=20, source=Shards((50,)))
    read(every=10, source=Shards((50,)))
    with pytest.raises(DataError, match="items 0 to 9 of shard 0 are others than when they were read before"):
        read(every=10, source=Moody((50,)))
    for file in tmp_path.rglob("*.json"):  # as earlier versions wrote them
        told = json.loads(file.read_text())
        assert told.pop("every") in (5, 10)
        file.write_text(json.dumps(told))
    read(every=10, source=Shards((50,)), begin=30)
    with pytest.raises(DataError, match="items 0 to 9 of shard 0 are others than when they were read before"):
        read(every=10, source=Moody((50,)))


def _refused(kind: type[RayshardedError], message: str, source: Any, **settings: Any) -> None:
    with pytest.raises(kind, match=message):
        Stream(source, **settings).validate()


def test_wrong_sources_are_refused_in_a_sentence(tmp_path: Path) -> None:
    _refused(ConfigError, "an iterable with state_dict", [1, 2, 3])
    _refused(ConfigError, "every=0: give a whole number", Shards((5,)), every=0)
    _refused(ConfigError, "0 shards: give a source with at least 1", Shards(()))
    _refused(DataError, "shard 0 has no items in epoch 0", Shards((0, 4)))

    class Bytes(Counting):
        def state_dict(self) -> Any:
            return {"at": b"1"}

    _refused(DataError, "cannot be written as JSON", Bytes(0, 0, 9))
    data = Stream(Shards((50,)), states=tmp_path, every=5)
    for position in range(12):
        data[position]
    (tmp_path / "shard-00000" / "item-000000000010.json").write_text("{")
    with pytest.raises(DataError, match=r"item-000000000010\.json is damaged"):
        pickle.loads(pickle.dumps(data))[11]
    with pytest.raises(ConfigError, match="is a Stream, which decides the order"):
        len(Mixture({"a": data, "b": [1]}, {"a": 1, "b": 1}))
    assert [position["at"][2] for position in map(Stream(Counting(0, 0, 3)).__getitem__, range(5))] == [0, 1, 2, 0, 1]


def test_of_old_states_fewer_stay_the_older_they_are(tmp_path: Path) -> None:
    kept: set[int] = set()
    for newest in range(1, 20_001):
        kept = (kept | {newest}) - set(superseded(newest))
    assert set(range(20_000 - 63, 20_001)) <= kept
    assert len(kept) < 64 + 32 * 10
    ordered = sorted(kept)
    for before, after in itertools.pairwise([0, *ordered]):
        assert after - before <= max(1, (20_000 - before) // 32)
    data = Stream(Shards((10_000, 10_000)), states=tmp_path, every=2)
    for position in range(2 * 1000):
        data[position]
    assert len(list(tmp_path.rglob("*.json"))) < 2 * (64 + 32 * 4)
    again = pickle.loads(pickle.dumps(data))
    assert not differ([again[position] for position in (300, 301)], [data[position] for position in (300, 301)])


def test_a_folder_of_states_that_fails_ends_no_reading_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [Stream(Shards((50,)))[position] for position in range(30)]
    blocked = tmp_path / "states"
    blocked.write_text("a file is no folder")
    data = Stream(Shards((50,)), states=blocked, every=5)
    assert not differ([data[position] for position in range(30)], expected)
    assert not differ(pickle.loads(pickle.dumps(data))[29], expected[29])
    reported = [message for message in caplog.messages if "reads on without states" in message]
    assert len(reported) == 2, "once for each reader"


def test_items_of_shards_are_read_once_in_an_epoch_and_may_be_mixed() -> None:
    def read(shard: int, item: int) -> tuple[int, int]:
        return shard, item

    data = ShardedItems([3, 0, 4], read)
    assert [data[index] for index in range(7)] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    for index in (-1, 7):
        with pytest.raises(IndexError):
            data[index]
    assert data.contents_digest != ShardedItems([4, 0, 3], read).contents_digest
    mixture = Mixture({"a": data, "b": [1, 2]}, {"a": 1, "b": 1})
    assert mixture.contents_digest
    assert {mixture[position] for position in range(14)} == {*(data[index] for index in range(7)), 1, 2}
    for wrong in ([], [0], [-1, 3], [[1]], [1.5]):
        with pytest.raises(ConfigError, match="give the number of items of each shard"):
            ShardedItems(wrong, read)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", tried_each_time([False], [False, True]))  # importing datasets takes seconds
def test_datasets_of_hugging_face_are_read_in_a_thread_and_in_a_process(tmp_path: Path, ahead: bool) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"tokens": [list(range(number, number + 4)) for number in range(24)]}
    given = datasets.Dataset.from_dict(rows)
    given.save_to_disk(tmp_path / "rows")
    by_index = datasets.load_from_disk(tmp_path / "rows").with_format("numpy")
    streamed = Stream(given.to_iterable_dataset(num_shards=4), states=tmp_path / "states", every=2)
    for data, own in ((by_index, 1), (streamed, -streamed.order_digest)):
        sources = Sources(data, None, BATCH, EngineConfig(prefetch=ahead and data is by_index), nothing)
        try:
            sources.check()
            assert sources.training.samples_per_block == own
            sources.training.skip((), 2, (own, 4))
            epochs = [
                sorted(
                    int(next(iter(one["tokens"])))
                    for step in range(1 + 6 * epoch, 7 + 6 * epoch)
                    for microbatch in (0, 1)
                    for one in sources.training.load(step, microbatch).samples
                )
                for epoch in (0, 1)
            ]
            assert epochs == [list(range(24))] * 2
        finally:
            sources.close()
    shard, item = streamed.origin(21)
    assert streamed[21]["tokens"] == rows["tokens"][6 * shard + item]
    first = tmp_path / "states" / "shard-00000" / "item-000000000002.json"
    assert json.loads(first.read_text())["epoch"] == 0
    shuffled = given.to_iterable_dataset().shuffle(seed=3, buffer_size=8)
    with pytest.raises(ConfigError, match="is shuffled through a buffer, and would continue with other items"):
        Stream(shuffled.map(dict))
