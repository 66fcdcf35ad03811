"""Alpha pipelines in rollouts, beside ConnectorV2 pieces: what they see, what is recorded, what is saved and merged."""

from dataclasses import replace
from typing import Any
from uuid import uuid4

import gymnasium as gym
import numpy as np
import pytest
import torch
from small_env import SmallEnv
from together import Together

from rollflow import DefaultModelConfig, MultiAgentRollout, Rollout
from rollflow.nodes.connectors.alpha import (
    ActionConnectorDataType,
    ActionConnectorPipeline,
    AgentConnector,
    AgentConnectorDataType,
    AgentConnectorPipeline,
    AgentConnectorsOutput,
    ClipRewardAgentConnector,
    ConnectorContext,
    ImmutableActionsConnector,
    SampleBatch,
    as_connector_v2,
    default_agent_connectors,
    register_lambda_action_connector,
    register_lambda_agent_connector,
)
from rollflow.nodes.connectors.state_watch import fingerprint
from rollflow.stream.data.errors import ConnectorError, StateError


class Doubling(SmallEnv):
    """The step's number as the observation and 3 times as the reward; the action as an info; 5 steps an episode."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)
    length = 5

    def look(self) -> Any:
        return np.full(1, self.t, np.float32)

    def pay(self, action: Any) -> float:
        return 3.0 * self.t

    def tell(self) -> dict[str, Any]:
        return {"action": int(self.action)} if self.t else {}


def pairs(data: Any) -> Any:
    """Observation and twice that."""
    data["new_obs"] = np.concatenate([data["new_obs"], 2 * data["new_obs"]])
    return data


Pairs = register_lambda_agent_connector("PairsOfObservations", pairs)
Ones = register_lambda_action_connector(
    "OnesForEnv", lambda actions, states, fetches: (0 * actions + 1, states, fetches)
)


def rollout_of(agent: list[Any] | None = None, action: list[Any] | None = None, **options: Any) -> Rollout:
    """A rollout of `Doubling` through these connectors."""
    if agent is not None:
        options["env_to_module_connector"] = lambda env: AgentConnectorPipeline(None, agent)
    if action is not None:
        options["module_to_env_connector"] = lambda env: ActionConnectorPipeline(None, action)
    return Rollout(Doubling, seed=0, **options)


def chunks_of(rollout: Rollout, count: int = 1) -> list[Any]:
    with rollout:
        return [chunk for _, f in zip(range(count), rollout.fragments(), strict=False) for chunk in f.episodes()]


def test_a_pipeline_changes_what_the_module_gets_and_what_is_recorded() -> None:
    rollout = rollout_of([Pairs(), ClipRewardAgentConnector(limit=7)], num_envs=2, fragment_length=7)
    assert rollout.module.observation_space.shape == (2,)
    chunks = chunks_of(rollout)
    assert sorted(len(chunk) for chunk in chunks) == [2, 2, 5, 5]
    for chunk in chunks:
        t = np.arange(len(chunk) + 1)
        np.testing.assert_array_equal(chunk.get_observations(), np.stack([t, 2 * t], axis=1))
        np.testing.assert_array_equal(chunk.get_rewards(), np.minimum(3 * t[1:], 7))


def test_the_environments_get_what_action_connectors_leave_and_the_choice_is_recorded() -> None:
    chunks = chunks_of(rollout_of(action=[Ones(), ImmutableActionsConnector()], num_envs=3, fragment_length=20))
    assert {int(action) for chunk in chunks for action in chunk.get_actions()} == {0, 1, 2}
    assert {info["action"] for chunk in chunks for info in chunk.get_infos()[1:]} == {1}


class Logs(AgentConnector):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def reset(self, env_id: str) -> None:
        self.calls.append(("reset", env_id))

    def on_policy_output(self, output: ActionConnectorDataType) -> None:
        self.calls.append(("output", output.env_id, int(output.output[0]), sorted(output.output[2])))

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data = ac_data.data
        self.calls.append(("data", float(data["new_obs"][0]), data["rewards"], data["terminateds"], data["t"]))
        return ac_data

    def get_state(self) -> dict[str, Any]:
        return {}


def test_connectors_are_reset_at_an_episodes_start_and_hear_each_choice_once() -> None:
    rollout = rollout_of(num_envs=1, fragment_length=6, env_to_module_connector=lambda env: Logs())
    logs = rollout.env_to_module["Logs"].pipeline.connectors[0]
    logs.calls.clear()
    chunks = chunks_of(rollout)
    actions = [int(action) for chunk in chunks for action in chunk.get_actions()]
    names = ["action_dist_inputs", "action_logp", "vf_preds"]
    expected: list[Any] = [("reset", "env_0_0"), ("data", 0.0, 0.0, False, -1)]
    for t in range(1, 6):
        expected += [("output", "env_0_0", actions[t - 1], names), ("data", float(t), 3.0 * t, t == 5, t - 1)]
    expected += [("reset", "env_0_0"), ("data", 0.0, 0.0, False, -1)]
    expected += [("output", "env_0_0", actions[5], names), ("data", 1.0, 3.0, False, 0)]
    assert logs.calls == expected


class Counts(AgentConnector):
    """Counts what it sees, and says so only where a subclass does."""

    def __init__(self, ctx: Any = None, seen: int = 0) -> None:
        super().__init__(ctx)
        self.seen = seen

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        self.seen += 1
        return ac_data


class SaysWhatItCounts(Counts):
    """Counts, and has a state."""

    def to_state(self) -> tuple[str, Any]:
        return "SaysWhatItCounts", {"seen": self.seen}


class CountsOnce(AgentConnector):
    """Counts what all of its copies see, each copy under an id of its own."""

    def __init__(self, ctx: Any = None, seen: dict[str, int] | None = None) -> None:
        super().__init__(ctx)
        self.seen, self.own = dict(seen or {}), uuid4().hex

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "own": uuid4().hex}

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        self.seen[self.own] = self.seen.get(self.own, 0) + 1
        return ac_data

    def to_state(self) -> tuple[str, Any]:
        return "CountsOnce", {"seen": dict(self.seen)}

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        counts = [state["params"]["seen"] for state in states]
        return {"params": {"seen": {own: max(each.get(own, 0) for each in counts) for own in set().union(*counts)}}}


def pieces(env: Any) -> list[Any]:
    return [AgentConnectorPipeline(None, [Pairs()]), AgentConnectorPipeline(None, [CountsOnce()])]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
def test_a_pipeline_runs_wherever_environments_do_and_its_state_comes_back(where: str) -> None:
    options: Any = {"num_envs": 4, "lanes": 2, "fragment_length": 8, "env_to_module_connector": pieces}
    rollout = rollout_of(action=[Ones()], where=where, **options)
    chunks = chunks_of(rollout, 4)
    assert {chunk.get_observations().shape[1] for chunk in chunks} == {2}
    assert sum(map(len, chunks)) == 4 * 8 * 2
    state = rollout.env_to_module.get_state()
    fresh = Rollout(Doubling, env_to_module_connector=pieces)
    fresh.env_to_module.set_state(state)
    (connector,) = fresh.env_to_module["AgentConnectorPipeline_2"].pipeline.connectors
    assert sum(connector.seen.values()) >= sum(len(chunk) for chunk in chunks)
    assert fingerprint(fresh.env_to_module.get_state()) == fingerprint(state)


def test_undeclared_state_is_refused_where_it_is_saved() -> None:
    rollout = Rollout("CartPole-v1", fragment_length=4, env_to_module_connector=lambda env: Counts())
    chunks_of(rollout)
    with pytest.raises(StateError, match="Counts changes 'seen' while it runs but declares no state"):
        rollout.env_to_module.get_state()


def test_a_connectors_params_are_its_state_and_different_ones_do_not_merge() -> None:
    rollout = Rollout("CartPole-v1", fragment_length=4, env_to_module_connector=lambda env: SaysWhatItCounts())
    chunks_of(rollout)
    piece = rollout.env_to_module["SaysWhatItCounts"]
    state = piece.get_state()
    assert state == {"SaysWhatItCounts": {"params": {"seen": piece.pipeline.connectors[0].seen}}}
    piece.set_state({"SaysWhatItCounts": {"params": {"seen": 70}}})
    assert piece.pipeline.connectors[0].seen == 70
    with pytest.raises(StateError, match="SaysWhatItCounts is given 2 different states to merge"):
        piece.merge_states([state, piece.get_state()])


def test_nested_connectors_forget_and_are_replaced() -> None:
    class Forgets(Counts):
        def reset_state(self) -> None:
            self.seen = 0

    context = ConnectorContext()
    connectors = Forgets(seen=3), Forgets(seen=4)
    inner = AgentConnectorPipeline(None, connectors[:1])
    outer = AgentConnectorPipeline(context, [inner])
    as_connector_v2(outer).reset_state()
    assert [each.seen for each in connectors] == [0, 4]
    inner.connectors = [connectors[1]]
    assert connectors[1].ctx is context
    outer.reset_state()
    assert connectors[1].seen == 0


class EarlierRewards(AgentConnector):
    """Makes the policy's input of the observation and the two rewards before."""

    def __init__(self) -> None:
        super().__init__()
        self.rewards = [0.0, 0.0]

    def reset(self, env_id: str) -> None:
        self.rewards = [0.0, 0.0]

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        self.rewards = [self.rewards[1], ac_data.data["rewards"]]
        batch = SampleBatch(obs=ac_data.data["new_obs"][None], prev_rewards=np.array([self.rewards], np.float32))
        return replace(ac_data, data=AgentConnectorsOutput(ac_data.data, batch))


