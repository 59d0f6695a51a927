"""The canonical view of the driver's messages, orders and state, by names that stay when the code's are changed.

Frozen histories are compared by it. A command or an event is a tuple of strings and numbers, a state a flat dict.
Neither depends on the order of a set, on a hash seed, or on which objects are the same; a float has all of its digits.
A change of the name of a class, a field or a module changes `NAMES` here, and no history; a new one gets a name here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, TypeAlias

import numpy as np

from raysharded import layout, numerics, overrides
from raysharded.driver.state import (
    broken_links,
    commands,
    driver_config,
    events,
    mesh_choice,
    node_health,
    state,
    step_watch,
    stragglers,
)
from raysharded.protocol import link_messages, messages
from raysharded.protocol.death import Death, DeathExplained
from raysharded.protocol.worker_launcher import LeaveNotice, NodeBack, NodeLost, WorkerLost

Value: TypeAlias = "str | int | float | bool | None"
View: TypeAlias = tuple[Value, ...]
"""View of a command or an event: its canonical name, then the path and the value of every part of it."""
Flat: TypeAlias = dict[str, Value]
"""Path -> value."""

_NEVER = object()
GONE = "(gone)"
"""In the changes of a state: nothing is at this path any more."""


@dataclass(frozen=True, slots=True)
class Names:
    """The canonical name of a class, and of its fields in their order."""

    name: str
    fields: str = ""
    """Canonical names with spaces between them; `today=canonical` where the code has another name."""
    later: Mapping[str, object] = field(default_factory=dict)
    """Fields that the recorded histories do not have, by their canonical name -> the value with which nothing differs
    from the time before the field: a view does not show it then, and no history has to be recorded again."""
    numbered: frozenset[str] = frozenset()
    """Digests of files, whose bytes are no decision: the first one becomes 1, the next other one 2."""

    def by_field(self) -> dict[str, str]:
        """Today's name of each field -> its canonical one."""
        return by_today(self.fields)


def by_today(names: str) -> dict[str, str]:
    """Today's name -> the canonical one, from names with spaces between them."""
    pairs = (one.partition("=") for one in names.split())
    return {today: canonical or today for today, _, canonical in pairs}


RULES_AT_FIRST = numerics.kept("")
"""Rules of a simulated run, which begins without rules: a higher number is no other decision."""

LATER_IN_ENTRIES: Mapping[str, Mapping[str, object]] = {"started": {"numerics": RULES_AT_FIRST, "cast_inputs": "all"}}
"""Later fields of journal entries, by their kind, as in `Names.later`."""

