"""Hosts of several agents' environments that are killed, cut off, hang, raise, leave and come."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ending_agent_envs import DoomedAgents
from hypothesis import Phase, given, settings, strategies as st
from lost_agents import check_laws
from property_examples import examples, strategies
from remote_agents import makers, rollout_over, slots_of, told
from remote_hosts import BrokenWire, HostProcess, hosting, listening
from remote_rollouts import HASTY, taken_until

from rollflow import ConnectorV2

pytestmark = pytest.mark.wait_times(first_pause_s=0.01)


DRAWN = strategies(fate=["raise", "wrong"], step=(0, 20), lives=(1, 3))
DRAWN |= strategies(cuts=st.lists(st.integers(1, 6000), max_size=10), fragment_length=(1, 9), length=[3, 50])
DRAWN |= strategies(lanes=(1, 3), prefetch=(0, 1), at_once=bool, seed=(0, 1000))


@pytest.mark.slow
@given(**DRAWN)
@settings(max_examples=examples(12), phases=[Phase.explicit, Phase.generate])
def test_every_agent_step_of_a_lost_environment_is_in_a_chunk_or_counted(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], lanes: int, **drawn: Any
) -> None:
    folder, envs = tmp_path_factory.mktemp("log"), listening()
    kinds = {name: drawn.pop(name) for name in ("length", "at_once")}
    if lanes == 1:  # an only lane that fails before its first step ends the run
        drawn["step"] = max(1, drawn["step"])
    doomed = makers(folder, 0, **{name: drawn.pop(name) for name in ("fate", "step", "lives")}, **kinds)
    wire = BrokenWire(envs.addresses[0], lambda: cuts.pop() if cuts else None)
    try:
        host = hosting(wire.address, [*doomed, *makers(folder, 1, 2, **kinds)], lanes=lanes)
        with host, rollout_over(envs, num_fragments=20, **drawn) as rollout:
            fragments = list(rollout.fragments())
            check_laws(rollout, fragments, folder, 3)
    finally:
        wire.close()
    assert sorted({fragment.lane for fragment in fragments}) == list(range(lanes))


def test_nothing_is_kept_of_a_lane_that_has_left(tmp_path: Path) -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(tmp_path, 0, length=3)), rollout_over(envs) as rollout:
        fragments = iter(rollout.fragments())
        with hosting(envs.addresses[0], makers(tmp_path, 1, 2, length=3), lanes=2):
            taken = taken_until(fragments, lambda more: slots_of(more) >= {0, 1, 2})
        taken += taken_until(fragments, lambda more: all(lane.is_set_aside for lane in rollout.environments.lanes[1:]))
        taken += [next(fragments) for _ in range(5)]
        assert [len(lane.modules) for lane in rollout.environments.lanes] == [1, 0, 0]
        of_lanes = [lane for _, lane in rollout.returns.by_module["default_policy"]._open]
        assert (of_lanes, list(rollout.returns._open)) == ([0], [(0,)])
        rollout.drain()
        taken += list(fragments)
        check_laws(rollout, taken, tmp_path, 3)


class Kills(ConnectorV2):
    """Kills a host in one of its calls, while lanes are wherever they are."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.called, self.victim = call, 0, 0

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        if self.called == self.call:
            os.kill(self.victim, signal.SIGKILL)
        self.called += 1
        return batch


@pytest.mark.slow
@given(**strategies(call=(0, 60), lanes=(1, 2), fragment_length=(1, 9), at_once=bool, seed=(0, 1000)))
@settings(max_examples=examples(6), phases=[Phase.explicit, Phase.generate])
def test_a_host_may_be_killed_at_any_moment(
    tmp_path_factory: pytest.TempPathFactory, call: int, lanes: int, at_once: bool, **drawn: Any
) -> None:
    folder, envs, kills = tmp_path_factory.mktemp("log"), listening(hosts=2, limits=HASTY), Kills(call)
    kinds: dict[str, Any] = {"length": 20, "at_once": at_once}
    victim = HostProcess(envs.addresses[0], told(folder, 0, 1, **kinds), lanes=lanes, env=DoomedAgents)
    kills.victim = victim.process.pid
    try:
        with (
            hosting(envs.addresses[0], makers(folder, 2, 3, **kinds), lanes=lanes),
            rollout_over(envs, env_to_module_connector=lambda part: kills, **drawn) as rollout,
        ):
            fragments = iter(rollout.fragments())
            taken = taken_until(fragments, lambda taken: kills.called > call + 20)
            rollout.drain()
            taken += list(fragments)
            check_laws(rollout, taken, folder, 4)
    finally:
        victim.end()
