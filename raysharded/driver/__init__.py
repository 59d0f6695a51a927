"""The driver: decides members, generations, saves and recoveries from events.

`machine` and its handlers are pure. `driver` acts: it runs the machine on its threads and carries out the commands.
`checkpoints.committer` and `startup` do what concerns storage.

Reading order: `machine.step` (takes an event and a state, returns the next state and commands), `state` (these values),
`handlers`, `membership`, `generation`.
"""
