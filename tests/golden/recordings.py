"""Golden journals, and what is made of them: of recorded runs of real workers, packed, and of earlier versions, as they
lie on disk."""

from __future__ import annotations

import difflib
import io
import json
import lzma
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from raysharded.checkpoint import open_storage
from raysharded.driver.replay.rerun import Replay, load as load_replays
from raysharded.journal import log
from raysharded.report import RunReport, load as load_report
from raysharded.report.loader import load_metrics

RUNS, JOURNALS = Path(__file__).parent / "runs", Path(__file__).parent / "journals"
_JOURNAL, _RENDERED = ".journal.tar.xz", ".rendered.xz"
_WIDTH = 1000
"""So that nothing is wrapped: where, another version of rich may see otherwise."""


def names() -> list[str]:
    """Of all recorded runs, sorted."""
    return sorted(path.name.removesuffix(_JOURNAL) for path in RUNS.glob(f"*{_JOURNAL}"))


def pack(name: str, segments: Mapping[str, bytes]) -> None:
    """Keep the journal of a run. The same segments give the same file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, data in sorted(segments.items()):
            member = tarfile.TarInfo(key)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    RUNS.mkdir(exist_ok=True)
    (RUNS / f"{name}{_JOURNAL}").write_bytes(lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def segments(name: str) -> dict[str, bytes]:
    """The journal of a recorded run, as it lay on disk: file -> what is in it."""
    with tarfile.open(RUNS / f"{name}{_JOURNAL}", mode="r:xz") as tar:
        return {member.name: file.read() for member in tar if (file := tar.extractfile(member)) is not None}


@cache
def replays(name: str) -> tuple[Replay, ...]:
    """Of each driver of a recorded run, what the machine decides today."""
    with tempfile.TemporaryDirectory() as folder:
        return tuple(load_replays(str(unpack(name, Path(folder)))))


def unpack(name: str, folder: Path) -> Path:
    """The run's folder, below `folder`: nothing but its journal."""
    run = folder / name
    for key, data in segments(name).items():
        (run / key).parent.mkdir(parents=True, exist_ok=True)
        (run / key).write_bytes(data)
    return run


def keep_rendering(name: str, text: str) -> None:
    """Keep what is made of a recorded run, to be compared."""
    (RUNS / f"{name}{_RENDERED}").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def kept_rendering(name: str) -> str:
    """What `keep_rendering` kept."""
    return lzma.decompress((RUNS / f"{name}{_RENDERED}").read_bytes()).decode()


def journal_names() -> list[str]:
    """Of the journals of earlier versions, sorted."""
    return sorted(path.name for path in JOURNALS.iterdir() if path.is_dir())


def journal_segments(name: str) -> dict[str, bytes]:
    """The same as `segments`, of a journal of an earlier version."""
    return {f"journal/{path.name}": path.read_bytes() for path in sorted((JOURNALS / name / "journal").iterdir())}


def rendering_of_journal(name: str) -> Path:
    """The file with what is made of a journal of an earlier version."""
    return JOURNALS / f"{name}.txt"


def changes(kept: str, now: str) -> list[str]:
    """The lines that differ, in order: `-` is only in what was kept, `+` only in what is made now. None if all that was
    kept is still there: a report may say more."""
    found = difflib.unified_diff(kept.splitlines(), now.splitlines(), lineterm="", n=0) if kept != now else ()
    lines = [line for line in found if not line.startswith(("---", "+++", "@@"))]
    return lines if any(line.startswith("-") for line in lines) else []


def rendering(run: Path, replays: Iterable[Replay] = ()) -> str:
    """All that today's readers make of a run, as text: entries, decisions (of a recorded one), the report as a person
    and as a program gets it, and the columns of its metrics."""
    sections = {
        "entries": _entries(run),
        "decisions": (line for replay in replays for line in replay.lines()),
        "report": _report(load_report(str(run))),
        "metrics": (f"{column.name}: {column.type}" for column in load_metrics(str(run)).schema),
    }
    return "".join(f"== {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections.items())


def _entries(run: Path) -> Iterator[str]:
    """Where each is, who wrote it, its kind and its fields."""
    for placed in log.read_placed(open_storage(str(run))):
        fields = " ".join(name for name in placed.entry if name != "kind")
        yield f"{placed.key}:{placed.line} {placed.writer} {placed.entry['kind']}: {fields}"


def _report(report: RunReport) -> Iterator[str]:
    console = Console(width=_WIDTH, color_system=None, file=io.StringIO(), legacy_windows=False, force_terminal=False)
    with console.capture() as shown:
        console.print(report)
    lines = (" ".join(line.split()) for line in shown.get().replace(report.url, "RUN").splitlines())
    yield from (line for line in lines if any(map(str.isalnum, line)))  # without the rules of tables
    yield from flat({**report.as_dict(), "url": "RUN"})


def flat(value: Any, path: str = "") -> Iterator[str]:
    """A line for every value of some JSON, with its path."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], (Mapping, list, tuple)):
        for number, item in enumerate(value):
            yield from flat(item, f"{path}[{number}]")
    else:
        yield f"{path} = {json.dumps(_rounded(value))}"


def _rounded(value: Any) -> Any:
    """Sums may differ in their last bits from one processor to another."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
