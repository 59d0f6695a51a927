"""Runs: driven in this process or by an actor of their own, and the handles on them.

`handle` has what every handle can do. `driven` drives a run in this process, and `steering` carries out what is asked
of it. A `host` is the actor that drives a run for others: `hosting` starts and finds hosts, `orders` keeps what they
are to drive, `attached` is the handle on them, and `finding` gives it by name. `stored` knows what storage alone tells,
and `job` is `fit()` in a submitted Ray job.
"""

from raysharded.run.handle import Run as Run
from raysharded.run.results import (
    Entry as Entry,
    Listener as Listener,
    Result as Result,
    Status as Status,
    WrittenCheckpoint as WrittenCheckpoint,
)
