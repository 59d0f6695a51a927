"""The demo's checks and the results of its two runs, as a table and as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from raysharded.data import LedgerReport
from raysharded.display.quantities import count
from raysharded.errors import RunFailed
from raysharded.report import load


@dataclass(slots=True)
class Training:
    """The results of one of the two runs."""

    fingerprint: str = ""
    entries: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    kills: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """(monotonic seconds, workers killed)"""
    url: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """One recovery; times are seconds. The parts after `found_s` follow each other and add up to `total_s`."""

    worker: tuple[int, ...]
    """The killed workers."""
    found_s: float
    """From SIGKILL until the driver detected it."""
    abort_s: float
    """Until every survivor had left its collectives and reported its state."""
    wait_s: float
    """Until there were enough workers to continue."""
    reshard_s: float
    """Until the survivors had formed the next generation and held the state."""
    first_step_s: float
    """Until the interrupted step was done."""
    total_s: float
    steps_redone: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The demo's result."""

    steps: int
    workers_by_step: tuple[int, ...]
    recoveries: tuple[Recovery, ...]
    samples_lost: int
    samples_repeated: int
    fingerprint: str
    fingerprint_undisturbed: str
    identical: bool
    tokens_per_s: float
    problems: tuple[str, ...]
    """Failed checks."""

    @property
    def held(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The outcome as a dictionary for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, disturbed: Training, undisturbed: Training, *, steps: int, chaos: bool = False) -> Outcome:
        """Compare the two runs, by their journals. After chaos the expected losses are unknown."""
        ledgers = [_ledger(disturbed), _ledger(undisturbed)]
        recoveries = _recoveries(disturbed)
        workers = {e["step"]: e["workers"] for kind, e in disturbed.entries if kind == "step"}
        identical = disturbed.fingerprint == undisturbed.fingerprint != ""
        lost = sum(ledger.samples_lost for ledger in ledgers)
        repeated = sum(ledger.samples_repeated for ledger in ledgers)
        problems = _chaos_problems(disturbed) if chaos else _kill_problems(disturbed, recoveries)
        problems += _problems(workers, steps, identical, lost, repeated, ledgers)
        tokens = [
            e["weight"] / sum(e["seconds"].values()) for kind, e in disturbed.entries if kind == "step" and e["seconds"]
        ]
        return cls(
            steps=len(workers),
            workers_by_step=tuple(workers[step] for step in sorted(workers)),
            recoveries=tuple(recoveries),
            samples_lost=lost,
            samples_repeated=repeated,
            fingerprint=disturbed.fingerprint,
            fingerprint_undisturbed=undisturbed.fingerprint,
            identical=identical,
            tokens_per_s=sorted(tokens)[len(tokens) // 2] if tokens else 0.0,
            problems=tuple(problems),
        )


def _ledger(training: Training) -> LedgerReport:
    ledger = load(training.url).ledger
    if ledger is None:
        raise RunFailed(f"the journal under {training.url} has no steps to check the ledger with")
    return ledger


def _recoveries(training: Training) -> list[Recovery]:
    found = []
    for kind, entry in training.entries:
        if kind != "recovery":
            continue
        kills = [at for at, workers in training.kills if set(workers) & set(entry["lost"])]
        found_s = entry["found_at"] - min(kills) if kills else 0.0
        found.append(
            Recovery(
                worker=tuple(entry["lost"]),
                found_s=found_s,
                abort_s=entry["abort_s"],
                wait_s=entry.get("wait_s", 0.0),
                reshard_s=entry["reshard_s"],
                first_step_s=entry["first_step_s"],
                total_s=found_s + entry["total_s"],
                steps_redone=entry["steps_redone"],
                source=entry["source"],
            )
        )
    return found


def _kill_problems(training: Training, recoveries: list[Recovery]) -> list[str]:
    problems = []
    killed = sorted(worker for _, workers_killed in training.kills for worker in workers_killed)
    recovered = sorted(worker for recovery in recoveries for worker in recovery.worker)
    if len(killed) != 3:
        problems.append(f"3 workers were to be killed, {len(killed)} were; give the demo more steps (--steps)")
    if killed != recovered:
        problems.append(f"workers {killed} were killed, the recoveries name {recovered}")
    if any(recovery.source != "memory" for recovery in recoveries):
        problems.append("a recovery was not made from the survivors' memory")
    return problems


def _chaos_problems(training: Training) -> list[str]:
    return [] if training.kills else ["no fault struck; let them come more often, or give more steps (--steps)"]


def _problems(
    workers: dict[int, int], steps: int, identical: bool, lost: int, repeated: int, ledgers: list[LedgerReport]
) -> list[str]:
    problems = []
    if sorted(workers) != list(range(1, steps + 1)):
        problems.append(f"{len(workers)} of {count(steps, 'step')} done")
    if lost or repeated or not all(ledger.ok for ledger in ledgers):
        problems.append(f"samples: {lost} lost, {repeated} repeated")
    if not identical:
        problems.append("the weights differ")
    return problems


def show(outcome: Outcome, console: Console) -> None:
    """Print the table and the verdict.

    The table's times follow each other: the driver detects the loss; every survivor has left its collectives; there are
    enough workers; the next generation holds the state; the interrupted step is done.
    """
    table = Table(title="Recoveries (seconds)", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("killed", "found", "aborted", "waited", "resharded", "first step", "in all", "redone", "from"):
        table.add_column(column, justify="left" if column in ("killed", "from") else "right", no_wrap=True)
    for r in outcome.recoveries:
        times = (r.found_s, r.abort_s, r.wait_s, r.reshard_s, r.first_step_s, r.total_s)
        killed = " and ".join(map(str, r.worker))
        table.add_row(killed, *(f"{value:.3f}" for value in times), str(r.steps_redone), r.source)
    console.print(table)
    console.print(f"Samples lost: {outcome.samples_lost}, repeated: {outcome.samples_repeated} (from the ledger)")
    console.print(f"Fingerprint with losses:  {outcome.fingerprint}")
    console.print(f"Fingerprint undisturbed:  {outcome.fingerprint_undisturbed}")
    console.print(f"Weights identical: [bold]{'yes' if outcome.identical else 'NO'}[/bold]")
    for problem in outcome.problems:
        console.print(f"[red]not as promised: {problem}[/red]")