NAMES: Mapping[type, Names] = {
    # -- events --
    events.Ready: Names("ready", "worker facts"),
    WorkerLost: Names("lost", "worker reason error node_id node_died"),
    DeathExplained: Names("explained", "worker death"),
    Death: Names(
        "death",
        "status signal out_of_memory from_outside generation step phase microbatch samples stderr stderr_file gpu "
        "gpu_is_broken",
        later={"gpu": (), "gpu_is_broken": False},
    ),
    LeaveNotice: Names("noticed", "workers reason within_s whole_node"),
    NodeLost: Names("node_lost", "node_id host reason"),
    NodeBack: Names("node_back", "node_id host"),
    events.WorkerReply: Names("said", "worker message"),
    events.Committed: Names(
        "committed",
        "generation step prefix digest fingerprint retries",
    ),
    events.CommitFailed: Names("commit_failed", "generation step error"),
    events.Overtaken: Names("overtaken", "generation step reason"),
    events.LeadershipLost: Names("disowned", "reason"),
    events.Fingerprinted: Names("fingerprinted", "fingerprint"),
    events.CheckpointRequested: Names("checkpoint_requested", "request"),
    events.StopRequested: Names("stop_requested", "checkpoint_within_s"),
    events.ReshardRequested: Names("reshard_requested", "grouping"),
    events.LearningRateRequested: Names("learning_rate_requested", "factor"),
    events.MixtureWeightsRequested: Names("mixture_weights_requested", "weights"),
    events.RewindRequested: Names("rewind_requested", "step skip_data"),
    events.Recorded: Names("recorded", "generation"),
    events.Deleted: Names("deleted", "prefixes parents"),
    events.PauseRequested: Names("pause_requested"),
    events.ResumeRequested: Names("resume_requested"),
    events.ResizeRequested: Names("resize_requested", "workers"),
    events.DrainRequested: Names("drain_requested", "node within_s"),
    events.Annotation: Names("remark", "kind fields"),
    events.Tick: Names("tick"),
    # -- commands --
    commands.StartWorker: Names("start_worker", "worker avoid"),
    commands.KillWorker: Names("kill_worker", "worker at_once"),
    commands.Form: Names("form", "spec"),
    commands.Prepare: Names("prepare", "spec"),
    commands.Train: Names("train", "generation members rest"),
    commands.Interrupt: Names("interrupt", "worker generation"),
    commands.AskReport: Names("ask_report", "worker generation"),
    commands.RequestBoundary: Names("request_boundary", "worker generation"),
    commands.RequestSave: Names("request_save", "worker generation"),
    commands.CheckLinks: Names("check_links", "spec"),
    commands.SaveSnapshot: Names("save_held", "generation members"),
    commands.Poll: Names("poll", "worker generation after_step"),
    commands.Probe: Names("look", "worker generation"),
    commands.CollectSave: Names("collect_save", "generation step members"),
    commands.AskFingerprint: Names("ask_fingerprint", "generation members"),
    commands.SumFingerprint: Names("sum_fingerprint", "parts"),
    commands.CommitSave: Names("commit_save", "generation step parts measured"),
    commands.DeleteCheckpoints: Names("distrust", "prefixes"),
    commands.Answer: Names("answer", "requests step prefix error"),
    commands.Record: Names("record", "kind fields durable awaited_by"),
    commands.End: Names("end", "error"),
    # -- state --
    state.State: Names(
        "state",
        "limits phase since generation members replicas tensor apart spec ready starting leaving "
        "terminating_nodes=doomed preemptions last_ready_at next_worker awaited stops holdings step watch "
        "step_times=paces measured_step measured generation_start_step has_trained source bytes_received "
        "bytes_read facts nodes arithmetic boundary_requested resharding preparation num_preparations checkpoint "
        "older_checkpoints saves newest_save asked failed_saves last_save_failures last_save_at incident losses "
        "losses_without_step losing_step losing_generation first_loss first_loss_without_step start_failures "
        "first_start_failure start_after task_errors first_task_error failing_step idle_generations first_idle "
        "skipped_steps first_skip decisions reached changes_asked wanted_rate wanted_rewind plan unrecorded "
        "rolled_back=undone rewound invalidated_up_to=distrusted invalidated_after=distrusted_after verified_step "
        "corrupted num_samples driver rendezvous result_fingerprint pause stop_requested stop_by arithmetic_unmet "
        "differing numerics proven build_seed save_began_at save_requested_in given_up "
        "ending failed_at failed_worker deaths links relayed blocks leavers_save_s wanted_weights "
        "device_failures contents start_failed_at failed_starts unconfirmed_saves",
        later={
            "start_failed_at": 0.0,
            "failed_starts": {},
            "unconfirmed_saves": (),
            "contents": "",
            "wanted_weights": None,
            "leavers_save_s": None,
            "device_failures": {},
            "blocks": (1, 1),
            "links": broken_links.Links(),
            "relayed": False,
            "arithmetic_unmet": False,
            "differing": {},
            "numerics": RULES_AT_FIRST,
            "proven": frozenset(),
            "build_seed": 0,
            "save_began_at": None,
            "save_requested_in": None,
            "given_up": None,
            "ending": None,
            "failed_at": (),
            "failed_worker": None,
            "deaths": (),
        },
    ),
    # -- their parts --
    driver_config.DriverConfig: Names(
        "limits",
        "min_workers max_workers max_steps exact mirrors save_at_end start_timeout_s replacement_wait_s "
        "max_worker_losses task_error_retries progress_timeout_s rewind max_skipped_steps parity "
        "global_batch_size stop_timeout_s form_timeout_s hang_timeout_s forming_patience_s "
        "stopping_patience_s evict_slower_than look_around_s compiles prepare_within_s join_wait_s "
        "save_timeout_s max_failed_saves stop_on_failed_saves last_save_retries spares grouping "
        "last_save_backoff_s max_start_failures start_backoff_s max_start_backoff_s max_idle_generations "
        "max_node_failures configured_workers max_losses_without_step accept_arithmetic "
        "proves_first_step save_every_s audits max_same_deaths node_failure_window_s link_pause_s save_every_steps",
        later={
            "save_every_steps": None,
            "audits": True,
            "max_same_deaths": None,
            "node_failure_window_s": 3600.0,
            "link_pause_s": 30.0,
            "accept_arithmetic": False,
            "proves_first_step": False,
            "save_every_s": None,
        },
    ),
    state.Checkpointed: Names("checkpointed", "step prefix fingerprint digest url", numbered=frozenset({"digest"})),
    state.Saving: Names(
        "saving",
        "generation step members since measured answers parts committing fingerprint_only repeats",
        later={"repeats": False},
    ),
    state.GivenUpSave: Names("given_up_save", "generation step again_at failures"),
    state.Incident: Names(
        "incident",
        "found_at lost reasons workers_before step_before stopped_at decided_at formed_at source resume_step",
        later={"decided_at": None},
    ),
    state.OwnDeath: Names("own_death", "worker generation step phase cause microbatch node_id"),
    state.Departure: Names("departure", "reason since by step saves_last", later={"saves_last": False}),
    state.Preparation: Names("preparation", "members mesh prefix since by ready staying grouping awaited failed"),
    state.Rewinding: Names("rewinding", "checkpoint skip_data number"),
    state.WantedRate: Names("wanted_rate", "factor number"),
    state.WantedWeights: Names("wanted_weights", "weights number"),
    state.PendingOverrides: Names("plan", "decisions answers rate rewind weights", later={"weights": None}),
    state.Pause: Names("pause", "asked_at reached_at tried"),
    step_watch.StepWatch: Names(
        "watch", "durations asked_at again listened seen waited excused_at", later={"waited": frozenset()}
    ),
    stragglers.StepTimes: Names("paces", "asked_at asking answers slow newest"),
    node_health.NodeRecord: Names(
        "node_record",
        "host failures reasons dead avoided drained failed_at lost_at",
        later={"failed_at": (), "lost_at": 0.0},
    ),
    mesh_choice.Grouping: Names("grouping", "shards least_shards num_microbatches tensor least_workers step_s fits"),
    overrides.Decisions: Names("decisions", "skips rates weights", later={"weights": ()}),
    messages.GenerationSpec: Names(
        "generation_spec",
        "generation members source host port prefix driver decisions replicas tensor apart nodes prepared attempt "
        "numerics newcomers build_seed secret shift blocks failed_devices",
        later={
            "numerics": RULES_AT_FIRST,
            "newcomers": (),
            "build_seed": 0,
            "secret": b"",
            "shift": (0, 0),
            "blocks": (1, 1),
            "failed_devices": (),
        },
    ),
    messages.FromMemory: Names("from_memory", "step spec copies rebuilds"),
    messages.FromCheckpoint: Names("from_checkpoint", "step prefix digest url", numbered=frozenset({"digest"})),
    messages.FromStart: Names("from_start", "step"),
    messages.WorkerInfo: Names(
        "facts",
        "pid node arithmetic num_samples node_id started start_cpu_s device mailbox samples_per_block open_files "
        "mixture contents",
        later={"contents": "", "mixture": "", "device": "", "mailbox": "", "samples_per_block": 1, "open_files": None},
    ),
    messages.GenerationReady: Names("formed", "generation step spec seconds bytes_received bytes_read"),
    messages.Prepared: Names("prepared", "prefix error"),
    messages.Stopped: Names("stopped", "generation reason step phase stopped_at held specs reports error corruption"),
    messages.Progress: Names("progress", "generation reports"),
    messages.ProbeReply: Names(
        "seen",
        "generation step phase phase_s waits stack where in_collective busy num_steps",
        later={"in_collective": None},
    ),
    link_messages.LinkCheck: Names("link_check", "number pairs host port prefix secret", later={"secret": b""}),
    link_messages.LinkReport: Names("link_report", "number failed"),
    broken_links.Links: Names("links", "broken test num_tests tested"),
    broken_links.BrokenLink: Names("broken_link", "pair since tests next_at"),
    broken_links.LinkTest: Names("link_test", "number asked_at generation pairs awaited failed"),
    messages.Saved: Names(
        "saved",
        "generation step files fingerprint spec registered error unknown seconds retries",
        later={"registered": ""},
    ),
    messages.StepReport: Names(
        "step_report",
        "generation step world_size loss weight metrics evaluation gradient_norm lr read_digest num_reads "
        "seconds finished_at save_started save_asked save_late skipped audit_s remarks gpu microbatches",
        later={"remarks": (), "gpu": {}, "microbatches": ()},
    ),
    messages.NonFinite: Names("non_finite", "what loss microbatches"),
    messages.Corruption: Names(
        "corruption",
        "step what culprits workers microbatches by_proof takes_back",
        later={"by_proof": False, "takes_back": True},
    ),
    layout.Mesh: Names("mesh", "replicas shards tensor apart"),
    layout.Parity: Names("parity", "k m tensor apart", later={"apart": 1}),
    layout.Copy: Names("copy", "medium world_size holders tensor layout_id"),
    layout.Held: Names("held", "worker step medium world_size rank layout_id parity tensor"),
    layout.Rebuild: Names("rebuild", "layout_id world_size parity holders keepers lost tensor"),
}
"""Names of every class that events, commands and states are made of."""

