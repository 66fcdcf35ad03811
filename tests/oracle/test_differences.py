"""Deliberate differences between our episodes and pieces and Ray's that no test of our own shows: what each does."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pieces
import pytest
import ray.rllib.env.multi_agent_episode as ray_multi_agent
import ray.rllib.env.single_agent_episode as ray_single_agent
from both import ask, assert_same
from drawn_plays import ACTIONS, OBSERVATIONS, played
from drawn_turns import Told
from gymnasium import spaces
from pieces import Module, piece_of
from ray.rllib.connectors.connector_v2 import ConnectorV2 as RayConnectorV2
from ray.rllib.connectors.env_to_module.observation_preprocessor import (
    MultiAgentObservationPreprocessor as RayMultiAgentPreprocessor,
)

import rollflow
from rollflow import ConnectorV2, nodes
from rollflow.stream import ConnectorError


class Side(NamedTuple):
    """One of the two implementations."""

    single_agent: Any
    multi_agent: Any
    base: Any
    modules: tuple[Any, ...]

    def piece(self, name: str, **options: Any) -> Any:
        made = piece_of(self.modules, name, **options)
        made.input_action_space, made.input_observation_space = ACTIONS, OBSERVATIONS
        return made

    def call(self, name: str, episodes: list[Any], batch: Any = None, module: Any = None, **options: Any) -> Any:
        """What a piece makes of these episodes and a batch."""
        piece = self.piece(name, **options)
        return piece(rl_module=module, batch=batch or {}, episodes=episodes, explore=True, shared_data={})


OURS = Side(rollflow.SingleAgentEpisode, rollflow.MultiAgentEpisode, ConnectorV2, pieces.OURS)
THEIRS = Side(ray_single_agent.SingleAgentEpisode, ray_multi_agent.MultiAgentEpisode, RayConnectorV2, pieces.RAYS)


# One agent


def short(side: Side, steps: int = 6, **given: Any) -> Any:
    """Actions 0 and 1 in the lookback, 2 to 5 in the chunk."""
    numbers = {"observations": list(range(steps + 1)), "actions": list(range(steps)), "rewards": [0.0] * steps}
    return side.single_agent("e", **{**numbers, "len_lookback_buffer": 2, **given})


def no_items_one_hot(side: Side) -> Any:
    episode = short(side, action_space=spaces.Discrete(6)).to_numpy()
    return np.shape(episode.get_actions(slice(0, 0), one_hot_discrete=True))


def length_before_the_reset(side: Side) -> Any:
    return len(side.single_agent("e").to_numpy())


def starts_of_slices_beyond_the_chunk(side: Side) -> Any:
    return short(side)[9:12].t_started, short(side)[-9:1].t_started


def cut_of_nested_arrays_after_a_step(side: Side) -> Any:
    """Ray takes the keys of a dict for its items."""
    observations = [{"a": i, "b": i} for i in range(3)]
    episode = short(side, steps=2, observations=observations).to_numpy()
    episode.add_env_step({"a": 3, "b": 3}, 1, 1.0)
    return episode.cut(3).get_observations(0)


def ends_after_concatenation(side: Side) -> Any:
    episode = short(side, terminated=True, truncated=True)
    head = episode[:2]
    head.concat_episode(episode[2:])
    return head.is_terminated, head.is_truncated


def outputs_of_the_state_without_steps(side: Side) -> Any:
    episode = side.single_agent("e", observations=[0], extra_model_outputs={"action_logp": []})
    return list(side.single_agent.from_state(episode.get_state()).extra_model_outputs)


# Several agents

BOTH = {"observations": {"a": 1, "b": 1}, "actions": {"a": 0, "b": 0}, "rewards": {"a": 1.0, "b": 2.0}}


def grown(side: Side, *steps: dict[str, Any]) -> Any:
    episode = side.multi_agent("e", agent_episode_ids={"a": "e-a", "b": "e-b"})
    episode.add_env_reset(observations={"a": 0, "b": 0})
    for step in steps:
        episode.add_env_step(**step)
    return episode


def who_is_there_once_all_others_end(side: Side) -> Any:
    step = {**BOTH, "observations": {"a": 2, "b": 2, "c": 0}, "terminateds": {"a": True, "b": True}}
    episode = grown(side, BOTH, step)
    return episode.is_done, sorted(episode.agent_ids)


def actions_right_up_to_a_cut(side: Side) -> Any:
    hangs = {"observations": {"a": 2}, "actions": {"a": 1, "b": 1}, "rewards": {"a": 1.0, "b": 0.5}}
    waits = {"observations": {"a": 3}, "actions": {"a": 1}, "rewards": {"a": 1.0, "b": 0.25}}
    return grown(side, BOTH, hangs, waits, waits).cut(3).get_actions(slice(-3, None))["a"]


def outputs_by_key(side: Side) -> Any:
    step = {**BOTH, "observations": {"a": 2, "b": 2, "c": 0}}
    return grown(side, {**step, "extra_model_outputs": {"a": {"v": 1}, "b": {"v": 2}}}).get_extra_model_outputs("v")


# Pieces


def two(side: Side, steps: int = 0) -> Any:
    """Agents "a" and "b", of which "a" alone sees the last steps."""
    told = Told()
    told.reset(["a", "b"])
    for _ in range(steps):
        told.go_on({"a": (True, False, True, ""), "b": (False, False, True, "")})
    return played(told, made=side.multi_agent)


def id_after_training(side: Side) -> Any:
    """Ray adds the place in the list to the ids of a train batch's episodes, so that none comes twice."""
    episode = short(side)
    side.call("AddObservationsFromEpisodesToBatch", [episode], as_learner_connector=True)
    return episode.id_


