"""A run's memory is free once it has ended, without the cycle collector, however it ends and wherever it runs."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import anyio
import gymnasium as gym
import numpy as np
import pytest
from feeding_rollouts import agents_rollout_over, fed, trainer
from graph_rows import row
from leftovers import join_loop_workers, shared_mappings
from numbered_agents import NumberedAgents
from numbered_module import NumberedModule
from piece_forms import Breaks, ByEpisodes
from places import PLACES
from remote_hosts import hosting, listening
from remote_rollouts import makers, rollouts_on
from small_env import SmallEnv
from ways import LoopError, end, end_async, end_in_graph, graph_with

from rollflow import Forward, Fragment, RemoteRollouts, Replay, Rollout
from rollflow.stream import Inlet
from rollflow.stream.data.blocks import root_of
from rollflow.stream.data.column import Column
from rollflow.stream.data.tree import leaves_of
from rollflow.stream.graph.run import Run

WAYS = PLACES
JOINT: dict[str, Any] = {"joint": {"lanes": 2, "forward": Forward(max_batch=4)}}


class Memory:
    """Arrays that columns of fragments lie in, since `begin`, while nothing collects cycles."""

    def __init__(self) -> None:
        self._arrays: list[weakref.ref[Any]] = []
        self._mappings = shared_mappings()

    def add(self, column: Column) -> None:
        if len(column) > 1:  # one row is no fragment's, but room for an environment's last observation
            self._arrays += [weakref.ref(root_of(leaf)) for leaf in leaves_of(column.tree)]

    @property
    def held(self) -> int:
        """Bytes of those arrays that are still there."""
        return sum({id(array): array.nbytes for each in self._arrays if (array := each()) is not None}.values())

    @property
    def was_used(self) -> bool:
        return bool(self._arrays)

    @property
    def mappings(self) -> int:
        return shared_mappings() - self._mappings


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    made = Column.__init__

    def init(self: Column, name: str, tree: Any) -> None:
        made(self, name, tree)
        kept.add(self)

    gc.collect()
    gc.disable()
    try:
        kept = Memory()
        monkeypatch.setattr(Column, "__init__", init)
        yield kept
    finally:
        gc.enable()


class Steps(SmallEnv):
    """Episodes of six steps; raises in step `fails_at`."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    length = 6

    def __init__(self, fails_at: int | None = None) -> None:
        self.steps, self._fails_at = 0, fails_at

    def pay(self, action: Any) -> float:
        self.steps += 1
        if self.steps == self._fails_at:
            raise ValueError("the simulator fails")
        return 1.0


def rollout_of(fails_at: int | None = None, **options: Any) -> Rollout:
    given = {"num_envs": 4, "fragment_length": 8, "num_fragments": 3, "seed": 0, **options}
    pieces = {"env_to_module_connector": lambda env: ByEpisodes()}  # which has live episodes made
    return Rollout(lambda: Steps(fails_at), **{**pieces, **given})


read_all = partial(end, ending="ended")


def fail_in_the_loop(rollout: Any) -> None:
    with pytest.raises(LoopError):
        end(rollout, "raised", at=1)


def close_by_hand(rollout: Any) -> None:
    next(rollout.start().batches())
    rollout.close()


ENDINGS: dict[str, Callable[[Any], object]] = {
    "ended": read_all,
    "left in a round": partial(end, ending="left", at=1, of="fragments"),
    "raised": fail_in_the_loop,
    "left in an event loop": lambda rollout: anyio.run(end_async, rollout, "left", 1),
    "closed by hand": close_by_hand,
}


def fail_with(told: str) -> Callable[[Any], None]:
    """Read until an error with this text, whose traceback refers to the rollout."""

    def fail(rollout: Any) -> None:
        with pytest.raises((ValueError, ZeroDivisionError), match=told):
            read_all(rollout)

    return fail


