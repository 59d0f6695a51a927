"""Journal entries as lines of text for display. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from raysharded.display.plain_text import brief, brief_error
from raysharded.display.quantities import count, duration, listing, moment, size, weights_text

_WARNED = (
    *("checkpoint_late", "checkpoint_failed", "checkpoint_skipped", "waiting_for_owner", "waiting_for_workers"),
    *("storage_back", "taken_over", "arithmetic", "gcs_back", "gcs_limit", "reshard_refused", "rewind_refused"),
    *("learning_rate_refused", "mixture_weights_refused", "pause_refused", "resize_refused", "drain_refused"),
)
LOUD = dict.fromkeys(_WARNED, logging.WARNING)
LOUD |= dict.fromkeys(("checkpoints_failing", "storage_failing", "gcs_lost"), logging.ERROR)
"""Level of the log at which a driver also writes these kinds of entries: a person should not miss them."""


_SILENT = "stopped or cut off"
"""End of the reason for a worker that did not answer."""
_OR_NATIVE = ", or native code holds Python's lock (the GIL)"


def step_of(kind: str, fields: Mapping[str, Any], step: int, last: int | None = None) -> int:
    """The step that an entry hits, with `step` the newest finished one before it: for a loss the one in progress.

    The field `step` of a loss is the newest finished one that the driver knew; those of `stuck` and `worker_died` are
    the worker's own. `last`: the run's last step, in which events after it are counted; None: unknown.
    """
    match kind:
        case "worker_lost":
            hit = int(fields.get("step", step)) + 1
        case "stuck" | "worker_died":
            hit = int(fields.get("step", step + 1))
        case _:
            hit = step
    return hit if last is None else min(hit, last)


def incident_text(kind: str, fields: Mapping[str, Any], limit: int = 160) -> str | None:
    """The line to keep for a journal entry; None for entries without one.

    `limit`: characters of an error of the task or of a start, which ends with its remedy.
    """
    get = fields.get
    match kind:
        case "started" if get("resumed_after_step") and get("source") != "memory":
            return f"step {fields['resumed_after_step']}: resuming from its checkpoint"
        case "worker_lost":
            return f"worker {fields['worker']} lost: {brief(fields['reason'])}"  # its step is not known yet
        case "task_error":
            who = f"step {fields['step']}: worker {fields['worker']} on {get('node') or '?'}"
            next_ = "the step is tried again" if fields["retried"] else f"attempt {fields['attempt']} was the last"
            return f"{who} raised {brief_error(fields['error'], limit)}; {next_}"
        case "worker_died":
            return f"step {fields['step']}: worker {fields['worker']} on {get('node') or '?'} {died(fields)}"
        case "repeated_death":
            return f"step {fields['step']}: {brief(fields['reason'], 400)}"
        case "chaos":
            return f"step {fields['step']}: chaos: {injected(fields)} for worker {fields['worker']}"
        case "straggler":
            return f"step {fields['step']}: worker {fields['worker']} on {get('node', '?')} is slow: {slowness(fields)}"
        case "stuck" if "worker" in fields:
            who = f"step {fields['step']}: worker {fields['worker']} on {get('node', '?')}"
            return f"{who}: {brief(fields['reason'])}{_OR_NATIVE if fields['reason'].endswith(_SILENT) else ''}"
        case "stuck":
            return f"step {fields['step']}: {brief(fields['reason'])}"
        case "worker_leaving":
            who, notice = f"step {fields['step']}: worker {fields['worker']}", duration(fields["notice_s"])
            return f"{who} must leave within {notice}: {brief(fields['reason'])}"
        case "worker_refused":
            return f"worker {fields['worker']} on {get('node', '?')} refused: {brief_error(fields['reason'], limit)}"
        case "reshard_refused":
            return f"step {fields['step']}: another mesh refused: {brief(fields['reason'])}"
        case "pause":
            return f"step {fields['step']}: a pause is asked for: the workers stop after this step"
        case "paused":
            return f"step {fields['step']}: paused; {count(len(fields['workers']), 'worker')} keep the state in memory"
        case "resume":
            return f"step {fields['step']}: goes on after {duration(fields['seconds'])} of pause"
        case "resize":
            return f"step {fields['step']}: {_resize_text(fields)}"
        case "drain":
            return (
                f"step {fields['step']}: {count(len(fields['workers']), 'worker')} must leave node {fields['node']} "
                f"within {duration(fields['within_s'])}, and none starts there: it is drained"
            )
        case "pause_refused":
            return f"step {fields['step']}: no pause: {brief(fields['reason'])}"
        case "resize_refused":
            wanted = count(fields["workers"], "worker")
            return f"step {fields['step']}: not resized to {wanted}: {brief(fields['reason'])}"
        case "drain_refused":
            return f"step {fields['step']}: node {fields['node']} is not drained: {brief(fields['reason'])}"
        case "node_avoided":
            return _avoided_text(fields)
        case "links_broken":
            return f"step {fields['step']}: {_links(fields)} do not reach each other"
        case "links_mended":
            return (
                f"step {fields['step']}: {_links(fields)} reach each other again, after {duration(fields['after_s'])}"
            )
        case "generation" if get("excluded") and not (get("only_saves") or get("hands_over")):
            return f"step {fields['step']}: {_excluded_text(fields['excluded'])}"
        case "node_allowed":
            return f"step {fields['step']}: {_node(fields)} is used again: {brief(fields['reason'])}"
        case "node_lost":
            return f"step {fields['step']}: {_node(fields)} is lost: {brief(fields['reason'])}"
        case "node_back":
            return f"step {fields['step']}: {_node(fields)} answers again, after {duration(fields['after_s'])}"
        case "start_failed":
            return f"worker {fields['worker']} did not start: {brief_error(fields['reason'], limit)}"
        case "waiting":
            ready = f"{count(fields['ready'], 'worker')} ready, at least {fields['needed']} needed"
            if get("missing"):
                return f"{ready}. {fields['missing']}"
            return f"{ready}; {'the others' if fields['ready'] else 'they'} take long to start"  # an older version's
        case "below_maximum":
            return f"step {fields['step']}: {below_maximum_text(fields)}"
        case "waiting_for_owner":
            return f"{fields['owner']} may hold the run: waiting {duration(fields['lease_s'])} for a sign of life"
        case "waiting_for_workers":
            workers = count(fields["workers"], "worker")
            unless = "" if fields["sure"] else ", unless their driver gave them another time"
            return (
                f"{workers} of {fields['version']} hold the run without a driver; they are left alone. Waiting for the "
                f"checkpoint that they begin in {duration(fields['wait_s'])}, at {moment(fields['until'])}{unless}"
            )
        case "taken_over" if get("workers"):
            workers = count(len(fields["workers"]), "worker")
            return f"step {fields['step']}: {workers} of the driver before taken over, with what they hold"
        case "orphaned":
            return f"step {fields['step']}: {count(len(fields['workers']), 'worker')} ended without a driver"
        case "preparation_failed":
            return f"step {fields['step']}: the change is made without preparing it: {brief(fields['reason'])}"
        case "recovery":
            return _recovery_text(fields)
        case "step_skipped":
            return f"step {fields['step']}: left out: the {fields['what']} is not finite{_of_microbatches(fields)}"
        case "arithmetic":
            return f"from step {fields['from_step']} on: other bits, as was accepted: {_changes_text(fields)}"
        case "learning_rate":
            rate = f"{fields['factor']:g} times the task's learning rate"
            return f"step {fields['step']}: {rate} from step {fields['from_step']} on, as was asked for"
        case "mixture_weights":
            weights = f"{weights_text(fields['weights'])} as weights of the mixture"
            first = f"from step {fields['from_step']}, sample {fields['from_position']}, on"
            return f"step {fields['step']}: {weights} {first}, as was asked for"
        case "mixture_weights_refused":
            return f"step {fields['step']}: other weights of the mixture refused: {brief(fields['reason'])}"
        case "learning_rate_refused":
            return f"step {fields['step']}: another learning rate refused: {brief(fields['reason'])}"
        case "rewind_refused":
            return f"step {fields['step']}: going back to step {fields['to_step']} refused: {brief(fields['reason'])}"
        case "rewind" if get("who") == "asked":
            past = f", and on past {count(fields['skip_samples'], 'sample')}" if fields["skip_samples"] else ""
            return f"step {fields['step']}: back to step {fields['to_step']}, as was asked for{past}"
        case "rewind":
            return (
                f"step {fields['step']}: not finite: back to step {fields['to_step']}, and on past "
                f"{count(fields['skip_samples'], 'sample')}"
            )
        case "corruption":
            return _corruption_text(fields)
        case "proof_failed":
            return _proof_text(fields)
        case "checkpoint":
            return _checkpoint_text(fields)
        case "checkpoint_late":
            return _late_text(fields)
        case "storage_failing":
            gone = f", and {count(fields['dropped'], 'older one')} had to be dropped" if get("dropped") else ""
            ends = "" if get("left_s") is None else f"; in {duration(fields['left_s'])} the run ends"
            return (
                f"step {fields['step']}: storage has taken no entries of the journal for {duration(fields['for_s'])}"
                f"{gone}{ends}: {brief(fields['error'], 400)}"
            )
        case "storage_back":
            return f"storage takes entries again, after {duration(fields['after_s'])} without"
        case "gcs_lost" | "gcs_back" | "gcs_limit":
            return _gcs_text(kind, fields)
        case "entries_dropped":
            return _dropped_text(fields)
        case "checkpoints_failing":
            newest = f"NO CHECKPOINT SINCE STEP {fields['newest']}" if get("newest") else "NO CHECKPOINT AT ALL"
            return f"step {fields['step']}: {fields['failed']} checkpoints in a row could not be written: {newest}"
        case "checkpoint_failed":
            return f"step {fields['step']}: checkpoint not written: {brief(fields['error'])}"
        case "checkpoint_skipped":
            return f"step {fields['step']}: checkpoint passed over: {brief(fields['reason'])}"
        case "step" if get("evaluation"):
            numbers = ", ".join(f"{name} {float(value):.4f}" for name, value in fields["evaluation"].items())
            return f"step {fields['step']}: evaluation: {numbers}"
        case "finished":
            return f"step {fields['step']}: finished, fingerprint {get('fingerprint') or '?'}"
        case "failed":
            return f"step {fields['step']}: failed"  # the caller gets the reason as an exception
        case "stopped":
            return f"step {fields['step']}: stopped"
    return None


def below_maximum_text(fields: Mapping[str, Any]) -> str:
    """Sentences about a run with fewer workers than it may have, from the fields of its entry `below_maximum`."""
    workers, wanted = int(fields["workers"]), int(fields["wanted"])
    return f"{workers} of at most {wanted} workers: {wanted - workers} more would be taken. {fields['missing']}"


def _dropped_text(fields: Mapping[str, Any]) -> str:
    steps = f", with those of steps {fields['first_step']} to {fields['last_step']}" if fields["steps"] else ""
    return (
        f"{count(fields['entries'], 'entry', 'entries')} of the journal dropped{steps}: storage took none for too long"
    )


def _changes_text(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {before} -> {after}" for name, (before, after) in sorted(fields["changes"].items()))


def _resize_text(fields: Mapping[str, Any]) -> str:
    wanted = f"{count(fields['workers'], 'worker')} wanted from now on, {fields['before']} before"
    leaving = fields["leaving"]
    if not leaving:
        return wanted
    return f"{wanted}; worker{'s' if len(leaving) > 1 else ''} {listing([str(worker) for worker in leaving])} may go"


def _of_microbatches(fields: Mapping[str, Any]) -> str:
    indices = fields["microbatches"]
    name = "microbatch" if len(indices) == 1 else "microbatches"
    return f" ({name} {', '.join(map(str, indices))})" if indices else ""


def _corruption_text(fields: Mapping[str, Any]) -> str:
    culprits = listing([str(worker) for worker in fields["culprits"]])
    return (
        f"step {fields['step']}: WRONG NUMBERS: the audit found another {fields['what']} on worker {culprits}"
        f"{_of_microbatches(fields)}; the newest verified step is {fields['verified_step']}"
    )


def _proof_text(fields: Mapping[str, Any]) -> str:
    node = dict(zip(fields["workers"], fields["nodes"], strict=False))
    culprits = listing([f"{worker} on {node.get(worker, '?')}" for worker in fields["culprits"]])
    return (
        f"step {fields['step']}: WRONG NUMBERS: the proof of a first step found another {fields['what']} on worker "
        f"{culprits}{_of_microbatches(fields)}"
    )


def died(fields: Mapping[str, Any]) -> str:
    """Text on how a worker's process ended, and where in its step."""
    index, phase = fields.get("microbatch"), fields.get("phase")
    where = f" in {phase}" if phase else ""
    where += f", at microbatch {index}" if index is not None else ""
    stderr = fields.get("stderr")
    last = f"; the last line of its stderr: {brief(stderr[-1])}" if stderr else ""
    return f"{fields['cause']}{where}{last}"


