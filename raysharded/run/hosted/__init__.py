"""Runs driven by a driver actor.

`driver_actor` is that actor, `launch` starts it, and `registry` finds it. `submission` stores the run that it is to
drive, `remote` is the handle on it, and `ray_job` is `fit()` in a submitted Ray job.
"""
