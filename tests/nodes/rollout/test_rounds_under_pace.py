"""Under pace, rounds of one fragment of every lane: with lanes of any speed, and with lanes that leave or come."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ending_envs import NeverReset
from held_envs import await_file
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import SHORT, listening
from remote_rollouts import makers, rollout_over, rollouts_on

from rollflow import RemoteRollouts, Rollout

LENGTH, FRAGMENTS = 5, 6


class Ahead(NumberedEnv):
    """Says how many steps it has made."""

    def __init__(self, slot: int, folder: Path, **kwargs: Any) -> None:
        super().__init__(slot, **kwargs)
        self.folder, self.made = folder, 0

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        self.made += 1
        (self.folder / f"made {self.made}").touch()
        return answer


class Behind(Ahead):
    """Makes the steps of a fragment when the other has made all that it may: one fragment more than that one."""

    def step(self, action: Any) -> Any:
        number = self.made // LENGTH
        await_file(self.folder / f"made {min(number + 2, FRAGMENTS) * LENGTH}")
        self.folder, folder = self.folder / "behind", self.folder
        try:
            return super().step(action)
        finally:
            self.folder = folder


def lanes_of_rounds(rollout: Rollout, size: int) -> list[set[int]]:
    """The lanes of every round of so many fragments, none of them too old; newer weights are published after each."""
    rounds: list[set[int]] = []
    for number, fragment in enumerate(rollout.fragments()):
        assert rollout.policy_version - fragment.policy_version <= (rollout.lag.max_lag or 0)
        if number % size == 0:
            rounds.append(set())
        rounds[-1].add(fragment.lane)
        if number % size == size - 1:
            rollout.publish({"weight": torch.tensor(0.0)})
    return rounds


@pytest.mark.slow
@pytest.mark.parametrize("where", ["threads", "processes", "rollouts"])
def test_a_lane_that_is_always_ahead_does_not_make_another_too_old(where: Any, tmp_path: Path) -> None:
    (tmp_path / "behind").mkdir()
    envs = [partial(Ahead, 0, tmp_path), partial(Behind, 1, tmp_path)]
    options: dict[str, Any] = {"max_lag": 1, "on_excess": "pace", "prefetch": 1}
    options |= {"fragment_length": LENGTH, "num_fragments": FRAGMENTS, "seed": 0}
    with Rollout(envs, lanes=2, where=where, module=NumberedModule(), **options) as rollout:
        assert lanes_of_rounds(rollout, 2) == [{0, 1}] * FRAGMENTS
    assert rollout.lost == {}


@pytest.mark.wait_times(first_pause_s=0.001)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_lane_of_a_host_that_gives_nothing_is_not_waited_for(prefetch: int) -> None:
    envs = listening(RemoteRollouts, hosts=2, limits=SHORT)
    options = {"max_lag": prefetch, "on_excess": "pace", "prefetch": prefetch, "num_fragments": 4}
    with ExitStack() as hosts:
        hosts.enter_context(rollouts_on(envs.addresses[0], makers(0)))
        hosts.enter_context(rollouts_on(envs.addresses[0], [partial(NeverReset, 1)]))
        with rollout_over(envs, **options) as rollout:
            assert len(lanes_of_rounds(rollout, 1)) == 4
    assert rollout.lost == {}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_lane_whose_resets_fill_fragments_has_fewer_and_is_not_waited_for(prefetch: int) -> None:
    envs = [partial(NumberedEnv, 0, lengths=(1, 1)), partial(NumberedEnv, 1, lengths=(99, 99))]
    options: dict[str, Any] = {"max_lag": prefetch, "on_excess": "pace", "prefetch": prefetch, "num_fragments": 20}
    with Rollout(
        envs, lanes=2, autoreset_mode="NextStep", module=NumberedModule(), fragment_length=1, seed=0, **options
    ) as rollout:
        taken = [fragment.lane for fragment in rollout.fragments()]
    assert (taken.count(0), taken.count(1)) == (10, 20)
    assert rollout.lost == {}