def injected(fields: Mapping[str, Any]) -> str:
    """Text for a fault that was injected into a worker."""
    seconds, phase = fields.get("seconds"), fields.get("phase")
    long = f" for {duration(seconds)}" if seconds is not None else ""
    return f"{fields['fault']}{long}{f' in {phase}' if phase else ''}"


def _checkpoint_text(fields: Mapping[str, Any]) -> str:
    what = f"step {fields['step']}: checkpoint committed, fingerprint {fields.get('fingerprint') or '?'}"
    if "bytes" not in fields:
        return what
    return f"{what}, {size(fields['bytes'])} in {duration(fields['seconds'])}"


def _gcs_text(kind: str, fields: Mapping[str, Any]) -> str:
    match kind:
        case "gcs_lost":
            return (
                f"step {fields['step']}: the Ray cluster's GCS has not answered for {duration(fields['for_s'])}: the "
                f"run trains on, and ends with a checkpoint before Ray ends it, in {duration(fields['left_s'])}"
            )
        case "gcs_back":
            return f"step {fields['step']}: the Ray cluster's GCS answers again, after {duration(fields['after_s'])}"
    writes = f", a checkpoint takes {duration(fields['write_s'])}" if fields["write_s"] else ""
    return (
        f"step {fields['step']}: Ray ends its processes {duration(fields['limit_s'])} after its GCS is lost{writes}: a "
        f"last checkpoint needs {duration(fields['needed_s'])}. Set {fields['setting']} higher for all its processes"
    )


