"""Every string that outlives a process, as `persisted-strings.json` keeps it: what lies on storage, and what users'
scripts and dashboards match. `python -m tests.golden.persisted` adds those that are new.

Each is observed where that is possible: in what a short run and freshly written checkpoints leave on disk, and in what
the machine writes when the recorded runs are told to it again. The rest is collected from the source (`written`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import tempfile
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer.testing

import raysharded as rs
from raysharded.checkpoint import SigningKey, fork, list_checkpoints, open_storage, pin
from raysharded.checkpoint.retention.run_removal import RunRemoval
from raysharded.checkpoint.retention.two_phase_delete import retire
from raysharded.data.pack import pack
from raysharded.driver.replay.encoding import Decoder, Encoder
from raysharded.driver.replay.names import FORMAT, FORMATS, OLDER, Names
from raysharded.driver.state.commands import Record
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.events import Event
from raysharded.driver.state.state import State
from raysharded.ids import WorkerId
from raysharded.journal import log
from raysharded.metrics import grafana_dashboard
from raysharded.metrics.ray_metrics import METRICS
from raysharded.metrics.translation import Translator
from raysharded.protocol.messages import WorkerInfo
from raysharded.ray_backend.peers import NAMESPACE, name_of
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.processes import fit
from tests.checkpoint import samples
from tests.golden import recordings, written
from tests.training.harness import SmallTask, samples as training_samples

LIST = Path(__file__).parent / "persisted-strings.json"
ENTRIES = "fields of journal entries, by kind"
RECORDED, RECORDED_NOW = (
    "fields of what a recording is told, by class",
    "fields of what a recording of format 3 is told, by name",
)
"""Of format 2, which was named by the code's classes, and of the one that is written."""
_FIELDS = (ENTRIES, RECORDED, RECORDED_NOW)
_FORMATS = {RECORDED: OLDER, RECORDED_NOW: FORMAT}
_LISTED = {WorkerInfo: "Facts", DriverConfig: "Limits"}
"""Classes that have no name in a recording, and had this one when they were listed."""
KEY = SigningKey(b"a key of 17 bytes")
_ANY_KEY = {"metrics", "evaluation", "tensors", "seconds", "versions", "changes"}
"""Fields of JSON whose keys are names that a user, or the time that something took, gives."""
Strings = dict[str, dict[str, Any]]
"""Category -> string -> where it was written; or, of the two above, -> its fields."""


def observe() -> Strings:
    """All of them, as this version writes them."""
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        folder = Path(made)
        with tempfile.NamedTemporaryFile() as secret:
            Path(secret.name).write_bytes(KEY.secret)
            run = _train(folder, secret.name)
        _write_checkpoints(folder, patch)
        on_disk = sorted(path for path in folder.rglob("*") if path.is_file())
        return {
            ENTRIES: _entries(run),
            **{category: dict(_classes_of_recordings(FORMATS[each])) for category, each in _FORMATS.items()},
            "fields of JSON files": _json_fields(folder, on_disk),
            "columns of Parquet files": _columns(folder, on_disk),
            "keys of Parquet files' metadata": _parquet_metadata(folder, on_disk),
            "keys of safetensors files' metadata": _safetensors_metadata(folder, on_disk),
            "paths on storage": {place(path.relative_to(folder)): "written by a run" for path in on_disk},
            "markers of formats": written.texts(
                r"^raysharded[-.][a-z_.]+$",
                ignore=lambda text: text in written.loggers() or _names_code(text) or not _is_marker(text),
            ),
            "loggers": written.loggers(),
            "environment variables": written.texts(r"_?RAYSHARDED_[A-Z_]+"),
            "names on a Ray cluster": _names_on_ray(),
            "Ray's metrics": _ray_metrics(),
            "curves": _curves(run),
            "in the dashboard": dict.fromkeys(_asked_by_dashboard(), "raysharded/metrics/grafana.json"),
            "exit codes": _exit_codes(folder),
        }


# -- what is written --


def _train(folder: Path, key_file: str) -> Path:
    """A run of two workers that was recorded, with evaluation and checkpoints, and gone on with by one worker.

    From then on it is signed.
    """
    for steps, workers in ((2, 2), (4, 1)):
        signing = None if workers == 2 else key_file
        fit(
            rs.ElasticTrainer(
                task=SmallTask(),
                data=training_samples(),
                batch=rs.BatchConfig(global_batch_size=4, microbatch_size=2, seed=5),
                scaling=rs.ScalingConfig(num_workers=workers),
                evaluation=rs.EvalConfig(data=training_samples(), every_steps=2, num_samples=2),
                run=rs.RunConfig(
                    name="run",
                    storage_path=str(folder),
                    max_steps=steps,
                    record_events=True,
                    record_microbatches=True,
                    checkpoint=rs.CheckpointConfig(
                        every_steps=1, keep_last=9, keep_best=("loss", "min", 1), signing_key_file=signing
                    ),
                    accept_unsigned=signing is not None,
                ),
            )
        )
    return folder / "run"


