"""A run driven event by event: a test passes events to the machine, and checks its commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from raysharded.driver import machine
from raysharded.driver.state.commands import CheckLinks, Command, End, Form, Probe, Record
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.events import Committed, Event, Ready, Tick, WorkerReply
from raysharded.driver.state.state import Checkpointed, State
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Held, has_mirrors, mirror_of
from raysharded.protocol.link_messages import LinkCheck, LinkReport
from raysharded.protocol.messages import (
    GenerationReady,
    GenerationSpec,
    ProbeReply,
    Progress,
    Saved,
    Stopped,
    StopReason,
    WorkerInfo,
    save_prefix,
)
from raysharded.protocol.worker_launcher import WorkerLost
from tests.driver.simulated_workers import SPEC, report_of

LIMITS = DriverConfig(
    min_workers=2,
    max_workers=3,
    max_steps=10,
    exact=True,
    mirrors=True,
    save_at_end=True,
    start_timeout_s=120.0,
    replacement_wait_s=0.0,
    max_worker_losses=None,
    task_error_retries=1,
    progress_timeout_s=300.0,
)
C = TypeVar("C")


class Run:
    """The state of one run and all commands so far; every method is something that happens."""

    def __init__(
        self,
        *,
        checkpoint: Checkpointed | None = None,
        generation: int = 0,
        resumed: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        """`resumed`: fields of the state that a driver has when it resumes from a checkpoint."""
        self.at = 0.0
        self.state = State(
            limits=replace(LIMITS, **limits),
            rendezvous=("host", 1, "run"),
            checkpoint=checkpoint,
            generation=GenerationId(generation),
            **(resumed or {}),
        )
        self.initial = self.state
        self.log: list[tuple[Event, float]] = []
        """The events, with their times."""
        self.commands: list[Command] = []
        self.says: GenerationId | None = None
        """The generation in the members' messages; None: the current one."""
        self.waiting: frozenset[int] = frozenset()
        """Members that answer a probe with waiting for others; all others answer that they compute."""
        self.mute: frozenset[int] = frozenset()
        self.in_collective: Mapping[int, bool] = {}
        """Members of which it is known whether their GPU is in a collective."""
        """Members that do not answer the liveness probe."""
        self.apart: set[frozenset[int]] = set()
        """Pairs of workers that do not reach each other, as they report when they are to test their links."""
        self.tests_answered = True
        self._follow(machine.begin(self.state, self.at))

    def _follow(self, outcome: tuple[State, list[Command]]) -> list[Command]:
        self.state, commands = outcome
        self.commands += commands
        return commands

    def hear(self, event: Event) -> list[Command]:
        self.log.append((event, self.at))
        commands = self._follow(machine.step(self.state, event, self.at))
        for asked in of(commands, CheckLinks) if self.tests_answered else []:
            commands = [*commands, *self.tested(asked.spec)]
        return commands

    def tested(self, spec: LinkCheck) -> list[Command]:
        """All workers report on their links."""
        commands: list[Command] = []
        for worker in sorted({worker for pair in spec.pairs for worker in pair}):
            peers = {peer for pair in spec.pairs if worker in pair for peer in pair} - {worker}
            failed = tuple(sorted(peer for peer in peers if frozenset((worker, peer)) in self.apart))
            report = LinkReport(number=spec.number, failed=failed)
            commands += self.hear(WorkerReply(worker=worker, message=report))
        return commands

    @property
    def spoken_of(self) -> GenerationId:
        return self.says or self.state.generation

    # -- events --

    def wait(self, seconds: float) -> list[Command]:
        """Time passes, for a driver that receives nothing else."""
        commands: list[Command] = []
        end = self.at + seconds
        while self.at < end:
            self.at = min(self.at + 0.25, end)
            heard = self.hear(Tick())
            commands += heard
            for asked in heard:
                if isinstance(asked, Probe) and asked.worker not in self.mute:
                    commands += self.hear(WorkerReply(worker=asked.worker, message=self.seen(asked.worker)))
        return commands

    def seen(self, worker: WorkerId) -> ProbeReply:
        """A member's answer to the probe."""
        return ProbeReply(
            generation=self.spoken_of,
            step=self.state.step,
            phase="forward" if worker in self.waiting else "data",
            phase_s=3.0,
            waits=worker in self.waiting,
            stack="the stack",
            where="train.py:7 in read",
            in_collective=self.in_collective.get(worker),
        )

    def ready(
        self,
        *workers: int,
        cpu: str = "x",
        numerics: str = "",
        nodes: Mapping[WorkerId, str] | None = None,
        contents: str = "",
    ) -> list[Command]:
        """These workers are ready, on machines with this CPU; `numerics`: the rules that they can compute under.
        `nodes`: where several share a machine. `contents`: of their data."""
        commands: list[Command] = []
        for worker in workers:
            facts = WorkerInfo(
                pid=worker,
                node=f"node{worker}",
                node_id=(nodes or {}).get(WorkerId(worker), f"node{worker}"),
                arithmetic={"cpu": cpu, **({"numerics": numerics} if numerics else {})},
                num_samples=100,
                contents=contents,
            )
            commands += self.hear(Ready(worker=WorkerId(worker), facts=facts))
        return commands

    def lost(self, worker: int, error: BaseException | None = None) -> list[Command]:
        return self.hear(WorkerLost(worker=WorkerId(worker), reason="its process died", error=error))

    def formed(self, *workers: int) -> list[Command]:
        """These (or all) members report that they formed the current generation."""
        commands: list[Command] = []
        for worker in workers or self.state.members:
            formed = GenerationReady(
                generation=self.spoken_of,
                step=self.state.step,
                spec=SPEC,
                seconds={},
                bytes_received=0,
                bytes_read=0,
            )
            commands += self.hear(WorkerReply(worker=WorkerId(worker), message=formed))
        return commands

    def trained(self, *steps: int, saves: bool = False, asked: bool = False, late: bool = False) -> list[Command]:
        """The first member reports these steps: whether it saves them, on request, or is late."""
        spec = self.newest_form()
        reports = tuple(
            report_of(spec, step, self.at, save_started=saves or asked, save_asked=asked, save_late=late)
            for step in steps
        )
        progress = Progress(generation=self.spoken_of, reports=reports)
        return self.hear(WorkerReply(worker=self.state.members[0], message=progress))

    def stopped(
        self,
        worker: int,
        reason: StopReason,
        step: int,
        *,
        held: Sequence[Held] | None = None,
        reports: Sequence[int] = (),
        saves: bool = False,
        error: Exception | None = None,
    ) -> list[Command]:
        """A member stops after `step`; it holds that step if its mirror has arrived."""
        mine = self.holding(worker, step) if held is None else held
        stopped = Stopped(
            generation=self.spoken_of,
            reason=reason,
            step=step,
            phase="backward",
            stopped_at=self.at,
            held=tuple(mine),
            specs={one.step: SPEC for one in mine},
            reports=tuple(report_of(self.newest_form(), done, self.at, save_started=saves) for done in reports),
            error=error,
        )
        return self.hear(WorkerReply(worker=WorkerId(worker), message=stopped))

    def holding(self, worker: int, step: int) -> list[Held]:
        """The shards that a member holds between steps: its own, and a mirror where there are no replicas."""
        mesh = self.state.mesh
        shard = mesh.shard_of(self.state.members.index(WorkerId(worker)))
        own = Held(
            worker=WorkerId(worker),
            step=step,
            medium="snapshot",
            world_size=mesh.shards,
            rank=shard,
            layout_id=self.state.generation,
            tensor=mesh.tensor,
        )
        if not has_mirrors(mesh):
            return [own]
        return [own, replace(own, medium="mirror", rank=mirror_of(shard, mesh.shards, mesh.apart))]

    def saved(self, worker: int, step: int, *, error: str | None = None, unknown: bool = False) -> list[Command]:
        saved = Saved(
            generation=self.spoken_of, step=step, spec=SPEC, error=error, unknown=unknown, seconds=2.0, retries=1
        )
        return self.hear(WorkerReply(worker=WorkerId(worker), message=saved))

    def all_saved(self, step: int) -> list[Command]:
        return [command for member in self.state.members for command in self.saved(member, step)]

    def committed(self, step: int) -> list[Command]:
        """The save of a step by the current generation is committed."""
        return self.hear(committed(step, self.spoken_of))

    # -- requests --

    def all(self, kind: type[C]) -> list[C]:
        return [command for command in self.commands if isinstance(command, kind)]

    def newest_form(self) -> GenerationSpec:
        return self.all(Form)[-1].spec

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [dict(record.fields) for record in self.all(Record) if record.kind == kind]

    def with_nodes(self, nodes: dict[int, str]) -> State:
        """The state with its workers on these machines."""
        facts = {
            worker: replace(facts, node=nodes[worker], node_id=nodes[worker])
            for worker, facts in self.state.facts.items()
        }
        return replace(self.state, facts=facts)

    def with_devices(self, devices: dict[int, str]) -> State:
        """The state with some of its workers on these GPUs."""
        moved = {worker: replace(self.state.facts[WorkerId(worker)], device=gpu) for worker, gpu in devices.items()}
        return replace(self.state, facts={**self.state.facts, **{WorkerId(one): facts for one, facts in moved.items()}})

    def error_or_none(self) -> BaseException | None:
        """As `error`; None, too, if the run continues."""
        return self.error if self.all(End) else None

    @property
    def error(self) -> BaseException | None:
        """The error that the run ended with; AssertionError if it did not end."""
        (end,) = self.all(End)
        return end.error


def committed(step: int, generation: int = 1) -> Committed:
    prefix = save_prefix(step, GenerationId(generation))
    return Committed(
        generation=GenerationId(generation),
        step=step,
        prefix=prefix,
        digest=f"digest {step}",
        fingerprint=f"state {step}",
        retries=1,
    )


def training(size: int = 3, step: int = 0, **limits: Any) -> Run:
    """A run whose workers 0, 1, ... train; `step` steps are done."""
    run = Run(max_workers=size, **limits)
    run.ready(*range(size))
    run.formed()
    if step:
        run.trained(*range(1, step + 1))
    return run


def of(commands: Sequence[Command], kind: type[C]) -> list[C]:
    """The commands of a kind."""
    return [command for command in commands if isinstance(command, kind)]
