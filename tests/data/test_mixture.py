"""Mixtures: weights hold in every window, samples are a function of the position, limits and wrong input come first."""

from __future__ import annotations

import pickle
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.config import BatchConfig, EngineConfig, EvalConfig
from raysharded.data import Bucketed, MicrobatchLoader, Mixture, TokenDataset
from raysharded.data.access import sample_reader
from raysharded.data.mixtures.pattern import PARTS, PERIOD, Pattern, in_parts
from raysharded.data.mixtures.schedule import ENDLESS, Part, Schedule, position_of
from raysharded.data.order import WINDOW_BLOCKS
from raysharded.data.outlook import outlook
from raysharded.data.pack import pack
from raysharded.data.sources import Sources
from raysharded.data.store.layout import Kind
from raysharded.data.store.store_source import StoreSource
from raysharded.data.store.writer import StoreWriter
from raysharded.errors import ConfigError, DataError
from tests.cases import examples, tried_each_time

WEIGHTS = st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=12)
NEAR_A_CHANGE = [0, 1, PERIOD, PERIOD * PERIOD - 1500, 7 * PARTS - 1500, 10**12]


@settings(deadline=None, max_examples=examples(20, of=60))
@given(weights=WEIGHTS, start=st.sampled_from(NEAR_A_CHANGE) | st.integers(0, 10**15))
def test_every_thousand_positions_have_each_source_within_one_of_its_weight(weights: list[float], start: int) -> None:
    pattern = Pattern.of(in_parts(weights))
    sources, ranks = pattern.at(start + np.arange(4 * PERIOD))
    before = pattern.counts(start)
    assert sum(before) == start
    for number, weight in enumerate(weights):
        mine = sources == number
        assert np.array_equal(ranks[mine], before[number] + np.arange(mine.sum())), "ranks count the earlier ones"
        sums = np.cumsum(np.concatenate([[0], mine]))
        windows = sums[PERIOD:] - sums[:-PERIOD]
        assert np.abs(windows - PERIOD * weight / sum(weights)).max() <= 1


@given(weights=WEIGHTS)
def test_a_million_positions_have_the_weights_exactly(weights: list[float]) -> None:
    parts = in_parts(weights)
    assert sum(parts) == PARTS
    assert all(abs(part - PARTS * weight / sum(weights)) < 1 for part, weight in zip(parts, weights, strict=True))
    pattern = Pattern.of(parts)
    assert pattern.counts(PARTS) == list(parts)
    assert pattern.counts(5 * PARTS) == [5 * part for part in parts]


@given(weights=WEIGHTS, number=st.integers(0, 10**9), length=st.integers(1, 10**9), source=st.integers(0, 11))
def test_the_offset_of_a_source_s_sample_is_found(weights: list[float], number: int, length: int, source: int) -> None:
    pattern = Pattern.of(in_parts(weights))
    source %= len(weights)
    found = pattern.first_beyond(source, number, length)
    if found is None:
        assert pattern.counts(length)[source] <= number
        return
    at, rank = pattern.at(np.asarray([found]))
    assert (at[0], rank[0]) == (source, number)


PARTS_OF = (Part(name="a", num_samples=700), Part(name="b", num_samples=90, limit=360), Part(name="c", num_samples=33))
CHANGES: list[tuple[int, dict[str, float]]] = [(0, {"a": 6, "b": 3}), (777, {"a": 1, "b": 1, "c": 3})]


