"""A rollout that is drained gives every step that was made, and waits for no worker to be made or reset again."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from held_envs import LONGEST_S, Held, await_held, let_go, times_made
from numbered_module import NumberedModule
from places import rollout_at

from rollflow import Rollout
from rollflow.stream.net.backoff import waiting

pytestmark = pytest.mark.wait_times(close_s=0.1)


class Broken(Held):
    """Raises in the fourth step of its first life; in its second it waits where it is made, or reset."""

    def __init__(self, slot: int, folder: Path, waits: str) -> None:
        super().__init__(slot, folder, lengths=(100, 100))
        self.is_first = times_made(folder, slot) == 1
        if not self.is_first and waits == "making":
            self._wait()
        self.held_resets = [0] if not self.is_first and waits == "resetting" else []

    def step(self, action: Any) -> Any:
        if self.is_first and self.life == 3:
            raise RuntimeError("it broke")
        return super().step(action)


def await_loss(rollout: Rollout) -> None:
    until = time.monotonic() + LONGEST_S
    while not rollout.lost:
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.parametrize("waits", ["lost", "making", "resetting"])
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_lane_that_is_to_be_made_again_comes_back_at_once(tmp_path: Path, where: Any, waits: str) -> None:
    delay = 1000.0 if waits == "lost" else 0.0
    options: Any = {"module": NumberedModule(), "fragment_length": 2, "prefetch": 2, "seed": 0}
    with (
        waiting(first_pause_s=delay, worker_pause_s=delay),
        Rollout(partial(Broken, 0, tmp_path, waits), where=where, workers=1, **options) as rollout,
    ):
        fragments = iter(rollout.fragments())
        first = next(fragments)
        if waits == "lost":
            await_loss(rollout)
        else:
            await_held(tmp_path, 0)
        began = time.monotonic()
        rollout.drain()
        [rest] = fragments
        assert time.monotonic() - began < LONGEST_S / 2
        assert (first.num_steps, rest.num_steps, rollout.num_steps) == (2, 1, 3)
        [chunk] = rest.episodes()
        assert (chunk.is_truncated, chunk.custom_data["lost"]) == (True, "RuntimeError: it broke")
    assert rollout.lost == {"workers": 1}
    assert times_made(tmp_path, 0) == (1 if waits == "lost" else 2)


@pytest.mark.parametrize("place", ["processes", "rollouts", "hosted rollouts"])
def test_a_first_reset_is_not_waited_for(tmp_path: Path, place: str) -> None:
    makers = [partial(Held, slot, tmp_path, resets=[0] if slot == 0 else []) for slot in range(2)]
    options: Any = {"fragment_length": 2, "seed": 0} | ({} if place == "hosted rollouts" else {"workers": 2})
    acts = {"module": NumberedModule()}
    with rollout_at(place, makers, envs={"lanes": 2}, acts=acts, prefetch=1, **options) as made:
        try:
            with made as rollout:
                await_held(tmp_path, 0)
                began = time.monotonic()
                rollout.drain()
                fragments = list(rollout.fragments())
                assert time.monotonic() - began < LONGEST_S / 2
                assert sum(fragment.num_steps for fragment in fragments) == rollout.num_steps
                assert {fragment.lane for fragment in fragments} <= {1}
        finally:
            let_go(tmp_path, 0)  # or the host would wait for it
    assert rollout.lost == {}


@pytest.mark.parametrize(("where", "backend"), [("processes", "asyncio"), ("rollouts", "trio")])
def test_in_an_event_loop_neither(tmp_path: Path, where: Any, backend: str) -> None:
    async def run_through() -> list[Any]:
        async with Rollout(partial(Held, 0, tmp_path, resets=[0]), where=where, module=NumberedModule()) as rollout:
            await anyio.to_thread.run_sync(await_held, tmp_path, 0)
            rollout.drain()
            with anyio.fail_after(LONGEST_S / 2):
                return [fragment async for fragment in rollout.fragments()]

    assert anyio.run(run_through, backend=backend) == []
