"""The names in a recording, which stay when classes and fields of the code are renamed. Pure.

Recordings of both formats are read by these names. To rename an event or a worker's message, keep its old name in
`NAMES`. To rename a field of these or of the state, add its recorded name to `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raysharded.driver.state import events
from raysharded.driver.state.state import State
from raysharded.protocol import link_messages, messages
from raysharded.protocol.death import DeathExplained
from raysharded.protocol.worker_launcher import LeaveNotice, NodeBack, NodeLost, WorkerLost

FORMAT = 3
"""Format of the recordings that are written."""
OLDER = 2
"""Format that named classes and fields as the code of raysharded 0.1 did."""

NAMES: Mapping[type, tuple[str, str]] = {
    events.Ready: ("Ready", "worker_ready"),
    WorkerLost: ("Lost", "worker_lost"),
    DeathExplained: ("Explained", "death_explained"),
    LeaveNotice: ("Noticed", "leave_notice"),
    NodeLost: ("NodeLost", "node_lost"),
    NodeBack: ("NodeBack", "node_back"),
    events.WorkerReply: ("Said", "worker_reply"),
    events.Committed: ("Committed", "checkpoint_committed"),
    events.CommitFailed: ("CommitFailed", "commit_failed"),
    events.Overtaken: ("Overtaken", "commit_overtaken"),
    events.LeadershipLost: ("Disowned", "leadership_lost"),
    events.Fingerprinted: ("Fingerprinted", "state_fingerprinted"),
    events.CheckpointRequested: ("CheckpointRequested", "checkpoint_requested"),
    events.StopRequested: ("StopRequested", "stop_requested"),
    events.ReshardRequested: ("ReshardRequested", "reshard_requested"),
    events.LearningRateRequested: ("LearningRateRequested", "learning_rate_requested"),
    events.MixtureWeightsRequested: ("MixtureWeightsRequested", "mixture_weights_requested"),
    events.RewindRequested: ("RewindRequested", "rewind_requested"),
    events.Recorded: ("Recorded", "overrides_recorded"),
    events.Deleted: ("Deleted", "checkpoints_deleted"),
    events.PauseRequested: ("PauseRequested", "pause_requested"),
    events.ResumeRequested: ("ResumeRequested", "resume_requested"),
    events.ResizeRequested: ("ResizeRequested", "resize_requested"),
    events.DrainRequested: ("DrainRequested", "drain_requested"),
    events.Annotation: ("Remark", "annotation"),
    events.Tick: ("Tick", "tick"),
    messages.GenerationReady: ("Formed", "generation_ready"),
    messages.Prepared: ("Prepared", "generation_prepared"),
    messages.Stopped: ("Stopped", "generation_stopped"),
    messages.Progress: ("Progress", "progress"),
    messages.ProbeReply: ("Seen", "probe_reply"),
    messages.Saved: ("Saved", "part_saved"),
    link_messages.LinkReport: ("LinkReport", "link_report"),
}
"""Class -> its name in formats 2 and 3."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one format."""

    classes: Mapping[type, str]
    fields: Mapping[type, Mapping[str, str]] = field(default_factory=dict)
    """Class -> current field name -> recorded field name, where they differ."""


FORMATS: Mapping[object, Names] = {
    OLDER: Names(
        {cls: older for cls, (older, _) in NAMES.items()},
        {
            State: {
                "terminating_nodes": "doomed",
                "step_times": "paces",
                "rolled_back": "undone",
                "invalidated_up_to": "distrusted",
                "invalidated_after": "distrusted_after",
            }
        },
    ),
    FORMAT: Names({cls: name for cls, (_, name) in NAMES.items()}),
}
"""Format -> its names."""
