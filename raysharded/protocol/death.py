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

    @property
    def is_known(self) -> bool:
        """Whether there is more to report than that it ended."""
        return self.status is not None or bool(self.signal or self.out_of_memory or self.stderr)

    @property
    def is_its_own(self) -> bool:
        """Whether its own code ended it, with a known status or signal: nobody else's signal, no lack of memory."""
        if self.from_outside or self.out_of_memory:
            return False
        return self.status not in (None, 0) or self.signal in FATAL

    @property
    def cause(self) -> str:
        """The cause as the predicate of a sentence."""
        if self.out_of_memory:
            return f"was killed: {self.out_of_memory}"
        if self.signal:
            return f"was ended by {self.signal}{FATAL.get(self.signal, '')}"
        return "ended" if self.status is None else f"exited with status {self.status}"


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