@pytest.mark.parametrize("reweight", [False, True])
def test_samples_of_each_source_come_in_epochs_across_changes_and_limits(reweight: bool) -> None:
    schedule = Schedule(PARTS_OF, CHANGES, seed=4, reweight=reweight)
    length = min(schedule.length, 5000)
    sources, ids = schedule.at(np.arange(length))
    for number, part in enumerate(PARTS_OF):
        mine = ids[sources == number]
        for epoch in range(len(mine) // part.num_samples):
            one = mine[epoch * part.num_samples : (epoch + 1) * part.num_samples]
            assert sorted(one.tolist()) == list(range(part.num_samples))
        assert schedule.counts(length)[part.name] == len(mine)
    (ended,) = schedule.ended
    assert ended.name == "b"
    assert schedule.counts(ended.position)["b"] == 360
    assert (sources[: ended.position] == 1).sum() == 360
    assert schedule.length == (ENDLESS if reweight else ended.position)
    if reweight:
        rest = Counter(sources[ended.position : ended.position + 3 * PERIOD].tolist())
        assert rest == {0: 750, 2: 2250}, "the others keep their proportions"


def test_any_part_of_the_positions_in_any_order_gives_the_same() -> None:
    schedule = Schedule(PARTS_OF, CHANGES, seed=4, reweight=True)
    positions = np.arange(3000)
    sources, ids = schedule.at(positions)
    shuffled = np.random.default_rng(0).permutation(positions)
    for part in np.array_split(shuffled, 7):
        some, own = schedule.at(part)
        assert np.array_equal(some, sources[part])
        assert np.array_equal(own, ids[part])
    other = Schedule(PARTS_OF, CHANGES, seed=5, reweight=True).at(positions)
    assert np.array_equal(other[0], sources), "the seed changes samples, not sources"
    assert not np.array_equal(other[1], ids)


def test_weights_of_the_future_change_no_sample_of_the_past() -> None:
    before = Schedule(PARTS_OF, CHANGES[:1], seed=4, reweight=True)
    after = Schedule(PARTS_OF, CHANGES, seed=4, reweight=True)
    for one, other in zip(before.at(np.arange(777)), after.at(np.arange(777)), strict=True):
        assert np.array_equal(one, other)


def test_a_place_far_away_costs_what_the_first_does() -> None:
    parts = [Part(name=f"{number}", num_samples=10**10, samples_per_block=32) for number in range(5)]
    schedule = Schedule(parts, [(0, {part.name: 1 for part in parts})], seed=0, reweight=False)
    sources, ids = schedule.at(10**12 + np.arange(1000))
    assert set(Counter(sources.tolist()).values()) == {200}
    assert len(set(zip(sources.tolist(), ids.tolist(), strict=True))) == 1000
    assert len(schedule._starts) == 1


def _cost(schedule: Schedule, first: int) -> tuple[int, int]:
    """(calls of Python functions, bytes of memory at most) for the samples of 1,000 positions."""
    positions, calls = first + np.arange(1000), [0]
    schedule.at(positions)  # what a first call sets up

    def count(_frame: object, event: str, _arg: object) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    try:
        schedule.at(positions)
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    try:
        schedule.at(positions)
        return calls[0], tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("changes", tried_each_time([1, 100], [1, 100, 1000]))
def test_a_thousand_positions_far_away_take_no_more_calls_and_no_more_memory_than_the_first(changes: int) -> None:
    parts = [Part(name=f"{number}", num_samples=10**10 + number, samples_per_block=32) for number in range(5)]
    weights = [
        (100_000 * change, {part.name: 1 + (number + change) % 5 for number, part in enumerate(parts)})
        for change in range(changes)
    ]
    schedule = Schedule(parts, weights, seed=0, reweight=False)
    near, far = (_cost(schedule, first) for first in (0, 10**12))
    assert near[0] > 50
    assert far[0] <= 1.2 * near[0], "a sample outside of a permutation's cells is drawn again"
    assert far[1] <= 1.2 * near[1]


@pytest.mark.parametrize("limit", [10**3, 10**6, 10**12])
def test_limits_and_places_are_found_in_as_many_steps_as_the_number_of_positions_has_bits(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    plain = Pattern.counts

    def counts(pattern: Pattern, length: int) -> list[int]:
        counted.append(length)
        return plain(pattern, length)

    monkeypatch.setattr(Pattern, "counts", counts)
    parts = [Part(name="a", num_samples=10**10), Part(name="b", num_samples=10**10, limit=limit)]
    schedule = Schedule(parts, [(0, {"a": 3, "b": 1})], seed=0, reweight=True)
    (ended,) = schedule.ended
    assert abs(ended.position - 4 * limit) <= 4
    assert len(counted) <= 4 + ENDLESS.bit_length()
    counted.clear()
    end = 8 * limit
    assert schedule.counts(position_of(schedule, "a", 5 * limit, end))["a"] == 5 * limit
    assert len(counted) <= 2 + end.bit_length()


def _named(name: str, number: int) -> list[str]:
    return [f"{name}{index}" for index in range(number)]


def test_an_item_is_the_sample_of_its_source() -> None:
    mixture = Mixture({"a": _named("a", 50), "b": _named("b", 20)}, [(0, {"a": 1}), (30, {"a": 1, "b": 1})], seed=2)
    assert len(mixture) == ENDLESS
    for position in (0, 10, 29, 30, 31, 500, 10**15):
        name, index = mixture.origin(position)
        assert mixture[position] == f"{name}{index}"
    assert mixture.counts(30) == {"a": 30, "b": 0}
    assert mixture.counts(1030) == {"a": 530, "b": 500}
    copy = pickle.loads(pickle.dumps(mixture))
    assert [copy[position] for position in range(200)] == [mixture[position] for position in range(200)]
    assert copy.order_digest == mixture.order_digest


def test_the_ledger_of_a_mixture_has_its_positions_and_the_mixture_s_digest_the_rest() -> None:
    class Swapped(Mixture):
        """Gives the next position's sample."""

        def __getitem__(self, position: int, /) -> Any:
            return super().__getitem__(position + 1)

    sources, batch = {"a": _named("a", 50), "b": _named("b", 20)}, BatchConfig(global_batch_size=8, microbatch_size=4)
    weights = {"a": 1.0, "b": 2.0}
    mixtures = [Mixture(sources, weights), Mixture(sources, {"a": 2.0, "b": 1.0}), Swapped(sources, weights)]
    loads = []
    for data in mixtures:
        loader = MicrobatchLoader(data, batch, prefetch=False)
        loader.skip((), 2, (-data.order_digest, 8))
        loads.append(loader.load(3, 1))
        loader.close()
    assert [load.ids.tolist() for load in loads] == [[20, 21, 22, 23]] * 3
    assert len({load.digest for load in loads}) == 1, "the ledger does not see a sample's source"
    assert len({tuple(load.samples) for load in loads}) == 3
    assert mixtures[0].order_digest != mixtures[1].order_digest, "a worker with another mixture is refused by this"


def test_every_setting_that_changes_the_order_changes_its_digest() -> None:
    sources = {"a": _named("a", 50), "b": _named("b", 20)}
    weights = {"a": 1.0, "b": 2.0}
    mixtures = [
        Mixture(sources, weights),
        Mixture(sources, weights, seed=1),
        Mixture(sources, {"a": 1.0, "b": 2.5}),
        Mixture(sources, [(0, weights), (100, {"a": 1.0})]),
        Mixture(sources, weights, max_epochs={"a": 2}),
        Mixture(sources, weights, max_epochs={"a": 2}, at_limit="reweight"),
        Mixture({**sources, "b": _named("b", 21)}, weights),
        Mixture({"a": sources["a"], "c": sources["b"]}, {"a": 1.0, "c": 2.0}),
    ]
    digests = [mixture.order_digest for mixture in mixtures]
    assert len(set(digests)) == len(digests)
    assert min(digests) > 1


def nothing() -> None:
    pass


class Squares:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * index


class Noted(Squares):
    """Notes what is read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.reads.append(index)
        return super().__getitem__(index)


def test_of_each_source_the_first_sample_is_read_twice_before_training() -> None:
    rare, limited, held_out = Noted(), Noted(), Noted()
    data = Mixture({"a": Squares(), "rare": rare}, [(0, {"a": 1}), (10**9, {"a": 999, "rare": 1})])
    ends = Mixture(
        {"a": Squares(), "limited": limited}, [(0, {"a": 1}), (7, {"limited": 1})], max_epochs={"limited": 1}
    )
    late = Mixture({"a": [1], "late": held_out}, {"a": 99, "late": 1})
    evaluation = EvalConfig(data=late, every_steps=1, num_samples=9)
    batch = BatchConfig(global_batch_size=2, microbatch_size=2)
    for mixture in (data, ends):
        sources = Sources(mixture, evaluation, batch, EngineConfig(prefetch=False), nothing)
        sources.check()
        sources.close()
    first = next(position for position in range(10**9, 10**9 + PERIOD) if data.counts(position + 1)["rare"])
    assert rare.reads == [data.origin(first)[1]] * 2
    assert limited.reads.count(ends.origin(7)[1]) >= 2
    assert held_out.reads == [], "no evaluation reads it"


def test_of_a_hundred_sources_only_as_many_are_found_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    def noted(counted: Mixture, name: str, rank: int, end: int) -> int:
        searched.append(name)
        return position_of(counted, name, rank, end)

    monkeypatch.setattr(sample_reader, "position_of", noted)
    data = Mixture({f"s{number}": Squares() for number in range(100)}, {f"s{number}": 1 for number in range(100)})
    batch = BatchConfig(global_batch_size=2, microbatch_size=2)
    for seconds, most in ((0.0, 1), (3600.0, 100)):
        monkeypatch.setattr(sample_reader, "_CHECK_S", seconds)
        searched.clear()
        sources = Sources(data, None, batch, EngineConfig(prefetch=False), nothing)
        sources.check()
        sources.close()
        assert len(searched) == most


def _wrong(words: str, error: type[Exception] = ConfigError, **given: Any) -> None:
    settings: dict[str, Any] = {"sources": {"a": [1, 2], "b": [3]}, "weights": {"a": 1, "b": 1}, **given}
    with pytest.raises(error, match=words) as caught:
        len(Mixture(**settings))
    assert "\n" not in str(caught.value)


def test_wrong_input_is_one_sentence_before_training() -> None:
    _wrong("give a dict of names and datasets", sources={})
    _wrong("from position 0 on: they add up to 0", weights={"a": 0, "b": 0})
    _wrong("from position 5 on: they add up to 0", weights=[(0, {"a": 1}), (5, {})])
    _wrong("they add up to 0", weights={})
    _wrong("'c' is none of the sources a, b", weights={"a": 1, "c": 1})
    _wrong("-1 for 'a': give a finite number", weights={"a": -1, "b": 2})
    _wrong("nan for 'a': give a finite number", weights={"a": float("nan"), "b": 2})
    _wrong("'a' has less than a 1,000,000th", weights={"a": 1e-8, "b": 2})
    _wrong("begin at 0, and ascend", weights=[(3, {"a": 1})])
    _wrong("begin at 0, and ascend", weights=[(0, {"a": 1}), (0, {"b": 1})])
    _wrong("no pair of a position and a dict", weights=[{"a": 1}])
    _wrong("is empty", weights=[])
    _wrong(r"max_epochs\['a'\]=0", max_epochs={"a": 0})
    _wrong("'c' is none of the sources", max_epochs={"c": 1})
    _wrong("give 'stop' or 'reweight'", at_limit="repeat")
    _wrong("source 'b' has no samples", DataError, sources={"a": [1], "b": []})
    _wrong("less than one of them", DataError, max_epochs={"b": 0.5})
    bucketed = Bucketed([1, 2], [1, 2], microbatch_size=1)
    _wrong("is a Bucketed, which decides the order of its samples", sources={"a": bucketed, "b": [1]})
    _wrong("is a mixture itself", sources={"a": Mixture({"x": [1]}, {"x": 1}), "b": [1]})


@pytest.mark.parametrize("at_limit", ["stop", "reweight"])
def test_a_mixture_that_ends_before_the_run_is_refused_before_training(at_limit: Literal["stop", "reweight"]) -> None:
    limits = {"a": 2} if at_limit == "stop" else {"a": 2, "b": 1}
    data = Mixture({"a": list(range(10)), "b": list(range(30))}, {"a": 1, "b": 1}, max_epochs=limits, at_limit=at_limit)
    length = len(data)
    assert data.counts(length)["a"] == 20
    assert data.counts(length)["b"] in ((30,) if at_limit == "reweight" else (19, 20, 21))
    batch = BatchConfig(global_batch_size=2, microbatch_size=2)
    sources = Sources(data, None, batch, EngineConfig(prefetch=False), lambda: None)
    sources.check()
    loader, own = sources.training, (-data.order_digest, 2)
    loader.skip((), 2, own)
    loader.require_steps(length // 2)
    with pytest.raises(DataError, match=f"the mixture ends after {length} samples, as source .* has then been read"):
        loader.require_steps(length // 2 + 1)
    sources.close()


@pytest.mark.parametrize("prefetch", [False, True], ids=["here", "in a process"])
def test_whether_a_mixture_ends_before_the_run_follows_from_weights_and_skips_of_the_run(prefetch: bool) -> None:
    data = Mixture({"a": Squares(), "b": Squares()}, {"a": 1, "b": 1}, max_epochs={"a": 1})
    batch = BatchConfig(global_batch_size=2, microbatch_size=2)
    sources = Sources(data, None, batch, EngineConfig(prefetch=prefetch), nothing)
    loader, own = sources.training, (-data.order_digest, 2)
    try:
        sources.check()
        others = {"more": ((1, 0, (("b", 1.0),)),), "fewer": ((1, 0, (("a", 1.0),)),)}
        lengths = {"as given": len(data), "more": 1 << 60, "fewer": 10}
        assert 10 < lengths["as given"] < 30
        for name, length in lengths.items():
            for skipped in (0, 6):
                loader.skip(((1, skipped),) if skipped else (), 2, own, others.get(name, ()))
                last = (min(length, 200) - skipped) // 2
                loader.require_steps(last)
                if name != "more":
                    with pytest.raises(DataError, match=f"the mixture ends after {length} samples"):
                        loader.require_steps(last + 1)
    finally:
        sources.close()


@pytest.fixture
def stores(tmp_path: Path) -> list[TokenDataset]:
    for name, number in (("one", 90_000), ("two", 50_000)):
        (tmp_path / f"{name}.txt").write_text(name * (number // 3))
        pack(tmp_path / f"{name}.txt", tmp_path / name, tokens_per_file=20_000)
    return [TokenDataset(tmp_path / name, seq_len=64) for name in ("one", "two")]


def test_a_loader_that_reads_ahead_gives_the_same_as_one_that_does_not(stores: list[TokenDataset]) -> None:
    one, two = stores
    batch = BatchConfig(global_batch_size=8, microbatch_size=2, seed=3)
    loaders = []
    for prefetch in (False, True):
        data = pickle.loads(
            pickle.dumps(Mixture({"one": one, "two": two}, [(0, {"one": 2, "two": 1}), (99, {"two": 1})]))
        )
        data.validate()
        loader = MicrobatchLoader(data, batch, prefetch=prefetch)
        loader.skip(((3, 16),), 2, (loader.samples_per_block, 8))
        loaders.append((data, loader))
    (data, plain), (_, ahead) = loaders
    for own in ([0, 1, 2, 3], [1], [2, 3]):  # as for other numbers of workers
        for step in (1, 2, 3, 4, 900, 901, 2):
            ahead.plan([(step, index) for index in own])
            for index in own:
                first, second = plain.load(step, index), ahead.load(step, index)
                position = (step - 1) * 8 + 2 * index + (16 if step > 3 else 0)
                assert first.ids.tolist() == second.ids.tolist() == [position, position + 1]
                assert first.digest == second.digest
                assert all(np.array_equal(a, b) for a, b in zip(first.samples, second.samples, strict=True))
                assert np.array_equal(first.samples[0], _at(data, position))
    for _, loader in loaders:
        loader.close()


def _at(data: Mixture, position: int) -> npt.NDArray[np.int64]:
    name, index = data.origin(position)
    found: npt.NDArray[np.int64] = data.sources[name][index]
    return found


def _source(dataset: TokenDataset) -> StoreSource:
    source = dataset._open_reader(dataset._opened())
    assert isinstance(source, StoreSource)
    return source


@pytest.mark.parametrize("seq_len", tried_each_time([8192], [128, 2048, 8192]))
def test_a_mixture_of_stores_reads_each_byte_about_once_in_few_requests(
    seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sixteenth of the default window and of the default cache, and two such windows of each source."""
    window = WINDOW_BLOCKS // 16
    monkeypatch.setattr("raysharded.data.order.WINDOW_BLOCKS", window)
    kind = Kind(tokenizer="bytes", vocab_size=257)
    stores = []
    for number in range(2):
        url = f"memory://mixture/{seq_len}/{number}"
        tokens = np.random.default_rng(number).integers(0, 257, (2 * window << 16) + 100_000, dtype=np.uint32)
        with StoreWriter(url, kind, 1 << 22) as writer:
            for part in np.array_split(tokens, 5):
                writer.write(part)
        stores.append(TokenDataset(url, seq_len=seq_len, cache_bytes=16 << 20, disk_cache_bytes=0))
    data = Mixture({"web": stores[0], "code": stores[1]}, {"web": 1, "code": 1}, seed=3)
    data.validate()
    num_samples, per_block = sum(map(len, stores)), stores[0].samples_per_block
    for start in range(0, num_samples, 8192):
        positions = np.arange(start, min(start + 8192, num_samples))
        data.read_ahead(positions)
        sources, ids = data._opened().at(positions)
        for source, block in zip(sources.tolist(), (ids // per_block).tolist(), strict=True):
            _source(stores[source]).blocks.get(block)
    used = num_samples * seq_len * kind.token_bytes
    readers = [reader for store in stores for reader in _source(store).readers]
    assert sum(reader.num_bytes for reader in readers) / used < 1.1
    assert sum(reader.num_requests for reader in readers) / (num_samples * seq_len / 1e6) < 20
    assert max(_source(store).blocks.num_bytes for store in stores) <= 16 << 20


def test_sources_of_different_tokenizers_or_lengths_are_refused(stores: list[TokenDataset], tmp_path: Path) -> None:
    one, _ = stores
    other = TokenDataset(tmp_path / "two", seq_len=32)
    with pytest.raises(DataError, match="source 'b' has seq_len 32, but 'a' has 64"):
        Mixture({"a": one, "b": other}, {"a": 1, "b": 1}).validate()


def test_a_store_without_a_sample_or_without_a_shard_is_named_before_training(
    stores: list[TokenDataset], tmp_path: Path
) -> None:
    kind = Kind(tokenizer="bytes", vocab_size=257)
    for name, number in (("empty", 0), ("tiny", 64)):
        with StoreWriter(str(tmp_path / name), kind, 100) as writer:
            writer.write(np.zeros(number, dtype=np.uint32))
    batch = BatchConfig(global_batch_size=2, microbatch_size=2)

    def refused(other: TokenDataset, message: str) -> None:
        data = Mixture({"one": stores[0], "other": other}, {"one": 1, "other": 1})
        with pytest.raises(DataError, match=message) as caught:
            Sources(data, None, batch, EngineConfig(prefetch=False), nothing).check()
        assert "\n" not in str(caught.value)

    for name, found in (("empty", "0 tokens in 0 files"), ("tiny", "64 tokens in 1 file")):
        other = TokenDataset(tmp_path / name, seq_len=64)
        refused(other, rf"^{tmp_path}/{name}: {found} are too few for one sample of seq_len \+ 1 = 65 tokens")
    shard = sorted((tmp_path / "two").glob("*.tokens"))[1]
    shard.unlink()
    refused(stores[1], rf"^{shard}: the shard is missing, but tokens\.json names it\. Restore it from its source")


def test_a_mixture_has_the_length_that_its_sources_share(stores: list[TokenDataset]) -> None:
    alike = {str(number): store for number, store in enumerate(stores)}
    weights = dict.fromkeys(alike, 1)
    assert Mixture(alike, weights).seq_len == stores[0].seq_len
    assert Mixture({**alike, "rows": range(9)}, weights).seq_len is None


def test_repetitions_and_limits_are_said_before_training() -> None:
    batch = BatchConfig(global_batch_size=8, microbatch_size=2)
    sources = {"web": range(1000), "books": range(50), "code": range(10)}
    weights = {"web": 7, "books": 2, "code": 1}
    assert outlook(Mixture(sources, weights), batch, 12) == ()
    (told,) = outlook(Mixture(sources, weights), batch, 100)
    assert (
        told
        == "up to step 100 the mixture reads source 'books' 3.2 times and 'code' 8.0 times, by its weights and lengths"
    )
    limited = Mixture(sources, weights, max_epochs={"code": 4}, at_limit="reweight")
    (ended,) = limited.ended
    at_limit, repeated = outlook(limited, batch, 100)
    step = ended.position // 8 + 1
    assert f"source 'code' is read up to its max_epochs (4) in step {step} of 100" in at_limit
    assert "'code' 4.0 times" in repeated
    assert len(outlook(limited, batch, step - 1)) == 1
    assert outlook(range(9), batch, 100) == ()
    assert outlook(Mixture({"a": _Unreadable()}, {"a": 1}), batch, 100) == ()


class _Unreadable:
    def __len__(self) -> int:
        raise OSError("not mounted here")

    def __getitem__(self, index: int) -> int:
        raise OSError("not mounted here")
