"""docs/benchmarks.md and its plots, made from results alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.effort import Effort
from benchmarks.page_tables import asked_table, number, tables
from benchmarks.result import NOT_SEEN, Line, Measured, read

LIMITS = Path(__file__).with_name("limits.txt")
"""Limits that the ratios do not show, one item each; maintained by hand."""
ALONE = Path(__file__).with_name("alone.txt")
"""Figures measured without a peer; maintained by hand, too."""
OURS = "raysharded"
"""Prefix of the names of raysharded's subjects."""
TITLES = {
    "recovery": "The death of a worker",
    "stops": "A worker that is stopped",
    "nodes": "The death of a node",
    "resizes": "Planned changes of the number of workers",
    "steps": "The cost of a step",
    "steps-large": "The cost of a step of 50M parameters",
    "goodput": "Goodput under faults",
    "checkpoints": "Checkpoints",
    "scale": "Scale",
    "report": "The report of a long run",
    "gpu": "One GPU",
}
INTRODUCTIONS = {
    "recovery": "From a fault to progress beyond the step that it broke, according to the step records.",
    "stops": "As above. The worker keeps its connections and sends nothing. The benchmark stops waiting for a subject "
    "that is not beyond the broken step after two minutes.",
    "nodes": "As above. Of two nodes with two workers each, the newer one dies with all its processes.",
    "resizes": "A worker leaves, another one joins, each on request. A pause is the longest time between two new steps "
    "from the request on. Ray Train has no call for fewer workers, and with a fixed number none for more.",
    "steps": "Seconds per step, undisturbed. All sides train the same model on the same samples with one thread per "
    "worker. They run at the same time and take turns of a few steps, while the processes of the others are stopped. "
    "So all see the same state of the machine. Ratios are over the plain loop under torchrun. *Reduced once*: all "
    'sides reduce whole gradients once a step (`accumulation="local"`), otherwise for every microbatch.',
    "steps-large": "As above, in pairs, because four workers of each of three subjects do not fit into 24 GB. Ray "
    "Train takes part with two workers, fast.",
    "goodput": "A worker is killed every 60 s. The subjects take turns of that length, one kill in each, while the "
    "processes of the others are stopped; their stopped time does not count.",
    "checkpoints": "A sharded state held by 4 processes, compared with a plain write or read of as many bytes by as "
    "many processes in the same run, and with `torch.distributed.checkpoint`.",
    "scale": "Without a cluster: one process computes the plans and decisions for one.",
    "report": "`raysharded report` of a run of a million steps. The benchmark writes its journal with correct digests; "
    "all samples are accounted for.",
    "gpu": "World size 1: nothing is communicated, so this shows the cost of the code around the model, not its "
    "scaling.",
}
_ABOUT = (
    "Written by `python -m benchmarks page` from the results of `make bench-full`; do not edit. Each figure is the "
    "median of its rounds, with the least, the most and their number in parentheses. Subjects alternate (A B A B ...), "
    "and a ratio is the median of the ratios of neighbours. `asked` is the project's own goal. To run it: "
    "`make bench-full` (four to five hours on 2 cores; `BENCH=recovery` and so on selects one benchmark), `make bench` "
    "(all in less than an hour, with one to three rounds, into `build/`), `make bench-quick` (minutes: a check that it "
    "works)."
)
_MORE_IS_BETTER = ("/s",)
"""Endings of the units for which more is better."""
_LESS_IS_BETTER = ("s", "MB", "GB", "bytes", "steps", "samples")
_NOT_COMPARED = (": normal step before it",)
"""Endings of lines that state the conditions of other lines' measurements."""
_NOTABLE = 1.02
"""A peer is better if its median is this many times better; closer ones count as equal."""


def write_page(results: Path, docs: Path, order: Sequence[str]) -> None:
    """Write `docs`/benchmarks.md and `docs`/benchmarks/*.png from all files of `results`.

    Raises FileNotFoundError if there are none.
    """
    found = {name: read(results / f"{name}.json") for name in order if (results / f"{name}.json").exists()}
    if not found:
        raise FileNotFoundError(
            f"no results in {results}: run `make bench`, or `make bench-quick` to check that it works"
        )
    from benchmarks import plots

    pictures = {name: plots.draw(name, lines, docs / "benchmarks") for name, lines in found.items()}
    (docs / "benchmarks.md").write_text(text_of(found, pictures, LIMITS.read_text(), ALONE.read_text()))


def text_of(found: Mapping[str, Sequence[Line]], pictures: Mapping[str, Sequence[str]], limits: str, alone: str) -> str:
    """The page's text. `pictures`: the names of the plots of each benchmark."""
    everything = [line for lines in found.values() for line in lines]
    parts = [
        "# Benchmarks",
        "",
        _ABOUT,
        "",
        *_warning(everything),
        "## Goals",
        "",
        *asked_table(everything),
        "",
        "## Where raysharded is behind",
        "",
        *behind(everything),
        "",
        limits.strip(),
        "",
    ]
    for name, lines in found.items():
        parts += [f"## {TITLES.get(name, name)}", ""]
        parts += [INTRODUCTIONS[name], ""] if name in INTRODUCTIONS else []
        parts += [f"![{TITLES.get(name, name)}](benchmarks/{picture})\n" for picture in pictures.get(name, ())]
        parts += [*tables(lines), "", *notes(lines), _measured_with(lines), ""]
    parts += ["## raysharded alone", "", alone]
    return "\n".join(parts).rstrip() + "\n"