def _write_checkpoints(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Of each form; and of the run's own one that is pinned, one that a fork refers to, and one that is deleted."""
    storage = open_storage(str(folder / "run"))
    refs = [ref for ref in list_checkpoints(storage) if ref.complete]
    pin(storage, "best", refs[0], key=KEY)
    fork(storage, refs[-1], open_storage(str(folder / "fork")), key=KEY)
    assert retire(storage, refs[1], number=1, key=KEY)
    RunRemoval(open_storage(str(folder / "removed")), [], key=KEY).begin(lambda: False)
    state = {"weight": samples.raw("float32", 64, 64), "scalar": samples.raw("int64")}
    samples.save(open_storage(str(folder / "signed")), state, key=KEY)
    samples.save(open_storage(str(folder / "tables")), state, chunk=64)
    samples.save(samples.SpreadStorage(str(folder / "spread")), state)
    with patch.context() as inner:
        samples.with_index(inner)
        samples.save(open_storage(str(folder / "index")), state)
    tree = {"dict": [["weight", {"tensor": "weight"}], ["step", {"list": [{"value": 1}, {"float": "inf"}]}]]}
    samples.save(open_storage(str(folder / "tree")), state, tree=tree, data={"samples": 1})
    plan = FaultPlan(faults=(), folder=str(folder / "plan"), listens=True)
    plan.order(Fault(worker=WorkerId(1), step=3, phase="forward", kind="slow", seconds=0.001))
    plan.strike(WorkerId(1), 3, "forward")
    plan.strike(WorkerId(1), 0, "ready")
    (folder / "text.txt").write_text("some text")
    pack(folder / "text.txt", folder / "tokens", layout="parquet")
    (folder / "text.txt").unlink()


def place(path: Path) -> str:
    """A path with placeholders for what differs from run to run: digits, and what is hexadecimal."""
    text = re.sub(r"(?<=(?:/claims|journal)/)\d+", lambda digits: f"<{len(digits[0])} digits>", path.as_posix())
    text = re.sub(r"(?<=[-_/])[0-9a-f]{8,}(?=[./_]|$)", "<hex>", text)
    text = re.sub(r"(?<=checkpoints/)[0-9a-f]{2}(?=/)", "<hex>", text)
    return re.sub(
        r"(?<!<)(?<!b)\d+(?! digits)",
        lambda digits: f"<{len(digits[0])} digits>" if len(digits[0]) > 2 else "<n>",
        text,
    )


def _entries(run: Path) -> dict[str, Any]:
    """Kind -> fields, of the run's journal and of what the machine writes to those of the recorded runs."""
    found: dict[str, set[str]] = {}
    for placed in log.read_placed(open_storage(str(run))):
        found.setdefault(placed.entry["kind"], set()).update(_fields(placed.entry))
    found["segment"] = {key for path in (run / "journal").iterdir() for key in json.loads(path.open().readline())}
    told, by_source = told_again(), written.entries()
    for kind, fields in told.items():
        found.setdefault(kind, set()).update(fields)
    for name in recordings.names():  # what the machine is not asked about
        for kind, fields in entries_of(recordings.segments(name)).items():
            if kind in by_source and kind not in told:
                found.setdefault(kind, set()).update(fields & by_source[kind].fields)
    return {kind: sorted(fields | {"kind", "at"} if kind != "segment" else fields) for kind, fields in found.items()}


def entries_of(segments: Mapping[str, bytes]) -> dict[str, set[str]]:
    """Kind -> fields, of a journal as it lies on disk."""
    found: dict[str, set[str]] = {}
    for data in segments.values():
        for line in data.decode().splitlines():
            entry = json.loads(line)
            found.setdefault(entry["kind"], set()).update(_fields(entry))
    return found


def told_again() -> dict[str, set[str]]:
    """Kind -> fields, of what the machine writes when it is told the recorded runs."""
    found: dict[str, set[str]] = {}
    for name in recordings.names():
        for replay in recordings.replays(name):
            for moment in replay.moments:
                for command in moment.commands:
                    if isinstance(command, Record):
                        fields = log.plain(command.fields)
                        found.setdefault(command.kind, set()).update(("kind", "at", *_fields(fields)))
    return found


def _fields(value: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The fields of a JSON object, with those of objects in them."""
    for key, item in value.items():
        yield f"{path}{key}"
        if isinstance(item, Mapping) and key not in _ANY_KEY and not path and key not in ("state", "event"):
            yield from _fields(item, f"{path}{key}.")


def _classes_of_recordings(names: Names) -> Iterator[tuple[str, list[str]]]:
    """Name -> fields, of all that events and the first state may be made of."""
    waiting: list[Any] = [State, Event]
    seen: set[Any] = set()
    while waiting:
        hint = waiting.pop()
        if hint in seen:
            continue
        seen.add(hint)
        waiting += typing.get_args(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            hints = typing.get_type_hints(hint)
            given = names.fields.get(hint, {})
            waiting += [hints[field.name] for field in dataclasses.fields(hint)]
            yield _name_of(hint, names), sorted(given.get(field.name, field.name) for field in dataclasses.fields(hint))


def _name_of(cls: type, names: Names) -> str:
    return names.classes.get(cls) or _LISTED.get(cls, cls.__name__)


def told_in_recordings() -> Strings:
    """Name -> fields, of what the recordings really have, as they are and as they would be written today: most of the
    state is not written."""
    found: dict[str, dict[str, set[str]]] = {category: {} for category in _FORMATS}
    for name in recordings.names():
        lines = [line for data in recordings.segments(name).values() for line in data.decode().splitlines()]
        for category, each in _FORMATS.items():
            for hint, told in _told(map(json.loads, lines), each):
                for kind, field in _named(hint, told, FORMATS[each]):
                    found[category].setdefault(kind, set()).update({field} if field else ())
    return {category: {kind: sorted(one) for kind, one in sorted(kinds.items())} for category, kinds in found.items()}


def _told(entries: Iterable[dict[str, Any]], wanted: int) -> Iterator[tuple[Any, Any]]:
    """The states and events of a run's journal, in the wanted format, up to entries that were dropped."""
    decoder, encoder = Decoder(), Encoder()
    older = False
    for entry in entries:
        match entry["kind"]:
            case "entries_dropped":  # later events refer to values that were in them
                return
            case "recording":
                decoder, encoder, older = Decoder(entry["format"]), Encoder(), entry["format"] == OLDER
                state = encoder.state(decoder.state(entry))
                if older or wanted == FORMAT:
                    yield State, (entry if wanted == OLDER else state)["state"]
            case "event" if "event" in entry:
                event = encoder.event(decoder.event(entry))
                if older or wanted == FORMAT:
                    yield Event, (entry if wanted == OLDER else event)["event"]


def _named(hint: Any, value: Any, names: Names) -> Iterator[tuple[str, str]]:
    """(name, field) of all that some JSON of this type has; (name, "") if it has none."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            return  # it has a form of its own
        yield _name_of(hint, names), ""
        given = names.fields.get(hint, {})
        hints = {given.get(name, name): one for name, one in typing.get_type_hints(hint).items()}
        for name, item in value.items():
            if name in hints:
                yield _name_of(hint, names), name
                yield from _named(hints[name], item, names)
    elif isinstance(value, dict) and "is" in value:
        kinds = {names.classes.get(kind): kind for kind in typing.get_args(hint)}
        yield from _named(kinds.get(value["is"]), value, names)
    elif isinstance(value, dict):
        for one in typing.get_args(hint):
            if isinstance(one, type) and dataclasses.is_dataclass(one):  # of a union with None
                yield from _named(one, value, names)
        if len(typing.get_args(hint)) == 2 and not isinstance(hint, types.UnionType):
            for item in value.values():
                yield from _named(typing.get_args(hint)[1], item, names)
    elif isinstance(value, list):
        for item in value:
            for one in typing.get_args(hint):
                yield from _named(one, item, names)


def _json_fields(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """`<kind of file>: <field>` of every JSON file."""
    found: dict[str, str] = {}
    for path in paths:
        if path.suffix == ".json":
            body = json.loads(path.read_bytes())
            name = body.get("format", "order of a fault")
            found |= {f"{name}: {each}": place(path.relative_to(folder)) for each in _all_fields(body)}
    return found


def _all_fields(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _all_fields(item, f"{path}[]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}.{key}".lstrip(".")
            if key not in _ANY_KEY and key != "tree":
                yield from _all_fields(item, f"{path}.{key}")


def _columns(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    return {
        f"{'tokens' if 'tokens' in path.parts else 'boxes'}: {column.name}: {column.type}": place(
            path.relative_to(folder)
        )
        for path in paths
        if path.suffix == ".parquet"
        for column in pq.read_schema(path)
    }


def _parquet_metadata(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        if path.suffix == ".parquet":
            keys = pq.read_metadata(path).metadata or {}
            found |= {key.decode(): place(path.relative_to(folder)) for key in keys if key.startswith(b"raysharded")}
    return found


def _safetensors_metadata(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            data = path.read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            found |= dict.fromkeys(header["__metadata__"], place(path.relative_to(folder)))
    return found


# -- what others see --


def _names_code(text: str) -> bool:
    """Whether it is the dotted name of a module of ours, or of something in one."""
    module, _, name = text.rpartition(".")
    try:
        return importlib.util.find_spec(text) is not None
    except ModuleNotFoundError:
        return bool(module) and _names_code(module) and hasattr(importlib.import_module(module), name)


def _is_marker(text: str) -> bool:
    """Whether it is written into files and objects; threads and temporary folders have such names, too."""
    files = ("checkpoint", "claim", "lease", "pin", "reference", "tombstone", "write")
    return "." in text or text.removeprefix("raysharded-") in files


def _names_on_ray() -> dict[str, str]:
    """The titles of processes, which Ray makes of the names of classes, and the names of actors."""
    from raysharded.run.hosted.registry import host_name

    titles = {f"process ray::{name}": where for name, where in written.actor_classes().items()}
    digest = re.compile(r"[0-9a-f]{16}")
    return {
        **titles,
        f"namespace {NAMESPACE}": "raysharded/ray_backend/peers.py",
        f"worker {digest.sub('<hex>', name_of('0123456789abcdef', 2, WorkerId(3)))}": "raysharded/ray_backend/peers.py",
        f"host {digest.sub('<hex>', host_name('tiny', 'somewhere'))}": "raysharded/run/hosted/registry.py",
    }


def _ray_metrics() -> dict[str, str]:
    return {f"{name}{{{', '.join(shape.tags)}}} {shape.kind}": shape.says for name, shape in METRICS.items()}


def _curves(run: Path) -> dict[str, str]:
    """The names of the numbers that writers of metrics get, without those of phases and of the task's own."""
    translator = Translator(url="", samples_per_step=4, tokens_per_step=8)
    found: set[str] = set()
    for placed in log.read_placed(open_storage(str(run))):
        if placed.entry["kind"] == "step":
            found |= set(translator.of_step(placed.entry, placed.entry["at"]).values)
    return dict.fromkeys(sorted(found), "TensorBoard, and one's own writers")


def _asked_by_dashboard() -> Iterator[str]:
    yield from sorted(set(re.findall(r"ray_raysharded_\w+", grafana_dashboard())))
    board = json.loads(grafana_dashboard())
    yield from (f"uid {board['uid']}", *(f"variable {one['name']}" for one in board["templating"]["list"]))


def _exit_codes(folder: Path) -> dict[str, str]:
    from raysharded.cli import app
    from raysharded.cli.errors import INTERRUPTED

    runner = typer.testing.CliRunner()
    codes = {
        "an error": runner.invoke(app, ["report", str(folder / "nowhere")]).exit_code,
        "wrong usage": runner.invoke(app, ["report", "--no-such-option"]).exit_code,
        "success": runner.invoke(app, ["report", str(folder / "run"), "--json"]).exit_code,
        "interrupted": INTERRUPTED,
    }
    return {f"{code} {what}": "raysharded/cli" for what, code in codes.items()}


# -- comparison --


def differences(kept: Strings, now: Strings) -> list[str]:
    """What was kept and is not there any more, each with where it was written."""
    entries = written.entries()
    found = []
    for category, strings in kept.items():
        today = now.get(category, {})
        for string, about in strings.items():
            if category not in _FIELDS:
                if string not in today:
                    found.append(f"{category}: {string!r} is gone; it was written by {about}")
                continue
            by_source = entries.get(string, written.Written()) if category == ENTRIES else written.Written()
            who = f" (written by {', '.join(sorted(by_source.where))})" if by_source.where else ""
            if string not in today and not by_source.where:
                what = "the journal entry" if category == ENTRIES else "the class"
                found.append(f"{category}: {what} {string!r} is gone, with its fields {', '.join(about)}")
                continue
            gone = set(about) - set(today.get(string, ())) - by_source.fields
            found += [f"{category}: {string!r} has no field {name!r} any more{who}" for name in sorted(gone)]
    return found


def kept() -> Strings:
    """The list."""
    return typing.cast("Strings", json.loads(LIST.read_text(encoding="utf-8"))) if LIST.exists() else {}


def merged(before: Strings, now: Strings) -> Strings:
    """All of both."""
    found: Strings = {}
    for category in sorted({*before, *now}):
        old, new = before.get(category, {}), now.get(category, {})
        found[category] = dict(sorted({**old, **new}.items()))
        if category in _FIELDS:
            found[category] = {name: sorted({*old.get(name, ()), *new.get(name, ())}) for name in sorted({*old, *new})}
    return found


def main() -> None:
    now = {**observe(), **told_in_recordings()}
    LIST.write_text(json.dumps(merged(kept(), now), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from tests.golden.persisted import main as imported_main  # so that the task's class has one name in every process

    imported_main()
