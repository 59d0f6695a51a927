"""Checkpoints against what the machine can do, and against torch.distributed.checkpoint: a sharded state of 1.2 GB over
4 processes, saved and loaded, on a local disk and on the S3 server of the tests.

Raw rates are measured in the same run, in turn: a plain write and fsync, or a plain parallel boto3 upload, of as many
bytes by as many processes; for loads by 3 and by 8 processes a plain read (after the page cache was dropped), or plain
parallel ranged GETs, of just the bytes that each needs. All digests of ours are made and checked. Before each turn all
rest.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plain_storage as plain
from benchmarks.checkpoint_ranks import group_of, manifest_of
from benchmarks.effort import Effort
from benchmarks.result import Line, alternate, ratios
from raysharded.checkpoint import commit, new_save_id, open_storage, save_prefix

NAME = "checkpoints"
NUM_WRITERS = 4
READERS = (3, 8)
OURS, DCP, DCP_ASYNC = "raysharded", "torch.distributed.checkpoint", "torch.distributed.checkpoint, async_save"
_LAYERS, _QUICK_LAYERS = 8, 1
"""Layers of a state of 1.2 GB, and of one of 0.15 GB."""
_ASKED_LOAD = {False: "at most 1.5", True: "at most 1.3"}
"""The goal, on S3 (True) or not."""
_ASKED_SAVE = {False: "at most 1.3", True: "at most 1.2"}
_ASKED_MEMORY = "at most 1.1"
_REST_S = 2.0
"""Rest before each turn. Data that was written before may still be on its way to the disk, below the file system. The
S3 server, on the same cores, may still be deleting."""


def run(effort: Effort) -> list[Line]:
    """All lines: a quarter of an hour when full; of a small state when quick."""
    rounds = effort.pick(quick=1, hour=1, full=5)
    layers = effort.pick(quick=_QUICK_LAYERS, hour=_LAYERS, full=_LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        lines = measured(folder, "local", rounds, layers)
    with s3_storage() as (url, why):
        if not url:
            absent = Line(benchmark=NAME, what="save, S3", subject=OURS, unit="MB/s", values=[], note=why)
            return [*lines, absent]
        return [*lines, *measured(url, "S3", rounds, layers)]


@contextmanager
def s3_storage() -> Iterator[tuple[str, str]]:
    """(a place on a separate server, "") if the programs for one are available; or ("", the reason that they are
    not)."""
    from tests.s3 import server

    try:
        server.programs()
    except server.ServerFailed as error:
        yield "", f"there is no S3 server: {error}"
        return
    with tempfile.TemporaryDirectory() as folder, server.running_server(Path(folder, "server")) as running:
        import boto3

        os.environ.update(AWS_ACCESS_KEY_ID=running.access_key, AWS_SECRET_ACCESS_KEY=running.secret_key)
        client = boto3.client("s3", endpoint_url=running.endpoint_url, region_name="us-east-1")
        client.create_bucket(Bucket="bench")
        options = f"endpoint_url={running.endpoint_url}&region=us-east-1&addressing_style=path"
        yield f"s3://bench/checkpoints?{options}", ""


def measured(url: str, where: str, rounds: int, layers: int) -> list[Line]:
    """All lines of one place."""
    lines, prefix, torch_prefix = saves(url, where, rounds, layers)
    for readers in READERS:
        lines += loads(url, where, rounds, layers, prefix, torch_prefix, readers)
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    seconds: float
    """Time until the save is durable."""
    stall: float = 0.0
    memory: float = 0.0
    """The largest process's peak beyond its memory before, in sizes of its shard."""