def last_of_arrays(side: Side) -> Any:
    [[item]] = side.call("AddObservationsFromEpisodesToBatch", [short(side).to_numpy()])["obs"].values()
    return item


def infos_with_a_time_axis(side: Side) -> Any:
    """They are dicts of whatever an environment tells; Ray makes arrays of the numbers in them."""
    batch = {"infos": {("e",): [{"n": 1}]}}
    return side.call("AddTimeDimToBatchAndZeroPad", [short(side)], batch, Module(True))["infos"][("e",)]


class OpenLength(Module):
    model_config: dict[str, Any] = {}  # noqa: RUF012


def steps_of_rows_of_open_length(side: Side) -> Any:
    options: Any = {"module": OpenLength(True), "as_learner_connector": True}
    batch = side.call("AddTimeDimToBatchAndZeroPad", [short(side).to_numpy()], **options)
    return [int(np.sum(item)) for items in batch["loss_mask"].values() for item in items]


class Stateful(dict[str, Module]):
    model_config: dict[str, Any] = {"max_seq_len": 3}  # noqa: RUF012

    def is_stateful(self) -> bool:
        return True


def rows_of_agents(side: Side) -> Any:
    """Agent "b" has no step."""
    options: Any = {"module": Stateful(m=Module(True), n=Module(True)), "as_learner_connector": True}
    episodes = [two(side, 1).to_numpy()]
    batch = side.call("AddObservationsFromEpisodesToBatch", episodes, **options)
    batch = side.call("AddTimeDimToBatchAndZeroPad", episodes, batch, **options)
    return [[np.shape(item) for item in items] for items in batch["obs"].values()]


def has_its_own_space(side: Side) -> Any:
    episode, piece = two(side), side.piece("FlattenObservations", multi_agent=True)
    piece(rl_module=None, batch={}, episodes=[episode], explore=True, shared_data={})
    return episode.agent_episodes["a"].observation_space == piece.observation_space["a"]


def items_by_agent(side: Side) -> Any:
    iterated = side.base.single_agent_episode_iterator([two(side)], zip_with_batch_column=[1, 2])
    return {each.agent_id: item for each, item in iterated}


def observation_of_an_agent_in_a_gap(side: Side) -> Any:
    """Ray replaces an older one, which stands at another env step."""
    base: Any = nodes.MultiAgentObservationPreprocessor if side is OURS else RayMultiAgentPreprocessor
    piece = type("Invented", (base,), {"preprocess": lambda *args, **kwargs: {"b": np.zeros(2, np.float32)}})()
    piece.input_action_space, piece.input_observation_space = ACTIONS, OBSERVATIONS
    return piece(rl_module=None, batch={}, episodes=[two(side, 1)], explore=True, shared_data={})


def name_of(case: Any) -> str:
    return case.__name__ if callable(case) and not isinstance(case, type) else ""


@pytest.mark.parametrize(
    ("read", "ours", "theirs"),
    [
        (no_items_one_hot, (0, 6), (0,)),
        (cut_of_nested_arrays_after_a_step, {"a": 3, "b": 3}, AssertionError),
        (length_before_the_reset, 0, ValueError),
        (starts_of_slices_beyond_the_chunk, (4, 0), (9, -5)),
        (ends_after_concatenation, (True, True), (True, False)),
        (outputs_of_the_state_without_steps, ["action_logp"], AssertionError),
        (who_is_there_once_all_others_end, (False, ["a", "b", "c"]), (True, ["a", "b"])),
        (actions_right_up_to_a_cut, [1, 1, 1], [1, 1]),
        (outputs_by_key, {"a": [1], "b": [2]}, KeyError),
        (id_after_training, "e", "e_0"),
        (last_of_arrays, 6, AssertionError),
        (infos_with_a_time_axis, [{"n": 1}], [{"n": np.array([1])}]),
        (steps_of_rows_of_open_length, [4], KeyError),
        (rows_of_agents, [[(3, 2)], []], IndexError),
        (has_its_own_space, True, False),
        (items_by_agent, {"a": 1, "b": 2}, TypeError),
        (observation_of_an_agent_in_a_gap, ConnectorError, {}),
    ],
    ids=name_of,
)
def test_where_the_two_differ_ours_is_as_told(read: Callable[[Side], Any], ours: Any, theirs: Any) -> None:
    """An error type stands for being refused."""
    for side, told in ((OURS, ours), (THEIRS, theirs)):
        answer = ask(lambda side=side: read(side))
        if isinstance(told, type):
            assert isinstance(answer.error, told), answer
        else:
            assert answer.error is None, answer
            assert_same(answer.value, told, dtypes=False)