def check_freed(memory: Memory, make: Callable[[], Any], use: Callable[[Any], object], *, runs: bool = True) -> None:
    """Check that memory is free once a rollout has been used, while it tells its counts, and then itself.

    runs    whether it makes a step
    """
    rollout = make()
    use(rollout)
    join_loop_workers()
    assert memory.was_used
    assert memory.held == 0
    assert (rollout.num_steps > 0) == runs
    assert sum(rollout.lost.values()) >= 0
    assert rollout.returns.count >= 0
    assert "closed" in repr(rollout) or "ended" in repr(rollout)
    assert rollout.module is not None
    ref = weakref.ref(rollout)
    del rollout
    assert ref() is None
    assert memory.mappings == 0


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("way", WAYS | JOINT)
def test_memory_is_free_at_the_end_and_the_rollout_when_it_is_dropped(memory: Memory, way: str, ending: str) -> None:
    if way == "ahead" and ending == "left in an event loop":
        pytest.skip("an async loop runs in no thread of its own")

    def use(rollout: Any) -> None:
        ENDINGS[ending](rollout)
        assert rollout.report().nodes

    check_freed(memory, partial(rollout_of, **(WAYS | JOINT)[way]), use)


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_several_agents_is_free(memory: Memory, way: str) -> None:
    envs = [partial(NumberedAgents, slot, agents=2, nested=1) for slot in range(2)]
    check_freed(memory, partial(agents_rollout_over, envs, num_fragments=3, **WAYS[way]), read_all)


@pytest.mark.parametrize("way", ["inline", "ahead", "threads", "joint"])
def test_memory_is_free_once_the_error_of_an_environment_is_gone(memory: Memory, way: str) -> None:
    make = partial(rollout_of, fails_at=12, **(WAYS | JOINT)[way])
    check_freed(memory, make, fail_with("the simulator fails"))


@pytest.mark.parametrize("connector", ["env_to_module_connector", "learner_connector"])
def test_memory_is_free_once_the_error_of_a_piece_is_gone(memory: Memory, connector: str) -> None:
    make = partial(rollout_of, **{connector: lambda *spaces: Breaks(at=1)})
    check_freed(memory, make, fail_with("no more"), runs=connector == "learner_connector")


# On hosts


@pytest.mark.parametrize("whole", [False, True], ids=["steps", "rollouts"])
def test_memory_of_lanes_on_hosts_is_free(memory: Memory, whole: bool) -> None:
    envs = listening(kind=RemoteRollouts) if whole else listening()
    on = rollouts_on if whole else hosting
    with on(envs.addresses[0], makers(0, 1)):
        rollout = Rollout(envs, module=NumberedModule, fragment_length=8, num_fragments=2, seed=0)
        read_all(rollout)
        assert memory.was_used
        ref = weakref.ref(rollout)
        del rollout
        assert ref() is None
    if not whole:  # the host is in this process, and has columns of its own
        assert memory.held == 0


# In graphs


class Latest:
    """A sink with a task of its own, which keeps nothing."""

    async def run(self, fragments: Inlet[Fragment]) -> None:
        async for _ in fragments:
            pass


class InThread:
    """A sink in a thread that fails at its second fragment, where it is to."""

    where = "thread"

    def __init__(self, fails: bool) -> None:
        self._left = 2 if fails else -1

    def __call__(self, fragment: Fragment) -> None:
        self._left -= 1
        if self._left == 0:
            raise ValueError("the disk is full")


@pytest.mark.parametrize("ending", ["ended", "left", "cancelled", "a sink fails"])
@pytest.mark.parametrize("place", ["inline", "threads"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_memory_is_free_after_a_graph(memory: Memory, ending: str, place: str, backend: str) -> None:
    fails = ending == "a sink fails"

    def run(rollout: Any) -> None:
        runs: list[Run] = []
        graph = graph_with(rollout, {"latest": Latest(), "thread": InThread(fails)})

        async def main() -> None:
            # An error that left the event loop would stay in a cycle of the loop's own.
            with pytest.raises(ValueError, match="the disk is full") if fails else nullcontext():
                await end_in_graph(graph, ending, 1, runs.append)

        anyio.run(main, backend=backend)
        assert runs[0].report().nodes

    check_freed(memory, partial(rollout_of, **WAYS[place]), run)


def test_a_replay_keeps_no_fragment_and_no_rollout(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    made, fragments = Fragment.__init__, []

    def init(self: Fragment, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        fragments.append(weakref.ref(self))

    monkeypatch.setattr(Fragment, "__init__", init)
    rollout = rollout_of()
    replay = Replay(1000, batch_size=8)
    graph = row(rollout=rollout, replay=replay, output="batches")
    anyio.run(end_in_graph, graph, "left", 1)
    ref = weakref.ref(rollout)
    del rollout, graph
    assert ref() is None
    assert len(replay) > 0
    assert fragments
    assert not any(each() for each in fragments)


@pytest.mark.parametrize("sends", ["fragments", "batches"])
def test_memory_of_what_a_trainer_got_is_free(memory: Memory, sends: str) -> None:
    def train(rollout: Any) -> None:
        stream = trainer()
        with fed(stream, rollout, sends=sends):
            for _ in stream:
                pass

    check_freed(memory, rollout_of, train)
