"""Runs: driven in this process or by a driver actor, and the handles on them.

`spec` is a trainer's request; `translation` derives from it what driver and workers need. `handle` has the methods of
every handle. `local` drives a run in this process, and `control` carries out the requests to it. In `hosted` a driver
actor drives the run. `attach` returns a handle by the run's name, and `offline` reads a run from its storage alone.
`outcome` makes the result of a run that ended.
"""

from raysharded.run.handle import Run as Run
from raysharded.run.results import (
    Entry as Entry,
    Listener as Listener,
    Result as Result,
    RunStopped as RunStopped,
    ScoredCheckpoint as ScoredCheckpoint,
    Status as Status,
    WrittenCheckpoint as WrittenCheckpoint,
)
