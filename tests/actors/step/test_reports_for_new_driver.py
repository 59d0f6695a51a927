"""A worker's reports of the steps that it took part in, for a driver that has not received them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysharded.driver.membership.state_source import choose_source
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import FromMemory, FromStart, GenerationReady, GenerationSpec, Source, Stopped
from raysharded.protocol.worker_launcher import Reply
from raysharded.testing.processes import ProcessLauncher
from tests.training.harness import make_job

pytestmark = pytest.mark.procs
WORKER = WorkerId(0)
WAIT_S = 120.0


def answer(launcher: ProcessLauncher, method: str, *args: Any) -> Any:
    """The result of a call; `ready` is called by the launcher itself."""
    if method != "ready":
        launcher.call(WORKER, method, *args)
    (reply,) = launcher.wait(WAIT_S)
    assert isinstance(reply, Reply)
    assert reply.error is None
    return reply.value


def test_a_worker_reports_the_steps_of_earlier_generations_too(tmp_path: Path) -> None:
    launcher = ProcessLauncher(make_job(f"{tmp_path}/run", steps=2))
    try:
        host, port = launcher.rendezvous()

        def form(generation: int, source: Source) -> GenerationReady | Stopped:
            spec = GenerationSpec(
                generation=GenerationId(generation),
                members=(WORKER,),
                source=source,
                host=host,
                port=port,
                prefix=f"g{generation}",
                secret=launcher.secret(f"g{generation}"),
            )
            formed: GenerationReady | Stopped = answer(launcher, "form", spec)
            return formed

        launcher.start(WORKER)
        answer(launcher, "ready")
        assert isinstance(form(1, FromStart()), GenerationReady)
        stopped: Stopped = answer(launcher, "train", GenerationId(1))
        source = choose_source({WORKER: stopped}, frozenset({WORKER}), None)
        assert isinstance(source, FromMemory)
        assert isinstance(form(2, source), GenerationReady)
        assert [report.step for report in answer(launcher, "newest_reports", 0)] == [1, 2]
    finally:
        launcher.close()