ENUMS: Mapping[type[Enum], str] = {
    state.Phase: "GATHERING FORMING TRAINING STOPPING PAUSED CLOSING OVER",
    messages.StopReason: "FINISHED BOUNDARY ABORTED TASK_ERROR CORRUPT REFUSED DEVICE",
}
"""Canonical names of the members, as for fields."""


class Memo:
    """The rendered values of one history: frozen values are shared, and each is rendered once."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[object, str]] = {}
        """By the id of a value: the value, which must stay alive meanwhile, and its text."""
        self.numbers: dict[str, int] = {}
        """Numbers of the digests that `Names.numbered` names."""


def command_view(command: commands.Command, memo: Memo | None = None) -> View:
    """A command's name, and the path and the value of all of its parts."""
    return _view(command, memo or Memo())


def event_view(event: events.Event | None, memo: Memo | None = None) -> View:
    """An event's view, like a command's; None stands for the driver's start."""
    return ("begin",) if event is None else _view(event, memo or Memo())


def state_view(state: state.State, memo: Memo | None = None) -> Flat:
    """All parts of a state."""
    return StateView(memo or Memo()).changes(state)


class StateView:
    """Follows one driver's state, and renders only the objects that have changed."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._state: object = None
        self._values: tuple[object, ...] = (_NEVER,) * len(_STATE)
        self._flats: list[Flat] = [{} for _ in _STATE]

    def changes(self, state: state.State) -> Flat:
        """The changed parts, by path, in the order of the paths; all of them the first time."""
        if state is self._state:
            return {}
        self._state, before, self._values = state, self._values, _values_of_state(state)
        found: Flat = {}
        for number in compress(range(len(_STATE)), map(is_not, before, self._values)):
            old, new = self._flats[number], dict[str, Value]()
            _flatten(_STATE[number], self._values[number], new, self._memo)
            self._flats[number] = new
            found |= dict.fromkeys(old.keys() - new.keys(), GONE)
            for path, one in new.items():
                if path not in old or (old[path] is not one and repr(old[path]) != repr(one)):
                    found[path] = one
        return dict(sorted(found.items()))


# -- values --

_PLAIN = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True, slots=True)
class _Part:
    """One field of a class."""

    today: str
    name: str
    unset: object
    numbered: bool

    def shows(self, value: object) -> bool:
        return self.unset is _NEVER or value != self.unset


def _parts_of(cls: type) -> list[_Part]:
    names = NAMES[cls]
    return [
        _Part(today, name, names.later.get(name, _NEVER), name in names.numbered)
        for today, name in names.by_field().items()
    ]


_PARTS = {cls: _parts_of(cls) for cls in NAMES}
_STATE = _PARTS[state.State]
_values_of_state = attrgetter(*(part.today for part in _STATE))
_MEMBERS = {cls: by_today(members) for cls, members in ENUMS.items()}


def _view(value: object, memo: Memo) -> View:
    if isinstance(value, commands.Record) and value.kind in LATER_IN_ENTRIES:
        later = LATER_IN_ENTRIES[value.kind]
        known = {name: one for name, one in value.fields.items() if name not in later or later[name] != one}
        value = replace(value, fields=known)
    flat: Flat = {}
    for part in _PARTS[type(value)]:
        _flatten(part, getattr(value, part.today), flat, memo)
    return (NAMES[type(value)].name, *(one for pair in flat.items() for one in pair))


def _flatten(part: _Part, value: object, into: Flat, memo: Memo) -> None:
    """A field of a class that has a view: its parts have separate paths, and are text from there on."""
    if not part.shows(value):
        return
    name, cls = part.name, type(value)
    if cls in _PARTS:
        into[name] = NAMES[cls].name
        for one in _PARTS[cls]:
            inner = getattr(value, one.today)
            if one.shows(inner):
                into[f"{name}.{one.name}"] = _value(inner, memo, one)
    elif isinstance(value, Mapping) and value:
        for key, inner in _in_order(value):
            into[f"{name}[{_text(key, memo)}]"] = _value(inner, memo)
    else:
        into[name] = _value(value, memo, part)


def _value(value: object, memo: Memo, part: _Part | None = None) -> Value:
    if part is not None and part.numbered and isinstance(value, str):
        return memo.numbers.setdefault(value, len(memo.numbers) + 1)
    if type(value) in _PLAIN:
        return value  # type: ignore[return-value]  # one of these
    if isinstance(value, np.generic):
        return _value(value.item(), memo)
    return _text(value, memo)


def _text(value: object, memo: Memo) -> str:
    """One text for equal values."""
    cls = type(value)
    if cls in _PLAIN:
        return repr(value)
    if cls is tuple:
        return f"[{', '.join([_text(one, memo) for one in value])}]"  # type: ignore[attr-defined]
    if cls in _PARTS or cls is layout.StateSpec:
        known = memo.texts.get(id(value))
        if known is None:
            known = memo.texts[id(value)] = (value, _text_of_object(value, memo))
        return known[1]
    match value:
        case np.generic():
            return repr(value.item())
        case Enum():
            return _MEMBERS[type(value)][value.name]
        case Mapping():
            return f"{{{', '.join(f'{_text(key, memo)}: {_text(one, memo)}' for key, one in _in_order(value))}}}"
        case set() | frozenset():
            return f"{{{', '.join(_text(one, memo) for one in sorted(value, key=_rank))}}}"
        case list():
            return f"[{', '.join(_text(one, memo) for one in value)}]"
        case np.ndarray():
            return _text(value.tolist(), memo)
        case BaseException():  # their classes are public, or the user's
            return f"{cls.__name__}({str(value)!r})"
    raise TypeError(f"{cls.__module__}.{cls.__qualname__} has no canonical view; name it in {__name__}.NAMES")


def _text_of_object(value: object, memo: Memo) -> str:
    if isinstance(value, layout.StateSpec):  # long, and always the same
        rows = json.dumps(value.to_rows())
        return f"spec({blake2b(rows.encode(), digest_size=4).hexdigest()})"
    shown = [(part, getattr(value, part.today)) for part in _PARTS[type(value)]]
    inner = [f"{part.name}={_part_text(one, memo, part)}" for part, one in shown if part.shows(one)]
    return f"{NAMES[type(value)].name}({', '.join(inner)})"


def _part_text(value: object, memo: Memo, part: _Part) -> str:
    return repr(_value(value, memo, part)) if part.numbered else _text(value, memo)


def _in_order(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return sorted(mapping.items(), key=lambda item: _rank(item[0]))


def _rank(value: Any) -> tuple[str, Any]:
    """A sort key for values whose types have no order between them."""
    return type(value).__name__, value