def saves(url: str, where: str, rounds: int, layers: int) -> tuple[list[Line], str, str]:
    """Saving, synchronously and in the background; and the prefixes of the last saves."""
    storage, step, prefix, torch_prefix = open_storage(url), 0, "", ""
    with group_of(url, layers, NUM_WRITERS) as group:
        size = sum(group.sizes)

        def grown(before: list[Any]) -> float:
            after = group.call("peak_memory")
            return float(max(b - a for a, b in zip(before, after, strict=True)) / max(group.sizes))

        def ours() -> _Save:
            nonlocal prefix
            save_id = new_save_id()
            prefix = save_prefix(step, save_id)
            before = group.call("reset_peak")
            began = time.perf_counter()
            files = [record for records in group.call("save", prefix) for record in records]
            assert commit(storage, prefix, manifest_of(step, save_id, layers, files))
            return _Save(seconds=time.perf_counter() - began, memory=grown(before))

        def torchs() -> _Save:
            nonlocal torch_prefix
            torch_prefix = f"torch/{step}"
            before = group.call("reset_peak")
            return _Save(seconds=group.timed("torch_save", torch_prefix)[0], memory=grown(before))

        def beside(method: str, path: str) -> _Save:
            before = group.call("reset_peak")
            found = group.call(method, path)
            stall, durable = (max(one[k] for one in found) for k in (0, 1))
            return _Save(seconds=durable, stall=stall, memory=grown(before))

        def raw() -> _Save:
            return _Save(seconds=group.timed("plain_save", f"plain/{step}")[0])

        def copy(how: str) -> _Save:
            return _Save(seconds=max(group.call(how)))

        def clean(then: Callable[[], _Save]) -> Callable[[], _Save]:
            def turn() -> _Save:
                nonlocal step
                step += 1
                kept = [part for part in (prefix.rsplit("/", 1)[-1], f"{torch_prefix}/") if part.strip("/")]
                storage.delete(key for key in storage.list() if not any(part in key for part in kept))
                settle(url)
                return then()

            return turn

        subjects = {
            "raw": clean(raw),
            OURS: clean(ours),
            DCP: clean(torchs),
            "copy": clean(lambda: copy("memcpy")),
            "copy of tensors": clean(lambda: copy("copy_tensors")),
            "beside": clean(lambda: beside("stall", str(step))),
            DCP_ASYNC: clean(lambda: beside("torch_stall", f"torch-async/{step}")),
        }
        alternate(subjects, 1)  # buffers, connections and caches are there from now on
        found = alternate(subjects, rounds)
    times = {name: [one.seconds for one in some] for name, some in found.items()}
    names = {OURS: OURS, DCP: DCP, "beside": f"{OURS}, AsyncSaver", DCP_ASYNC: DCP_ASYNC}
    over_raw = "times the raw write" if "://" not in url else "times the raw upload"
    durable, memory = {OURS: _ASKED_SAVE["://" in url]}, {OURS: _ASKED_MEMORY, "beside": _ASKED_MEMORY}
    lines = [_line(f"raw write, {where}", "plain", "MB/s", [size / 1e6 / one for one in times["raw"]])]
    for key, name in names.items():
        own = ratios(times[key], times["raw"])
        rate = [size / 1e6 / one for one in times[key]]
        lines += [
            _line(f"durable, {where}", name, "s", times[key], ratio=own, against=over_raw, asked=durable.get(key)),
            _line(f"rate, {where}", name, "MB/s", rate),
            _line(f"memory on top, {where}", name, "shards", [one.memory for one in found[key]], asked=memory.get(key)),
        ]
    for key in ("beside", DCP_ASYNC):
        stalls = [one.stall for one in found[key]]
        goal = "at most 1.2" if key == "beside" else None
        ratio, against = ratios(stalls, times["copy of tensors"]), "times a copy of the shard's tensors"
        lines.append(_line(f"stall, {where}", names[key], "s", stalls, ratio=ratio, against=against, asked=goal))
        ratio, against = ratios(stalls, times["copy"]), "times a copy of one block as large"
        lines.append(_line(f"stall, as one block, {where}", names[key], "s", stalls, ratio=ratio, against=against))
    return sorted(lines, key=lambda line: line.what), prefix, torch_prefix


def loads(url: str, where: str, rounds: int, layers: int, prefix: str, torch_prefix: str, readers: int) -> list[Line]:
    """Loading by another number of processes."""
    amplification: list[float] = []
    with group_of(url, layers, readers) as group:
        group.call("plan_plain_load", prefix)

        def forget() -> None:
            plain.drop_caches(url)
            time.sleep(_REST_S)

        def ours() -> float:
            forget()
            seconds, read = group.timed("load", prefix)
            amplification.append(sum(got for got, _ in read) / sum(wanted for _, wanted in read))
            return seconds

        def torchs() -> float:
            forget()
            return group.timed("torch_load", torch_prefix)[0]

        def raw() -> float:
            forget()
            return group.timed("plain_load")[0]

        subjects = {"plain": raw, OURS: ours, DCP: torchs}
        alternate(subjects, 1)
        found = alternate(subjects, rounds)
    what = f"load by {readers}, {where}"
    lines = [_line(what, "plain read", "s", found["plain"])]
    for name in (OURS, DCP):
        asked = _ASKED_LOAD["://" in url] if name == OURS else None
        ratio = ratios(found[name], found["plain"])
        lines.append(_line(what, name, "s", found[name], ratio=ratio, against="times the plain read", asked=asked))
    return [*lines, _line(f"{what}: bytes read over bytes needed", OURS, "", amplification[1:])]


def _line(what: str, subject: str, unit: str, values: list[float], **more: Any) -> Line:
    return Line(benchmark=NAME, what=what, subject=subject, unit=unit, values=values, **more)


def settle(url: str) -> None:
    """Wait until earlier rounds' data is flushed and deleted, so that neither happens during the next round."""
    if "://" not in url:
        os.sync()
    time.sleep(_REST_S)
