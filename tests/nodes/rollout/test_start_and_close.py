"""`start()` and `close()` beside `with`, and what a rollout says of itself."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from graph_rows import row
from held_envs import Held, await_held
from leftovers import join_loop_workers
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv, numbered_envs
from numbered_module import NumberedModule
from places import PLACES

from rollflow import Forward, MultiAgentRollout, Rollout
from rollflow.nodes import EpisodeReturns, RandomModule
from rollflow.stream.data.errors import RunError


def agents_rollout(**options: Any) -> MultiAgentRollout:
    return MultiAgentRollout(
        lambda: NumberedAgents(0, nested=0), module=RandomModule, fragment_length=4, seed=0, **options
    )


def rollout_of(count: int = 2, **options: Any) -> tuple[list[Any], Rollout]:
    envs, makers = numbered_envs(count)
    return envs, Rollout(makers, module=NumberedModule(), fragment_length=4, seed=0, **options)


DRIVERS: dict[str, dict[str, Any]] = {
    "inline": {},
    "ahead": {"prefetch": 1},
    "threads": {"where": "threads"},
    "joint passes": {"forward": Forward(max_batch=4, max_wait=0.01), "lanes": 1},
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("options", DRIVERS.values(), ids=DRIVERS)
def test_what_start_begins_close_ends(options: Any, several: bool) -> None:
    join_loop_workers()
    threads = set(threading.enumerate())
    rollout: Any = agents_rollout(**options) if several else rollout_of(**options)[1]
    assert rollout.start() is rollout
    for count in (2, 1):  # and the next cell of a notebook
        for _, batch in zip(range(count), rollout.batches(), strict=False):
            assert batch
    rollout.close()
    rollout.close()
    join_loop_workers()
    assert rollout.environments.is_closed
    assert set(threading.enumerate()) <= threads
    assert rollout.report().nodes
    assert sum(rollout.lost.values()) + rollout._rounds.handed_steps == rollout.num_steps


def test_before_start_and_after_close_errors_say_what_is_expected() -> None:
    _, rollout = rollout_of()
    with pytest.raises(RunError, match=r"the rollout is new; this loop expects: .* or rollout.start\(\)"):
        next(iter(rollout.batches()))
    with pytest.raises(RunError, match="the rollout is not running, it is new: nothing to drain"):
        rollout.drain()
    with pytest.raises(RunError, match="not running, it is new: nothing to report"):
        rollout.report()
    rollout.start()
    with pytest.raises(RunError, match="the rollout is running: it runs once"):
        rollout.start()
    rollout.close()
    with pytest.raises(RunError, match="the rollout is closed; expected a new one"):
        next(iter(rollout.batches()))
    with pytest.raises(RunError, match="the rollout is closed: it runs once"):
        rollout.start()
    with pytest.raises(RunError, match="the rollout is not running, it is closed: nothing to drain"):
        rollout.drain()


@pytest.mark.parametrize("where", ["inline", "processes"])
def test_close_without_start_closes_the_environments(where: Any, caplog: pytest.LogCaptureFixture) -> None:
    envs, makers = numbered_envs(2)
    with caplog.at_level("INFO"):
        rollout: Any = Rollout(makers, module=NumberedModule(), **PLACES[where])
    assert ("starting 1 worker process" in caplog.text) == (where == "processes")
    workers = [] if where == "inline" else [each.process for each in rollout.environments._workers]
    rollout.close()
    rollout.close()
    assert rollout.environments.is_closed
    assert all(worker.has_ended(0.0) for worker in workers)
    assert where == "processes" or all(env.closed for env in envs)
    assert rollout.lost == {}
    with pytest.raises(RunError, match="the rollout is closed: it runs once"):
        rollout.start()


def test_close_within_a_block_is_all_that_the_block_would_do() -> None:
    envs, rollout = rollout_of()
    with rollout:
        next(iter(rollout.batches()))
        rollout.close()
        assert all(env.closed for env in envs)
    assert repr(rollout).startswith("<Rollout closed: ")


async def test_an_async_block_closes_what_it_has_begun(anyio_backend: Any) -> None:
    _, rollout = rollout_of()
    async with rollout:
        with pytest.raises(RunError, match="entered by 'async with', which closes it: expected its block to end"):
            rollout.close()
    rollout.close()


async def test_a_run_of_a_graph_closes_its_nodes(anyio_backend: Any) -> None:
    envs, rollout = rollout_of(num_fragments=2)
    async with row(rollout=rollout, output="fragments").run() as run:
        await run["fragments"].receive()
        with pytest.raises(RunError, match="the rollout runs in a graph, whose run closes it"):
            rollout.close()
    rollout.close()
    assert all(env.closed for env in envs)


async def test_one_that_was_closed_does_not_run_in_a_graph(anyio_backend: Any) -> None:
    _, rollout = rollout_of()
    graph = row(rollout=rollout, returns=EpisodeReturns())
    rollout.close()
    with pytest.raises(RunError, match="these environments have been closed: make another rollout"):
        async with graph.run():
            await anyio.sleep_forever()


def test_repr_says_how_far_it_is() -> None:
    _, rollout = rollout_of()
    assert repr(rollout) == "<Rollout new: 1 lane × 2 slots, 0 steps made>"
    with rollout:
        next(iter(rollout.fragments()))
        assert repr(rollout) == f"<Rollout running: 1 lane × 2 slots, {rollout.num_steps} steps made>"
        assert rollout.num_steps
    assert repr(rollout) == f"<Rollout closed: 1 lane × 2 slots, {rollout.num_steps} steps made>"
    several = agents_rollout()
    assert repr(several) == "<MultiAgentRollout new: 1 lane × 1 environment × 4 agents, 0 steps made>"
    several.close()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the loop", "in another thread"])
@pytest.mark.parametrize("options", DRIVERS.values(), ids=DRIVERS)
def test_a_loop_whose_rollout_is_closed_is_told_so(options: Any, elsewhere: bool) -> None:
    threads = set(threading.enumerate())
    envs, rollout = rollout_of(**options)
    closing = threading.Thread(target=rollout.close)
    rollout.start()
    told = "" if elsewhere else r"close\(\) was called while this loop ran; expected dra"
    with pytest.raises(RunError, match=f"the rollout is closed: {told}"):
        for number, _ in enumerate(rollout.fragments()):
            if number == 3:
                (closing.start if elsewhere else rollout.close)()
    if elsewhere:
        closing.join()
    assert all(env.closed for env in envs)
    assert set(threading.enumerate()) <= threads
    assert rollout.lost.keys() <= {"closed"}
    assert repr(rollout).startswith("<Rollout closed: ")


def loop_until_closed_by(close: Callable[[], None], rollout: Rollout) -> None:
    """Take a fragment, and wait for the next while another thread closes the rollout: the loop is told so."""
    closing = threading.Thread(target=close)
    fragments = iter(rollout.start().fragments())
    next(fragments)
    closing.start()
    with pytest.raises(RunError, match="the rollout is closed: "):
        next(fragments)
    closing.join()


@pytest.mark.wait_times(close_s=0.05)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_rollout_whose_loop_hangs_in_a_step_can_be_closed(prefetch: int, caplog: pytest.LogCaptureFixture) -> None:
    is_at_step, goes_on = threading.Event(), threading.Event()

    class Hangs(NumberedEnv):
        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps == 6:  # in the second fragment
                is_at_step.set()
                assert goes_on.wait(30)
            return super().step(action)

    envs: list[Hangs] = []

    def made() -> Hangs:
        envs.append(Hangs(0))
        return envs[0]

    def close() -> None:
        assert is_at_step.wait(30)
        rollout.close()
        goes_on.set()

    rollout = Rollout([made], module=NumberedModule(), fragment_length=4, seed=0, prefetch=prefetch)
    loop_until_closed_by(close, rollout)
    assert "an environment or the module hangs" in caplog.text
    for thread in threading.enumerate():
        if thread.name == "rollflow ring":
            thread.join()
    assert envs[0].closed


@pytest.mark.slow
def test_a_loop_that_waits_for_a_worker_is_closed_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = partial(Held, 0, tmp_path, steps=[5])  # is never let go
    rollout = Rollout([env], module=NumberedModule(), fragment_length=4, seed=0, where="processes")

    def close() -> None:
        await_held(tmp_path, 0)
        rollout.close()

    loop_until_closed_by(close, rollout)
    assert rollout.environments.is_closed
    assert "hangs" not in caplog.text


def test_a_rollout_that_is_closed_while_it_resets_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    is_at_reset, goes_on = threading.Event(), threading.Event()
    ended: list[str] = []

    class Resets(NumberedEnv):
        def reset(self, **kwargs: Any) -> Any:
            is_at_reset.set()
            assert goes_on.wait(30)
            ended.append("reset")
            return super().reset(**kwargs)

        def close(self) -> None:
            ended.append("closed")
            super().close()

    rollout = Rollout([partial(Resets, 0)], module=NumberedModule(), seed=0)
    closing = threading.Thread(target=rollout.close)

    def close() -> None:
        assert is_at_reset.wait(30)
        closing.start()
        goes_on.set()

    threading.Thread(target=close).start()
    with suppress(RunError):  # where the reset has ended before it was closed
        rollout.start()
    closing.join()
    assert ended == ["reset", "closed"]


async def test_after_a_graphs_run_repr_says_that_it_has_ended(anyio_backend: Any) -> None:
    _, rollout = rollout_of(num_fragments=1)
    graph = row(rollout=rollout, returns=EpisodeReturns())
    graph.explain()
    assert repr(rollout) == "<Rollout in a graph: 1 lane × 2 slots, 0 steps made>"
    async with graph.run() as run:
        assert repr(rollout).startswith("<Rollout in a graph: ")
        await run.wait()
    assert repr(rollout) == "<Rollout ended: 1 lane × 2 slots, 8 steps made>"


class ClosedMeanwhile:
    """Rounds of a rollout that another thread closes while its owner is about to close it."""

    def __init__(self, rollout: Any) -> None:
        self._rollout, self._rounds, self._is_first = rollout, rollout._rounds, True

    def __getattr__(self, name: str) -> Any:
        if name == "error" and self._is_first:
            self._is_first = False
            other = threading.Thread(target=self._rollout.close)
            other.start()
            other.join()
        return getattr(self._rounds, name)


def test_of_two_threads_that_close_a_rollout_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rollout = rollout_of()
    rollout.start()
    rollout._rounds = ClosedMeanwhile(rollout)  # type: ignore[assignment]
    closed: list[int] = []
    close = rollout._drive.close  # type: ignore[union-attr]
    monkeypatch.setattr(rollout._drive, "close", lambda *error: closed.append(1) or close(*error))
    rollout.close()
    assert closed == [1]
    assert rollout.environments.is_closed
