"""The driver: members, generations, saves and recoveries, decided from events.

Pure code in `machine` and below it; `driver` acts: it runs the machine on its threads and carries out its commands.
Reading order: `machine.step` (an event and a state in, the next state and commands out), `state` (these values),
`handlers`, `membership`, `generation`.
"""
