"""Runs that an actor of their own drives.

`driver_actor` is that actor, `launch` starts it, and `registry` finds it. `submission` keeps what it is to drive,
`remote` is the handle on it, and `ray_job` is `fit()` in a submitted Ray job.
"""
