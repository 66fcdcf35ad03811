"""Policies with Alpha pipelines: saved with their learnt state, and loaded where their connectors are registered."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_policies import ACTIONS, BOX

from rollflow import DefaultModelConfig, Policy, Rollout
from rollflow.nodes.connectors import alpha
from rollflow.nodes.connectors.alpha import (
    _CONNECTORS,
    ActionConnectorPipeline,
    AgentConnector,
    AgentConnectorPipeline,
    ClipRewardAgentConnector,
    ConnectorContext,
    default_action_connectors,
    default_agent_connectors,
    register_connector,
    register_lambda_action_connector,
    register_lambda_agent_connector,
)
from rollflow.nodes.policies.part_records import from_plain, to_plain
from rollflow.stream import PolicyError

Halved = register_lambda_agent_connector("HalvedForPolicies", lambda data: {**data, "new_obs": data["new_obs"] / 2})
Flipped = register_lambda_action_connector(
    "FlippedForPolicies", lambda actions, states, fetches: (1 - actions, states, fetches)
)


class Centered(AgentConnector):
    """Subtracts the mean of what it has seen, and counts while it is in training."""

    def __init__(self, ctx: Any = None, total: float = 0.0, count: int = 0) -> None:
        super().__init__(ctx)
        self.total, self.count = total, count

    def transform(self, ac_data: Any) -> Any:
        if self.is_training:
            self.total, self.count = self.total + float(ac_data.data["new_obs"][0]), self.count + 1
        ac_data.data["new_obs"] = ac_data.data["new_obs"] - np.float32(self.total / max(self.count, 1))
        return ac_data

    def to_state(self) -> tuple[str, Any]:
        return "CenteredForPolicies", {"total": self.total, "count": self.count}


register_connector("CenteredForPolicies", Centered)
CONTEXT = ConnectorContext(observation_space=BOX, action_space=ACTIONS["box"])


def trained(path: Path, *, lstm: bool = False) -> Policy:
    """Save the policy of a rollout with Alpha pipelines on both sides, one of which has learnt."""
    with Rollout(
        "CartPole-v1",
        num_envs=2,
        fragment_length=16,
        num_fragments=2,
        seed=0,
        model_config=DefaultModelConfig(fcnet_hiddens=(8,), use_lstm=lstm, lstm_cell_size=6),
        env_to_module_connector=lambda env: AgentConnectorPipeline(
            None, [Halved(), Centered(), ClipRewardAgentConnector(None, limit=1.0)]
        ),
        module_to_env_connector=lambda env: ActionConnectorPipeline(None, [Flipped()]),
    ) as rollout:
        for _ in rollout.fragments():
            pass
        rollout.save_policy(path)
        return rollout.policy()


@pytest.mark.parametrize("lstm", [False, True])
def test_a_loaded_policy_acts_as_the_one_that_was_saved(lstm: bool, tmp_path: Path) -> None:
    policy = trained(tmp_path / "a", lstm=lstm)
    loaded = Policy.load(tmp_path / "a")
    rng = np.random.default_rng(0)
    for step in range(12):
        observations = rng.normal(size=(3, 4)).astype(np.float32)
        if step == 6:
            for each in (policy, loaded):
                each.reset(1)
        for each in (policy, loaded):
            each.act_batch(observations)
        for name in ("action_dist_inputs", "actions", "actions_for_env"):
            np.testing.assert_array_equal(policy.outputs[name], loaded.outputs[name])
        np.testing.assert_array_equal(loaded.outputs["actions_for_env"], 1 - loaded.outputs["actions"])
    loaded.save(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_connector_that_is_not_registered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "p")
    monkeypatch.delitem(_CONNECTORS, "HalvedForPolicies")
    with pytest.raises(PolicyError, match=r"no connector is registered by the name 'HalvedForPolicies'"):
        Policy.load(tmp_path / "p")


def test_a_connector_without_a_name_is_refused_where_it_is_saved(tmp_path: Path) -> None:
    class Own(AgentConnector):
        """Connector of a user, who forgot to_state."""

        def transform(self, ac_data: Any) -> Any:
            return ac_data

    with (
        Rollout(
            "CartPole-v1", env_to_module_connector=lambda env: AgentConnectorPipeline(None, [Own()]), fragment_length=2
        ) as rollout,
        pytest.raises(ValueError, match="Own has no to_state"),
    ):
        rollout.save_policy(tmp_path / "p")
    assert not (tmp_path / "p").exists()


# Every connector

RECIPES: dict[str, Any] = {
    "AgentConnectorPipeline": lambda: default_agent_connectors(CONTEXT),
    "ActionConnectorPipeline": lambda: default_action_connectors(CONTEXT),
    "ClipRewardAgentConnector": lambda: ClipRewardAgentConnector(CONTEXT, limit=2.0),
}


def registered() -> list[str]:
    """The names of rollflow's own connectors, which `get_connector` finds."""
    bases = {alpha.Connector, AgentConnector, alpha.ActionConnector, alpha.ConnectorPipeline}
    own = (each for name, each in vars(alpha).items() if name[0] != "_")
    return [
        cls.__name__ for cls in own if isinstance(cls, type) and issubclass(cls, alpha.Connector) and cls not in bases
    ]


@pytest.mark.parametrize("name", registered())
def test_every_connector_of_rollflow_comes_back_as_it_was(name: str) -> None:
    cls = getattr(alpha, name)
    connector = RECIPES.get(name, lambda: cls(CONTEXT))()
    arrays: dict[str, Any] = {}
    plain = to_plain(connector, "piece", arrays)
    assert plain["$connector"]["name"] == name
    again = from_plain(plain, "piece", dict(arrays))
    assert type(again) is type(connector)
    second: dict[str, Any] = {}
    assert to_plain(again, "piece", second) == plain
    assert second.keys() == arrays.keys()
