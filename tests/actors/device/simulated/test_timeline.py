"""The rules of simulated streams, each by a few operations that it allows and that it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from raysharded.actors.shards.pinned_arena import PinnedArena
from tests.actors.device.simulated.access_watch import AccessWatch
from tests.actors.device.simulated.autograd_thread import replace_backward
from tests.actors.device.simulated.timeline import SimulatedEvent, Timeline


@pytest.fixture
def line() -> Iterator[Timeline]:
    found = Timeline()
    with AccessWatch(found):
        yield found


def test_work_of_one_stream_is_ordered(line: Timeline) -> None:
    values = torch.zeros(3)
    values.add_(1)
    values.mul_(2)
    assert not line.problems


@pytest.mark.parametrize("kind", ["read after write", "write after read", "write after write"])
def test_two_streams_are_not_ordered_without_a_wait(line: Timeline, kind: str) -> None:
    values, side = torch.zeros(3), line.new_stream()
    side.wait_stream(line.default)
    if kind == "write after read":
        values.sum()
    else:
        values.add_(1)
    with line.on(side):
        if kind == "read after write":
            values.sum()
        else:
            values.mul_(2)
    (problem,) = line.problems
    assert problem.startswith("race: ")


def test_two_reads_need_no_order(line: Timeline) -> None:
    values, side = torch.zeros(3), line.new_stream()
    side.wait_stream(line.default)
    values.sum()
    with line.on(side):
        values.sum()
    assert not line.problems


@pytest.mark.parametrize("how", ["stream", "event", "host", "through a third"])
def test_a_wait_orders_two_streams(line: Timeline, how: str) -> None:
    values, side = torch.zeros(3), line.new_stream()
    values.add_(1)
    if how == "stream":
        side.wait_stream(line.default)
    elif how == "event":
        side.wait_event(line.default.record_event())
    elif how == "host":
        line.default.synchronize()
    else:
        third = line.new_stream()
        third.wait_stream(line.default)
        side.wait_event(third.record_event())
    with line.on(side):
        values.mul_(2)
    assert not line.problems


def test_an_event_orders_only_what_was_launched_before_it(line: Timeline) -> None:
    values, side = torch.zeros(3), line.new_stream()
    event = line.default.record_event()
    values.add_(1)
    side.wait_event(event)
    with line.on(side):
        values.sum()
    assert line.problems


def test_an_event_that_was_not_recorded_orders_nothing(line: Timeline) -> None:
    values, side = torch.zeros(3), line.new_stream()
    side.wait_event(SimulatedEvent(line))
    with line.on(side):
        values.sum()
    assert line.problems


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_reads_page_locked_memory_after_the_copy_to_it(line: Timeline, waits: bool) -> None:
    values, page = torch.ones(3), torch.empty(3)
    line.page_locked(page.untyped_storage())
    page.copy_(values, non_blocking=True)
    done = line.default.record_event()
    if waits:
        done.synchronize()
    assert page[0].item() == 1.0
    assert bool(line.problems) is not waits


def freed_after_use_on_another_stream(line: Timeline, *, keeps: bool = False) -> None:
    """A tensor of the default stream is freed while another stream may still use it."""
    values, side = torch.ones(3), line.new_stream()
    side.wait_stream(line.default)
    with line.on(side):
        values.sum()
        if keeps:
            line.keep(values.untyped_storage(), side)


def test_memory_is_not_reused_while_another_stream_uses_it(line: Timeline) -> None:
    freed_after_use_on_another_stream(line)
    torch.ones(3)
    (problem,) = line.problems
    assert problem.startswith("reused while in use: ")


def test_memory_that_is_kept_for_a_stream_is_not_reused_too_early(line: Timeline) -> None:
    freed_after_use_on_another_stream(line, keeps=True)
    torch.ones(3)
    assert not line.problems


def test_memory_is_reused_after_a_wait_for_the_other_stream(line: Timeline) -> None:
    values, side = torch.ones(3), line.new_stream()
    side.wait_stream(line.default)
    with line.on(side):
        values.sum()
    del values
    line.default.wait_stream(side)
    torch.ones(3)
    assert not line.problems


def test_memory_of_a_stream_is_given_to_that_stream_alone(line: Timeline) -> None:
    freed_after_use_on_another_stream(line)
    with line.on(line.new_stream()):
        torch.ones(3)
    assert not line.problems


def test_a_view_is_no_access(line: Timeline) -> None:
    values, side = torch.zeros(4), line.new_stream()
    with line.on(side):
        values.view(2, 2)
    assert not line.problems


def test_writes_by_lists_and_by_out_are_seen(line: Timeline) -> None:
    values, side = [torch.zeros(3)], line.new_stream()
    side.wait_stream(line.default)
    values[0].sum()
    with line.on(side):
        torch._foreach_add_(values, 1.0)
    assert len(line.problems) == 1
    values[0].sum()
    side.wait_stream(line.default)
    line.problems.clear()
    torch.add(values[0], 1.0, out=values[0])
    assert line.problems


@pytest.mark.parametrize("waits", [False, True])
def test_a_part_of_page_locked_memory_is_given_away_after_the_copy_to_it(line: Timeline, waits: bool) -> None:
    arena = PinnedArena(lambda size: torch.empty(size, dtype=torch.uint8))
    part, values = arena.take(100), torch.ones(100, dtype=torch.uint8)
    line.carved(part.untyped_storage())
    part.copy_(values, non_blocking=True)
    if waits:
        line.default.record_event().synchronize()
    del part
    line.carved(arena.take(50).untyped_storage())
    assert bool(line.problems) is not waits


@pytest.mark.parametrize("is_blocking", [False, True], ids=["in the background", "blocking"])
def test_the_host_may_use_page_locked_memory_behind_a_copy_that_blocks(line: Timeline, is_blocking: bool) -> None:
    values, here = torch.zeros(3), torch.zeros(3)
    line.page_locked(here.untyped_storage())
    here.copy_(values, non_blocking=not is_blocking)
    here.mul_(2)
    assert bool(line.problems) != is_blocking


def test_backward_is_computed_in_another_thread_on_the_callers_stream(
    line: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # put back at the end
    replace_backward(line, AccessWatch(line).__enter__)
    values, side, seen = torch.zeros(3, requires_grad=True), line.new_stream(), []
    values.register_hook(lambda _: seen.append((threading.get_ident(), line.current())))
    side.wait_stream(line.default)
    with line.on(side):
        values.exp().sum().backward()
        values.grad.zero_()  # type: ignore[union-attr]
    ((thread, stream),) = seen
    assert thread != threading.get_ident()
    assert stream is side
    assert not line.problems
    values.grad.sum()  # type: ignore[union-attr]
    assert line.problems, "the gradient was written on the side stream"
