"""Deliberate differences between our connector pieces and Ray's on multi-agent episodes: what each does, and why."""

from collections.abc import Callable
from typing import Any

import numpy as np
import ray.rllib.connectors.common as ray_common
import ray.rllib.connectors.env_to_module as ray_env_to_module
import ray.rllib.connectors.module_to_env as ray_module_to_env
from both import Answer, ask, assert_same
from drawn_plays import ACTIONS, OBSERVATIONS, played
from drawn_turns import Told
from pieces import Module
from ray.rllib.connectors.connector_v2 import ConnectorV2 as RayConnectorV2
from ray.rllib.connectors.env_to_module.observation_preprocessor import (
    MultiAgentObservationPreprocessor as RayMultiAgentPreprocessor,
)
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode as RayEpisode

from rollflow import ConnectorV2, MultiAgentEpisode, nodes
from rollflow.stream import ConnectorError

BOTH = MultiAgentEpisode, RayEpisode


def two(made: type, steps: int = 0) -> Any:
    """Agents "a" and "b", with a step each, of which "a" alone sees the last ones."""
    told = Told()
    told.reset(["a", "b"])
    for _ in range(steps):
        told.go_on({"a": (True, False, True, ""), "b": (False, False, True, "")})
    return played(told, made=made)


def call(piece: Any, episodes: list[Any], batch: Any = None, module: Any = None, **given_: Any) -> Any:
    piece.input_action_space, piece.input_observation_space = ACTIONS, OBSERVATIONS
    batch = {} if batch is None else batch
    return piece(rl_module=module, batch=batch, episodes=episodes, explore=True, shared_data={}, **given_)


def differ(ours: Callable[[], Any], theirs: Callable[[], Any], mine: Any, other: Any) -> None:
    """Both answers are as told; an error type stands for being refused."""
    for answer, told in ((ask(ours), mine), (ask(theirs), other)):
        check(answer, told)


def check(answer: Answer, told: Any) -> None:
    if isinstance(told, type):
        assert isinstance(answer.error, told), answer
    else:
        assert answer.error is None, answer
        assert_same(answer.value, told, dtypes=False)


def test_an_agents_episode_has_its_own_space_not_that_of_all() -> None:
    made = []
    for pieces, type_ in zip((nodes, ray_env_to_module), BOTH, strict=True):
        episode, piece = two(type_), pieces.FlattenObservations(multi_agent=True)
        call(piece, [episode])
        made.append((episode.agent_episodes["a"].observation_space, piece.observation_space))
    assert made[0] == (made[0][1]["a"], made[1][1])
    assert made[1][0] == made[1][1]


def test_a_list_has_an_item_for_each_agent_in_turn() -> None:
    def paired(base: Any, made: type) -> Any:
        iterated = base.single_agent_episode_iterator([two(made)], zip_with_batch_column=[1, 2])
        return {each.agent_id: item for each, item in iterated}

    differ(lambda: paired(ConnectorV2, BOTH[0]), lambda: paired(RayConnectorV2, BOTH[1]), {"a": 1, "b": 2}, TypeError)


class Invented(nodes.MultiAgentObservationPreprocessor):
    def preprocess(self, observations: Any, episode: Any) -> Any:
        return {"b": np.zeros(2, np.float32)}


class RayInvented(RayMultiAgentPreprocessor):  # type: ignore[misc]
    def preprocess(self, observations: Any, episode: Any) -> Any:
        return {"b": np.zeros(2, np.float32)}


def test_an_agent_in_a_gap_has_no_last_observation_to_replace() -> None:
    """Theirs replaces an older one, which stands at another env step."""
    differ(
        lambda: call(Invented(), [two(BOTH[0], 1)]),
        lambda: call(RayInvented(), [two(BOTH[1], 1)]),
        ConnectorError,
        {},
    )


def test_an_agent_that_is_to_act_without_an_action_is_refused() -> None:
    batch = {"actions": {("e", "a", "m"): [1]}}
    differ(
        lambda: call(nodes.ListifyDataForVectorEnv(), [two(BOTH[0])], dict(batch)),
        lambda: call(ray_module_to_env.ListifyDataForVectorEnv(), [two(BOTH[1])], dict(batch)),
        ConnectorError,
        {"actions": [{"a": 1}]},
    )


def test_where_nobody_is_to_act_there_are_empty_actions() -> None:
    options: Any = {"normalize_actions": False, "clip_actions": True}

    def acted(behind: Any, made: type) -> Any:
        quiet = made("quiet")
        quiet.add_env_reset(observations={}, infos={})
        batch = call(behind.NormalizeAndClipActions(**options), [quiet])
        return call(behind.ListifyDataForVectorEnv(), [quiet], batch)

    differ(
        lambda: acted(nodes, BOTH[0]),
        lambda: acted(ray_module_to_env, BOTH[1]),
        {"actions": [{}]},
        KeyError,
    )


class Stateful(dict[str, Module]):
    model_config: dict[str, Any] = {"max_seq_len": 3}  # noqa: RUF012

    def is_stateful(self) -> bool:
        return True


def test_an_agent_without_a_step_has_no_row() -> None:
    def rows(common: Any, made: type) -> Any:
        modules, episode = Stateful(m=Module(True), n=Module(True)), two(made, 1)
        episode.to_numpy()
        options: Any = {"as_learner_connector": True}
        batch = call(common.AddObservationsFromEpisodesToBatch(**options), [episode], None, modules)
        batch = call(common.AddTimeDimToBatchAndZeroPad(**options), [episode], batch, modules)
        return [[np.shape(item) for item in items] for items in batch["obs"].values()]

    differ(lambda: rows(nodes, BOTH[0]), lambda: rows(ray_common, BOTH[1]), [[(3, 2)], []], IndexError)
