"""Callables that make a `MultiAgentVectorEnv` each: a lane by itself, here, in worker processes and on hosts."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from counted_agents import Counted
from fragment_equality import in_time
from places import rollout_at

from rollflow import MultiAgentRollout
from rollflow.nodes import EnvHost, RandomModule
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.remote.env_host import HostLane, made_lanes
from rollflow.stream import EnvError


def told(makers: Any, place: str = "inline", **envs: Any) -> list[Any]:
    """All that four fragments of each lane tell of the agents' episodes, lane by lane."""
    acts, given = {"module": RandomModule}, {"fragment_length": 4, "num_fragments": 4, "seed": 3}
    with rollout_at(place, makers, kind=MultiAgentRollout, acts=acts, envs=envs, **given) as made, made as rollout:
        fragments = in_time(list(rollout.fragments()))
    return [
        (
            *(fragment.lane, fragment.sequence, episode.id_, own.agent_id, own.get_observations().tolist()),
            *(own.get_actions().tolist(), own.get_rewards().tolist(), own.get_infos()),
            *(own.is_terminated, own.is_truncated),
        )
        for fragment in in_time(fragments)
        for episode in fragment.episodes()
        for own in episode.agent_episodes.values()
    ]


@pytest.mark.parametrize("place", ["processes", "hosts"])
def test_each_is_a_lane_by_itself_and_the_same_everywhere(place: str) -> None:
    makers = [partial(Counted, number) for number in range(2)]
    here = told(makers, lanes=2)
    assert {(row[0], row[4][0][0]) for row in here} == {(0, 0), (1, 1)}  # of lane 0 the first
    assert {(row[4][0][1], row[8:]) for row in here if any(row[8:])} == {(0, (True, False)), (1, (False, True))}
    infos = {tuple(info) for row in here for info in row[7] if info}
    assert infos == {("seed",), ("step",), ("begins",)}
    assert told(makers, place, lanes=2) == here
    one = Counted(0) if place == "hosts" else makers[0]
    assert told(one, place) == told(makers[0]) == told(Counted(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"num_envs": 2}, {"num_envs": 4, "lanes": 2}, {"num_envs": 2, "lanes": 1, "where": "processes"}]
)
def test_they_do_not_share_a_lane(options: Any) -> None:
    with pytest.raises(EnvError, match="a MultiAgentVectorEnv of 2 environments, which is a lane by itself; expected"):
        MultiAgentRollout(partial(Counted, 0), module=RandomModule, **options)


def test_there_are_as_many_environments_as_are_asked_for() -> None:
    assert told(partial(Counted, 0, 1), num_envs=2, lanes=2)[-1][0] == 1
    message = "num_envs is 2 and lanes is 2, but 4 environments in 2 lanes were made; expected"
    with pytest.raises(EnvError, match=message):
        MultiAgentRollout(partial(Counted, 0), module=RandomModule, num_envs=2, lanes=2)
    with pytest.raises(EnvError, match="num_envs is 3 and lanes is None, but 2 environments in 1 lanes were made"):
        EnvHost(Counted(0), num_envs=3)
    with pytest.raises(EnvError, match=r"^num_envs is -1, expected at least 1$"):
        EnvHost(partial(Counted, 0), num_envs=-1)


def test_those_that_are_made_here_are_closed_and_one_that_is_given_is_not() -> None:
    envs = [Counted(number) for number in range(3)]
    told([lambda env=env: env for env in envs[:2]], lanes=2)  # type: ignore[misc]
    told(envs[2])
    assert [env.is_closed for env in envs] == [True, True, False]


class Broken(Counted):
    """The environment of number 2 gives a reward in its second step that is no number."""

    def step_arrays(self, actions: Any) -> Any:
        made = super().step_arrays(actions)
        if self.number == 2 and self.steps[0] == 2:
            made.rewards[0][1, 0] = np.nan
        return made


@pytest.mark.parametrize("place", ["inline", "threads", "processes", "rollouts"])
def test_errors_name_an_environment_by_its_number_in_the_rollout(place: str) -> None:
    makers = [partial(Broken, number) for number in range(3)]
    with pytest.raises(EnvError, match=r"^environment 5, env step 1, agent 'a': its reward is nan"):
        told(makers, place, lanes=3)


def test_a_host_counts_the_environments_of_its_lanes_before() -> None:
    makers = [partial(Counted, number) for number in range(3)]
    lanes, _ = made_lanes(makers, None, 3, None, lambda maker, index: HostLane(maker, index, Deviations()))
    lanes[2].env.env.reset_arrays = lambda seeds: None
    with pytest.raises(EnvError, match=r"^environments from 4: reset_arrays gave a NoneType"):
        lanes[2].env.reset()
