"""Cause of the death of a worker's process, from its machine. Imports little: agents need it."""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.ids import WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The end of a worker's process, as its machine reports it."""

    status: int | None = None
    """Its exit status, if it exited."""
    signal: str = ""
    """Name of the signal that ended it, if one did and it is known."""
    out_of_memory: str = ""
    """Sentence on the kernel's memory killer, if that ended it."""
    from_outside: bool = False
    """Whether Ray ended it, or passed on a SIGTERM."""
    generation: int = 0
    """Newest generation that it was in; 0 if it is unknown, or before the first. The next three are of that moment."""
    step: int = 0
    """The step in progress; 0 while the generation was formed."""
    phase: str = ""
    microbatch: int | None = None
    """The microbatch that it was reading or computing."""
    samples: tuple[int, ...] = ()
    """Indices in the dataset of the microbatch's first samples, if they were read."""
    stderr: tuple[str, ...] = ()
    """The last lines of its standard error."""
    stderr_file: str = ""
    """Their file, on its node."""
    gpu: tuple[str, ...] = ()
    """Reports on its GPU since the worker was ready: Xids, memory errors, slowdowns. Empty if there is no NVML."""
    gpu_is_broken: bool = False
    """Whether the GPU reported a failure of itself, which no program causes."""

    @property
    def is_known(self) -> bool:
        """Whether there is more to report than that it ended."""
        return self.status is not None or bool(self.signal or self.out_of_memory or self.stderr or self.gpu)

    @property
    def is_its_own(self) -> bool:
        """Whether its own code ended it, with a known status or signal: nobody else's signal, no lack of memory, no
        broken GPU."""
        if self.from_outside or self.out_of_memory or self.gpu_is_broken:
            return False
        return self.status not in (None, 0) or self.signal in FATAL

    @property
    def cause(self) -> str:
        """The cause as the predicate of a sentence."""
        ending = "ended" if self.status is None else f"exited with status {self.status}"
        if self.out_of_memory:
            ending = f"was killed: {self.out_of_memory}"
        elif self.signal:
            ending = f"was ended by {self.signal}{FATAL.get(self.signal, '')}"
        return f"{ending}; its GPU reported {'; '.join(self.gpu)}" if self.gpu else ending


FATAL = {
    "SIGSEGV": ", a crash of native code",
    "SIGBUS": ", a crash of native code, or a lack of shared memory (a full /dev/shm)",
    "SIGILL": ", an instruction that its processor lacks",
    "SIGFPE": ", an arithmetic error of native code",
    "SIGABRT": ", an error that native code ended it for",
    "SIGTRAP": ", a trap of native code",
    "SIGSYS": ", a system call that is forbidden",
}
"""Signals with which a process's own code ends it -> their meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeathExplained:
    """The cause of a lost worker's death; follows its `WorkerLost`, if its machine knows it."""

    worker: WorkerId
    death: Death