def behind(lines: Sequence[Line]) -> list[str]:
    """A list of the missed goals, the figures in which a peer is better, and those not measured."""
    missed = [
        f"- {line.what}, {line.subject}: asked {line.asked}, measured {number(Measured(line.judged).median)}"
        f"{' ' + line.against if line.ratio and line.against else '' if line.ratio else _unit(line.unit)}."
        for line in lines
        if line.met is False
    ]
    unknown = [
        f"- Not measured: {line.what}, {line.subject}: {line.note}"
        for line in lines
        if not line.values and not line.note.startswith((NOT_SEEN, ">"))  # these report what a peer did not do
    ]
    found = [*missed, *_better_peers(lines), *unknown]
    return found or ["In none of the figures below."]


def _better_peers(lines: Sequence[Line]) -> list[str]:
    """Per figure: the best peer, if it is better than a subject of raysharded's, and those subjects."""
    worse: dict[tuple[str, str], dict[str, tuple[Line, Line, float]]] = {}
    for ours, theirs in _pairs(lines):
        factor = _times_worse(ours, theirs)
        of_this = worse.setdefault((ours.what, ours.unit), {})
        if factor is not None and factor >= max(_NOTABLE, of_this.get(ours.subject, (ours, theirs, 0.0))[2]):
            of_this[ours.subject] = (ours, theirs, factor)
    found = []
    for (what, _), of_this in worse.items():
        if of_this:
            best = next(iter(of_this.values()))[1]
            mine = ", ".join(f"{_figure(ours)} ({factor:.2f} times)" for ours, _, factor in of_this.values())
            found.append(f"- {what}: {_figure(best)}; {mine}.")
    return found


def _figure(line: Line) -> str:
    return f"{line.subject} {number(Measured(line.values).median)}{_unit(line.unit)}"


def notes(lines: Sequence[Line]) -> list[str]:
    """The lines' notes; a note that several lines share appears once."""
    of: dict[str, list[str]] = {}
    for line in lines:
        if line.note:
            of.setdefault(line.note, []).append(f"{line.what}, {line.subject}")
    found = [f"- {_several(whose)}: {note}" for note, whose in of.items()]
    return [*found, ""] if found else []


def _several(whose: Sequence[str]) -> str:
    return whose[0] if len(whose) == 1 else f"{whose[0]}, and {len(whose) - 1} more"


def _warning(lines: Iterable[Line]) -> list[str]:
    efforts = {line.machine.get("effort") for line in lines}
    if Effort.QUICK in efforts:
        return ["**Some of these figures are of a quick run: they only show that it works.**", ""]
    if Effort.HOUR in efforts:
        return ["**Some of these figures are of one to three rounds: an order of magnitude.**", ""]
    return []


def _measured_with(lines: Sequence[Line]) -> str:
    """Commit, date, versions and machine of these lines; each combination once."""
    found: dict[str, None] = {}
    for line in lines:
        about: Mapping[str, Any] = line.machine
        versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
        load = " ".join(str(one) for one in about.get("load_before", ()))
        taken = f", {about['taken_percent']} % of their time taken by the host" if "taken_percent" in about else ""
        found[
            f"Commit `{about.get('commit', '?')}`, {about.get('date', '?')}; {about.get('cores', '?')} cores of "
            f"{about.get('cpu', '?')}, {about.get('memory_gb', '?')} GB, load before: {load}{taken}; {versions}."
        ] = None
    return "\n\n".join(found)


def _pairs(lines: Sequence[Line]) -> Iterable[tuple[Line, Line]]:
    """Pairs of a line of raysharded's and a peer's line of the same figure."""
    for ours in lines:
        for theirs in lines:
            same = (ours.benchmark, ours.what, ours.unit) == (theirs.benchmark, theirs.what, theirs.unit)
            said = ours.values and theirs.values and not ours.what.endswith(_NOT_COMPARED)
            if same and said and _is_ours(ours) and not _is_ours(theirs):
                yield ours, theirs


def _is_ours(line: Line) -> bool:
    return line.subject.startswith(OURS)


def _times_worse(ours: Line, theirs: Line) -> float | None:
    """Factor by which the peer is better; 0 if it is not; None if the unit has no better direction."""
    mine, other = Measured(ours.values).median, Measured(theirs.values).median
    if ours.unit.endswith(_MORE_IS_BETTER):
        mine, other = other, mine
    elif ours.unit not in _LESS_IS_BETTER:
        return None
    if mine <= other:
        return 0.0
    return mine / other if other > 0 else float("inf")


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""