def _avoided_text(fields: Mapping[str, Any]) -> str:
    reasons = fields["reasons"]
    return (
        f"step {fields['step']}: {_node(fields)} is avoided after "
        f"{count(fields['failures'], 'failure')}; the last: {brief(reasons[-1]) if reasons else '?'}"
    )


def _links(fields: Mapping[str, Any]) -> str:
    """The nodes at the two ends of links; their workers, if it is one pair of nodes."""
    pairs, nodes = fields["pairs"], fields["nodes"]
    if len(nodes) > 1:
        return f"pairs of nodes: {'; '.join(' and '.join(pair) for pair in nodes)}:"
    ends = [", ".join(map(str, sorted({pair[end] for pair in pairs}))) for end in (0, 1)]
    return " and ".join(f"{node} (worker {workers})" for node, workers in zip(nodes[0], ends, strict=True))


def _excluded_text(workers: Sequence[int]) -> str:
    who, does = ("workers", "do") if len(workers) > 1 else ("worker", "does")
    return f"continues without {who} {listing([str(worker) for worker in workers])}, which {does} not reach all others"


def _node(fields: Mapping[str, Any]) -> str:
    return f"node {fields.get('host') or '?'} ({fields['node'][:8]})"


def _late_text(fields: Mapping[str, Any]) -> str:
    text = f"step {fields['step']}: checkpoint left out: "
    if "writing" not in fields:
        return f"{text}the one before is still being written"
    return f"{text}that of step {fields['writing']} is being written since {duration(fields['since_s'])}"


def slowness(fields: Mapping[str, Any]) -> str:
    """Text on how slow a straggler is, and in which phase."""
    lost = duration(float(fields["lost_s"]))
    return f"{fields['score']:.2f} times as long per step as its peers, {lost} more, mostly in {fields['phase']}"


def _recovery_text(fields: Mapping[str, Any]) -> str:
    again = count(int(fields["steps_redone"]), "step")
    waited = f"waited for workers {duration(fields['wait_s'])}, " if fields.get("wait_s") else ""
    return (
        f"step {int(fields['resumed_after_step']) + 1}: recovered in {duration(fields['total_s'])}, "
        f"{fields['workers_before']} to {count(fields['workers_after'], 'worker')}: aborted "
        f"{duration(fields['abort_s'])}, {waited}resharded {duration(fields['reshard_s'])}, first step "
        f"{duration(fields['first_step_s'])}; {again} computed again, state from {fields['source']}"
    )
