"""Commands of the state machine, with the calls to workers that carry them out; and the outcome of a handler.

An outcome is the next state with the commands that lead there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from raysharded.driver.state.changed import replace
from raysharded.driver.state.state import Phase, State
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.link_messages import LinkCheck
from raysharded.protocol.messages import GenerationSpec, Saved


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWorker:
    worker: WorkerId
    avoid: tuple[str, ...] = ()
    """Ids of nodes on which the worker must not be placed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KillWorker:
    worker: WorkerId
    at_once: bool = True
    """False for a healthy worker with nothing left to do: its process exits in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Have every member form the generation."""

    spec: GenerationSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Have every member of the next generation prepare it in the background."""

    spec: GenerationSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    generation: GenerationId
    members: tuple[WorkerId, ...]
    rest: bool = False
    """Do no step, but stop at once and report what is held: the run is paused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupt:
    """Free a worker from its collectives; its running call then returns what it holds."""

    worker: WorkerId
    generation: GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class AskReport:
    """Have an idle member of a failed generation report what it holds."""

    worker: WorkerId
    generation: GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestBoundary:
    worker: WorkerId
    generation: GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSave:
    """Have the whole generation save its current step."""

    worker: WorkerId
    generation: GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    worker: WorkerId
    generation: GenerationId
    after_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Have a member report where it is."""

    worker: WorkerId
    generation: GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckLinks:
    """Have workers test the links between them."""

    spec: LinkCheck


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSnapshot:
    """Have all members of a stopped generation write the step that they hold."""

    generation: GenerationId
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectSave:
    generation: GenerationId
    step: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AskFingerprint:
    """Have every member compute its part of the state's fingerprint."""

    generation: GenerationId
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SumFingerprint:
    """Combine the members' parts of the fingerprint."""

    parts: tuple[Saved, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitSave:
    """Write the manifest of a checkpoint whose parts are all written."""

    generation: GenerationId
    step: int
    parts: tuple[Saved, ...]
    measured: Mapping[str, float] = field(default_factory=dict)
    """The step's loss, metrics and evaluation, as far as they are known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteCheckpoints:
    """Delete checkpoints whose state may be wrong, or was undone."""

    prefixes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Notify the requesters of a checkpoint that it is committed, or why it will not be."""

    requests: tuple[int, ...]
    step: int
    prefix: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Write an entry to the journal."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    durable: bool = False
    """Flush to storage now, not with the next batch."""
    awaited_by: GenerationId | None = None
    """The generation that does not train before it receives `Recorded`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """End the run; `error` is its failure, if it failed."""

    error: BaseException | None = None


Command = (
    StartWorker
    | KillWorker
    | Form
    | Prepare
    | Train
    | Interrupt
    | AskReport
    | RequestBoundary
    | RequestSave
    | SaveSnapshot
    | Poll
    | Probe
    | CheckLinks
    | CollectSave
    | AskFingerprint
    | SumFingerprint
    | CommitSave
    | DeleteCheckpoints
    | Answer
    | Record
    | End
)


_POLL_TIMEOUT_S = 5.0

Call = tuple[WorkerId, str, tuple[Any, ...]]
"""(worker, method of `raysharded.actors.worker.Worker`, arguments)"""


def calls_of(command: Command) -> list[Call]:
    """Worker calls that carry a command out; none if it needs no calls."""
    match command:
        case Form(spec=spec):
            return [(member, "form", (spec,)) for member in (*spec.members, *spec.failed_devices)]
        case Prepare(spec=spec):
            return [(member, "prepare", (spec,)) for member in spec.members]
        case Train(generation=generation, members=members, rest=rest):
            return [(member, "rest" if rest else "train", (generation,)) for member in members]
        case SaveSnapshot(generation=generation, members=members):
            return [(member, "save_held", (generation,)) for member in members]
        case AskFingerprint(generation=generation, members=members):
            return [(member, "fingerprint", (generation,)) for member in members]
        case Interrupt(worker=worker, generation=generation):
            return [(worker, "interrupt", (generation,))]
        case AskReport(worker=worker, generation=generation):
            return [(worker, "report", (generation,))]
        case RequestBoundary(worker=worker, generation=generation):
            return [(worker, "request_boundary", (generation,))]
        case RequestSave(worker=worker, generation=generation):
            return [(worker, "request_save", (generation,))]
        case Poll(worker=worker, generation=generation, after_step=after_step):
            return [(worker, "poll", (generation, after_step, _POLL_TIMEOUT_S))]
        case CheckLinks(spec=spec):
            ends = sorted({worker for pair in spec.pairs for worker in pair})
            return [(worker, "check_links", (spec, worker)) for worker in ends]
        case Probe(worker=worker, generation=generation):
            return [(worker, "look", (generation,))]
    return []


def with_secret(command: Command, secret: Callable[[str], bytes]) -> Command:
    """The command with the secret that its workers need to meet; `secret`: of a prefix in the rendezvous store."""
    match command:
        case Form(spec=spec) | Prepare(spec=spec):
            return replace(command, spec=replace(spec, secret=secret(spec.prefix)))
        case CheckLinks(spec=links):
            return replace(command, spec=replace(links, secret=secret(links.prefix)))
    return command


Outcome: TypeAlias = tuple[State, list[Command]]


def prepend(outcome: Outcome, before: list[Command]) -> Outcome:
    return outcome[0], [*before, *outcome[1]]


def finish(state: State, error: BaseException | None = None) -> Outcome:
    """End the run now; with the error of `State.ending`, if there is one."""
    error = error if state.ending is None else state.ending
    fields: dict[str, object] = {"step": state.step, "fingerprint": state.result_fingerprint}
    if error is not None:
        fields["error"] = f"{type(error).__name__}: {error}"
    kind = "failed" if error is not None else "stopped" if state.result_fingerprint is None else "finished"
    return replace(state, phase=Phase.OVER), [Record(kind=kind, fields=fields, durable=True), End(error=error)]
