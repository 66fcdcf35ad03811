import itertools
from collections import deque
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given, strategies as st

from rollflow.stream import Inlet, Outlet
from rollflow.stream.graph.channel import CHECKPOINT_EVERY, CHECKPOINT_NS, Channel
from rollflow.stream.graph.meter import NodeMeter


def ends(*channels: Channel[Any]) -> tuple[Outlet[Any], Inlet[Any]]:
    return Outlet(list(channels), NodeMeter("giver")), Inlet(list(channels), NodeMeter("taker"))


def test_what_an_abandoned_channel_held_and_gets_is_counted_as_dropped() -> None:
    channel: Channel[int] = Channel("c", 2)
    channel.offer(0)
    channel.abandon()
    assert all(channel.offer(number) for number in range(1, 5))
    assert len(channel) == 0
    assert (channel.meter.items, channel.meter.dropped) == (5, 5)


@given(
    st.lists(st.sampled_from(["offer", "take"]), max_size=40),
    st.integers(1, 4),
    st.sampled_from(["block", "drop_oldest", "latest"]),
)
def test_what_was_taken_in_was_given_dropped_or_is_held(operations: list[str], capacity: int, overflow: Any) -> None:
    channel: Channel[int] = Channel("c", capacity, overflow)
    taken, held, dropped = 0, deque[int](), 0
    for number, operation in enumerate(operations):
        if operation == "take":
            if held:
                assert channel.take() == held.popleft()
                taken += 1
            continue
        is_full = len(held) == capacity
        assert channel.offer(number) is not (is_full and overflow == "block")
        if is_full and overflow != "block":
            held.popleft()
            dropped += 1
        if not is_full or overflow != "block":
            held.append(number)
        assert channel.held() == list(held)
    assert (channel.meter.items, channel.meter.dropped) == (taken + dropped + len(held), dropped)


def test_an_inlet_takes_turns_between_its_channels() -> None:
    a: Channel[str] = Channel("a", 3)
    b: Channel[str] = Channel("b", 3)
    _, inlet = ends(a, b)
    for _ in range(3):
        a.offer("a")
        b.offer("b")
    assert "".join(inlet.receive_nowait() for _ in range(6)) == "ababab"


@pytest.mark.anyio
async def test_a_sender_waits_for_room_and_the_wait_is_counted_once() -> None:
    channel: Channel[int] = Channel("c", 1)
    outlet, inlet = ends(channel)
    sent: list[int] = []

    async def send() -> None:
        for number in range(3):
            await outlet.send(number)
            sent.append(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await anyio.wait_all_tasks_blocked()
        assert sent == [0]
        assert [await inlet.receive() for _ in range(3)] == [0, 1, 2]
    assert sent == [0, 1, 2]
    assert channel.meter.blocked_count == 2


@pytest.mark.anyio
async def test_what_is_cancelled_while_it_waits_leaves_the_channel_as_it_was() -> None:
    channel = Channel[int]("c", 1)
    outlet, inlet = ends(channel)
    for wait in (inlet.receive, partial(outlet.send, 1)):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
            channel.offer(0)  # which a full one refuses
    assert await inlet.receive() == 0
    with pytest.raises(anyio.WouldBlock):
        inlet.receive_nowait()


@pytest.mark.anyio
async def test_two_readers_of_one_inlet_are_both_woken() -> None:
    outlet, inlet = ends(Channel[int]("c", 2))
    seen: list[int] = []

    async def read() -> None:
        seen.append(await inlet.receive())

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            await outlet.send(1)
            await outlet.send(2)
    assert sorted(seen) == [1, 2]


@pytest.mark.anyio
@pytest.mark.parametrize(("step_ns", "count"), [(0, CHECKPOINT_EVERY - 1), (CHECKPOINT_NS, 0)])
async def test_ends_that_never_wait_still_pass_through_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, step_ns: int, count: int
) -> None:
    times = itertools.count(step=step_ns)
    monkeypatch.setattr("rollflow.stream.graph.channel.clock", lambda: next(times))
    channel = Channel[int]("c", 10 * CHECKPOINT_EVERY)
    for number in range(CHECKPOINT_EVERY):
        channel.offer(number)
    outlet, inlet = ends(channel)
    sent, received = 0, 0
    with anyio.CancelScope() as scope:
        scope.cancel()
        while True:
            await outlet.send(sent)
            sent += 1
    with anyio.CancelScope() as scope:
        scope.cancel()
        while True:
            await inlet.receive()
            received += 1
    assert (sent, received) == (count, count)


@pytest.mark.anyio
async def test_a_fast_source_drops_hardly_an_item_of_a_sink_that_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.stream.graph.channel.clock", lambda: 0)
    count, taken = 10_000, 0
    channel = Channel[int]("c", 128, "drop_oldest")
    outlet, inlet = ends(channel)

    async def source() -> None:
        for number in range(count):
            await outlet.send(number)
        channel.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source)
        async for _ in inlet:
            taken += 1
    assert taken + channel.meter.dropped == count
    assert channel.meter.dropped <= count // 100