def test_columns_for_the_policy_come_into_the_batch() -> None:
    seen: list[Any] = []

    class Module(torch.nn.Module):
        observation_space, action_space = Doubling.observation_space, Doubling.action_space

        def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
            seen.append(batch["prev_rewards"].clone())
            return {"action_dist_inputs": torch.zeros(len(batch["obs"]), 3)}

        forward_inference = forward_exploration

    chunks_of(rollout_of([EarlierRewards()], module=Module(), num_envs=1, fragment_length=4))
    assert [each.tolist() for each in seen[:4]] == [[[0.0, 0.0]], [[0.0, 3.0]], [[3.0, 6.0]], [[6.0, 9.0]]]


def test_a_recurrent_module_gets_its_own_states() -> None:
    rollout = Rollout(
        "CartPole-v1",
        num_envs=2,
        fragment_length=8,
        seed=0,
        model_config=DefaultModelConfig(use_lstm=True),
        env_to_module_connector=lambda env: default_agent_connectors(ConnectorContext()),
    )
    plain = Rollout("CartPole-v1", module=rollout.module, num_envs=2, fragment_length=8, seed=0)
    for mine, theirs in zip(chunks_of(rollout), chunks_of(plain), strict=True):
        np.testing.assert_array_equal(mine.get_actions(), theirs.get_actions())
        np.testing.assert_array_equal(mine.get_observations(), theirs.get_observations())


