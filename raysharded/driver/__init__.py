"""The driver: members, generations, saves and recoveries, decided from events.

`machine` and the handlers that it calls are pure. `driver` acts: it runs the machine on its threads and carries out its
commands, with `checkpoints.committer` and `startup` for what lies on storage.
Reading order: `machine.step` (an event and a state in, the next state and commands out), `state` (these values),
`handlers`, `membership`, `generation`.
"""
