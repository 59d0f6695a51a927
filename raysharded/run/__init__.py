"""Runs: driven in this process or by an actor of their own, and the handles on them.

`spec` is what a trainer asks for, and `translation` what driver and workers need of it. `handle` has what every handle
can do. `local` drives a run in this process, and `control` carries out what is asked of it. In `hosted` an actor of its
own drives the run. `attach` gives a handle by the run's name, and `offline` knows what storage alone tells.
"""

from raysharded.run.handle import Run as Run
from raysharded.run.results import (
    Entry as Entry,
    Listener as Listener,
    Result as Result,
    Status as Status,
    WrittenCheckpoint as WrittenCheckpoint,
)
