"""The rendezvous store: the members of a generation leave values for each other in the driver's process.

`server` is the driver's side, without torch; the workers' is `raysharded.actors.comm.store_client`. A client that
proves the secret of a generation reaches that generation's keys, and no others. The secret travels in the driver's
calls to its workers alone.
"""
