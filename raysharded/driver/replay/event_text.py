"""Events, decisions and the resulting state as short lines for people. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from raysharded.display.plain_text import brief
from raysharded.display.quantities import count, duration, weights_text
from raysharded.driver.membership.state_source import describe_source
from raysharded.driver.state.commands import (
    Answer,
    AskFingerprint,
    AskReport,
    CheckLinks,
    CollectSave,
    Command,
    CommitSave,
    DeleteCheckpoints,
    End,
    Form,
    Interrupt,
    KillWorker,
    Poll,
    Prepare,
    Probe,
    Record,
    RequestBoundary,
    RequestSave,
    SaveSnapshot,
    StartWorker,
    SumFingerprint,
    Train,
)
from raysharded.driver.state.events import (
    Annotation,
    CheckpointRequested,
    CommitFailed,
    Committed,
    Deleted,
    DrainRequested,
    Event,
    Fingerprinted,
    LeadershipLost,
    LearningRateRequested,
    MixtureWeightsRequested,
    Overtaken,
    PauseRequested,
    Ready,
    Recorded,
    ReshardRequested,
    ResizeRequested,
    ResumeRequested,
    RewindRequested,
    StopRequested,
    Tick,
    WorkerReply,
)
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import State
from raysharded.layout import Mesh
from raysharded.protocol.death import DeathExplained
from raysharded.protocol.link_messages import LinkReport
from raysharded.protocol.messages import GenerationReady, Prepared, ProbeReply, Progress, Saved, Stopped
from raysharded.protocol.worker_launcher import LeaveNotice, NodeBack, NodeLost, WorkerLost


def of_event(event: Event) -> str:
    """An event, on one line."""
    return " ".join(_of_event(event).split())


def _of_event(event: Event) -> str:
    match event:
        case Ready(worker=worker, facts=facts):
            return f"{_workers([worker])} on {facts.node} is ready"
        case WorkerLost(worker=worker, reason=reason, node_died=node_died):
            return f"{_workers([worker])} is lost{', with its node' if node_died else ''}: {brief(reason)}"
        case DeathExplained(worker=worker, death=death):
            return f"{_workers([worker])} {death.cause}"
        case LeaveNotice(workers=workers, reason=reason, within_s=within_s, whole_node=whole_node):
            whom = f"the node of {_workers(workers)}" if whole_node else _workers(workers)
            return f"{whom} must leave within {duration(within_s)}: {brief(reason)}"
        case NodeLost(host=host, reason=reason):
            return f"node {host} is lost: {brief(reason)}"
        case NodeBack(host=host):
            return f"node {host} answers again"
        case WorkerReply(worker=worker):
            return f"{_workers([worker])} {_said(event)}"
        case Committed(step=step):
            return f"the checkpoint of step {step} is committed"
        case CommitFailed(step=step, error=error):
            return f"the checkpoint of step {step} could not be committed: {brief(error)}"
        case Overtaken(step=step, reason=reason):
            return f"the checkpoint of step {step} is overtaken: {brief(reason)}"
        case LeadershipLost(reason=reason):
            return f"another driver owns the run: {brief(reason)}"
        case Fingerprinted(fingerprint=fingerprint):
            return f"the final state's fingerprint is {fingerprint}"
        case CheckpointRequested(request=request):
            return f"a checkpoint is asked for (request {request})"
        case StopRequested(checkpoint_within_s=wait_s):
            after = "" if wait_s is None else " after one more checkpoint"
            within = f", within {duration(wait_s)}" if wait_s is not None and math.isfinite(wait_s) else ""
            return f"the run is told to end{after}{within}"
        case ReshardRequested(grouping=grouping):
            return _of_grouping(grouping)
        case LearningRateRequested(factor=factor):
            return f"{factor:g} times the task's learning rate is asked for"
        case MixtureWeightsRequested(weights=weights):
            return f"weights of the mixture are asked for: {weights_text(dict(weights))}"
        case RewindRequested(step=step, skip_data=skip_data):
            return f"somebody wants to go back to step {step}{', and on past the data read since' if skip_data else ''}"
        case Recorded(generation=generation):
            return f"what generation {generation} decided is on record"
        case Deleted(prefixes=prefixes):
            return f"{count(len(prefixes), 'checkpoint')} deleted by retention"
        case PauseRequested():
            return "a pause is asked for"
        case ResumeRequested():
            return "the run is told to go on"
        case ResizeRequested(workers=workers):
            return f"{count(workers, 'worker')} are asked for"
        case DrainRequested(node=node, within_s=within_s):
            return f"node {node} is to be left within {duration(within_s)}"
        case Annotation(kind=kind):
            return f"a remark for the journal: {kind}"
        case Tick():
            return "time has passed"


def _of_grouping(grouping: Grouping | None) -> str:
    tensor = f", tensor parallel degree {grouping.tensor}" if grouping and grouping.tensor > 1 else ""
    if grouping is None or grouping.shards is None:
        return f"no shard groups are wanted{tensor}" if tensor else "no groups are wanted"
    return f"groups of {count(grouping.shards, 'worker')} are asked for{tensor}"


def _said(said: WorkerReply) -> str:
    match said.message:
        case GenerationReady(generation=generation, step=step):
            return f"formed generation {generation} after step {step}"
        case Prepared(error=""):
            return "has prepared the next generation"
        case Prepared(error=error):
            return f"could not prepare the next generation: {brief(error)}"
        case Stopped(generation=generation, reason=reason, step=step, phase=phase, error=error):
            why = f": {type(error).__name__}: {brief(str(error))}" if error is not None else ""
            where = f" in {phase}" if phase else ""
            return f"stopped generation {generation} after step {step}{where}, {reason.value}{why}"
        case Progress(reports=reports) if reports:
            steps = sorted({reports[0].step, reports[-1].step})
            return f"reports step {' to '.join(map(str, steps))}"
        case Progress():
            return "reports no new step"
        case Saved(step=step, error=None):
            return f"has written its part of step {step}"
        case Saved(step=step, error=error):
            return f"has not written its part of step {step}: {brief(str(error))}"
        case LinkReport(failed=()):
            return "reaches all others"
        case LinkReport(failed=failed):
            return f"does not reach {_workers(failed)}"
        case ProbeReply(step=step, phase=phase, phase_s=phase_s, waits=waits):
            how = "waits" if waits else "is"
            return f"{how} in {phase or 'no phase'} after step {step}, for {duration(phase_s)}"


def of_commands(commands: Sequence[Command]) -> str:
    """The decisions, on one line; commands of one kind together."""
    parts = []
    for _, group in groupby(commands, key=lambda command: (type(command), getattr(command, "kind", ""))):
        same = list(group)
        parts.append(_of_command(same[0], [getattr(command, "worker", -1) for command in same]))
    return "; ".join(parts) or "nothing to do"


def _of_command(command: Command, workers: Sequence[int]) -> str:
    """Text of consecutive commands of one kind; `workers`: those of all of them."""
    match command:
        case StartWorker():
            return f"start {_workers(workers)}"
        case KillWorker():
            return f"kill {_workers(workers)}"
        case Form(spec=spec):
            source = f"from {describe_source(spec.source)}, step {spec.source.step}"
            return f"form generation {spec.generation} of {_workers(spec.members)} {source}{_as_mesh(spec.mesh)}"
        case Prepare(spec=spec):
            return f"prepare generation {spec.generation} of {_workers(spec.members)}"
        case Train(generation=generation, rest=True):
            return f"keep generation {generation} in memory"
        case Train(generation=generation):
            return f"train generation {generation}"
        case Interrupt():
            return f"interrupt {_workers(workers)}"
        case AskReport():
            return f"ask {_workers(workers)} what it holds"
        case RequestBoundary():
            return "stop at the next boundary"
        case RequestSave():
            return "begin a checkpoint"
        case SaveSnapshot():
            return "write a checkpoint of what is held"
        case Poll(after_step=after_step):
            return f"ask for steps after {after_step}"
        case CheckLinks(spec=spec):
            return f"test the links between {_workers(sorted({one for pair in spec.pairs for one in pair}))}"
        case Probe():
            return f"ask {_workers(workers)} where it is"
        case CollectSave(step=step):
            return f"collect the parts of step {step}"
        case AskFingerprint():
            return "ask for the parts of the fingerprint"
        case SumFingerprint():
            return "sum up the fingerprint"
        case CommitSave(step=step):
            return f"commit the checkpoint of step {step}"
        case DeleteCheckpoints(prefixes=prefixes):
            return f"delete {count(len(prefixes), 'checkpoint')}"
        case Answer(requests=requests, error=error):
            return f"answer {count(len(requests), 'request')}{f': {brief(error)}' if error else ''}"
        case Record(kind=kind):
            return f"record {kind}" if len(workers) == 1 else f"record {kind} {len(workers)} times"
        case End(error=None):
            return "end"
        case End(error=error):
            return f"end with {type(error).__name__}: {brief(str(error))}"


def of_state(state: State) -> str:
    """The state of the run, on one line."""
    parts = [state.phase.value]
    if state.members:
        parts.append(f"generation {state.generation} of {_workers(state.members)}{_as_mesh(state.mesh)}")
    parts.append(f"step {state.step}")
    for what, workers in (
        ("ready besides", state.ready.difference(state.members)),
        ("starting", state.starting),
        ("leaving", state.leaving),
        ("lost", frozenset(state.members).difference(state.ready)),
        ("awaited", state.awaited if state.awaited != frozenset(state.members) else ()),
    ):
        if workers:
            parts.append(f"{what}: {', '.join(map(str, sorted(workers)))}")
    saving = sorted(step for _, step in state.saves)
    if saving:
        parts.append(f"writing the checkpoint of step {', '.join(map(str, saving))}")
    return "; ".join(parts)


def _as_mesh(mesh: Mesh) -> str:
    return "" if (mesh.replicas, mesh.tensor) == (1, 1) else f", {mesh}"


def _workers(workers: Iterable[int]) -> str:
    numbers = [str(worker) for worker in workers]
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