def test_a_pipeline_that_leaves_out_an_agent_is_refused() -> None:
    class Nothing(AgentConnector):
        def __call__(self, acd_list: list[AgentConnectorDataType]) -> list[AgentConnectorDataType]:
            return acd_list if acd_list[0].env_id == "probe" else []

    rollout = Rollout("CartPole-v1", env_to_module_connector=lambda env: Nothing())
    with pytest.raises(ConnectorError, match=r"Nothing left data of \[\], expected one item for each agent"):
        chunks_of(rollout)


# Alpha pipelines with several agents: those of one environment that are mapped to one policy come as one list


class SumOfAgents(AgentConnector):
    """Gives every agent the sum of what all agents of its policy see."""

    def __call__(self, acd_list: list[AgentConnectorDataType]) -> list[AgentConnectorDataType]:
        total = np.sum([each.data["new_obs"] for each in acd_list], axis=0, dtype=np.float32)
        for each in acd_list:
            each.data["new_obs"] = total
        return acd_list


def test_agents_of_one_module_in_one_environment_are_one_list() -> None:
    with MultiAgentRollout(
        lambda: Together({str(number): Doubling() for number in (1, 2, 3)}),
        num_envs=2,
        fragment_length=6,
        seed=0,
        module={"odd": None, "even": None},
        agent_to_module_mapping_fn=lambda agent_id, episode: "even" if agent_id == "2" else "odd",
        env_to_module_connector=lambda env: AgentConnectorPipeline(None, [SumOfAgents()]),
        module_to_env_connector=lambda env: ActionConnectorPipeline(None, [Ones()]),
    ) as rollout:
        fragment = next(iter(rollout.fragments()))
    episodes = list(fragment.episodes())
    assert len(episodes) == 4
    for episode in episodes:
        for agent_id, chunk in episode.agent_episodes.items():
            steps = np.arange(chunk.t_started, chunk.t + 1)
            expected = steps if agent_id == "2" else 2 * steps
            np.testing.assert_array_equal(chunk.get_observations()[:, 0], expected)
            assert {info["action"] for info in chunk.get_infos()[1:]} == {1}
    assert {int(a) for e in episodes for c in e.agent_episodes.values() for a in c.get_actions()} == {0, 1, 2}
