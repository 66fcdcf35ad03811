"""The programs of the page "Connectors (Alpha)": each does what it means to do."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from rollflow.nodes.connectors.alpha import (
    ActionConnector,
    ActionConnectorDataType,
    ActionConnectorPipeline,
    AgentConnector,
    AgentConnectorDataType,
    AgentConnectorPipeline,
    AgentConnectorsOutput,
    ClipActionsConnector,
    ClipRewardAgentConnector,
    ConnectorContext,
    ConvertToNumpyConnector,
    ImmutableActionsConnector,
    ObsPreprocessorConnector,
    SampleBatch,
    ViewRequirementAgentConnector,
    register_lambda_action_connector,
    register_lambda_agent_connector,
)
from rollflow.stream.data.errors import ConnectorError

BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
CTX = ConnectorContext(observation_space=BOX, action_space=gym.spaces.Discrete(2))


def test_a_list_connector_sees_all_agents_of_a_policy() -> None:
    class MeanOfAgents(AgentConnector):
        def __call__(self, acd_list: list[AgentConnectorDataType]) -> list[AgentConnectorDataType]:
            mean = np.mean([each.data["new_obs"] for each in acd_list], axis=0)
            return [AgentConnectorDataType(each.env_id, each.agent_id, {"new_obs": mean}) for each in acd_list]

    agents = [AgentConnectorDataType("e", name, {"new_obs": np.full(3, x)}) for name, x in (("a", 1.0), ("b", 3.0))]
    made = AgentConnectorPipeline(CTX, [MeanOfAgents(CTX)])(agents)
    assert [(each.agent_id, each.data["new_obs"].tolist()) for each in made] == [("a", [2.0] * 3), ("b", [2.0] * 3)]


def test_transform_alone_is_enough_for_an_agent_connector() -> None:
    class Doubled(AgentConnector):
        def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
            ac_data.data["new_obs"] = 2 * ac_data.data["new_obs"]
            return ac_data

    (made,) = Doubled(CTX)([AgentConnectorDataType("e", "a", {"new_obs": 2.0})])
    assert made.data["new_obs"] == 4.0


@pytest.mark.parametrize("method", ["__call__", "transform"])
def test_an_action_connector_overrides_either_method(method: str) -> None:
    def change(self: ActionConnector, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        actions, states, fetches = ac_data.output
        return ActionConnectorDataType(
            ac_data.env_id, ac_data.agent_id, ac_data.input_dict, (-actions, states, fetches)
        )

    made = type("Negated", (ActionConnector,), {method: change})(CTX)
    assert made(ActionConnectorDataType("e", "a", {}, (3, [], {}))).output == (-3, [], {})


def test_a_lambda_agent_connector_filters_the_infos() -> None:
    def filter(d):  # type: ignore[no-untyped-def]  # as on the page
        del d.data[SampleBatch.INFOS]
        return d

    FilterInfosColumnAgentConnector = register_lambda_agent_connector("FilterInfosColumnAgentConnector", filter)
    connector = FilterInfosColumnAgentConnector(CTX)
    (made,) = connector([AgentConnectorDataType("e", "a", {"new_obs": 1.0, "infos": {"x": 1}})])
    assert (made.env_id, made.agent_id, made.data) == ("e", "a", {"new_obs": 1.0})
    assert type(made.data) is dict


def test_a_lambda_action_connector_doubles_actions() -> None:
    ScaleActionConnector = register_lambda_action_connector(
        "ScaleActionConnector", lambda actions, states, fetches: (2 * actions, states, fetches)
    )
    made = ScaleActionConnector(CTX)(ActionConnectorDataType("e", "a", {}, (3, ["state"], {"logp": 1})))
    assert made.output == (6, ["state"], {"logp": 1})


def test_a_function_that_returns_less_than_three_is_refused() -> None:
    scale = register_lambda_action_connector("OneValue", lambda actions, states, fetches: 2 * actions)
    with pytest.raises(ConnectorError, match=r"OneValue returned int, expected a tuple of three.*parentheses"):
        scale(CTX)(ActionConnectorDataType("e", "a", {}, (3, [], {})))


def test_a_pipeline_of_agent_connectors_is_edited() -> None:
    pipeline = AgentConnectorPipeline(CTX, [ClipRewardAgentConnector(), ViewRequirementAgentConnector()])
    pipeline.insert_before("ViewRequirementAgentConnector", ObsPreprocessorConnector())
    assert pipeline.names == ["ClipRewardAgentConnector", "ObsPreprocessorConnector", "ViewRequirementAgentConnector"]
    (made,) = pipeline([AgentConnectorDataType("e", "a", {"new_obs": np.ones(3, np.float32), "rewards": 7.0})])
    assert isinstance(made.data, AgentConnectorsOutput)
    np.testing.assert_array_equal(made.data.sample_batch["obs"], np.ones((1, 3), np.float32))


def test_agent_connectors_in_an_action_pipeline_are_refused_with_the_remedy() -> None:
    told = r"ClipRewardAgentConnector, expected .* goes into an AgentConnectorPipeline"
    with pytest.raises(ConnectorError, match=told):
        ActionConnectorPipeline(CTX, [ClipRewardAgentConnector(), ViewRequirementAgentConnector()])


def test_a_pipeline_of_action_connectors_is_edited() -> None:
    pipeline = ActionConnectorPipeline(
        CTX, [ConvertToNumpyConnector(), ClipActionsConnector(), ImmutableActionsConnector()]
    )
    pipeline.remove("ImmutableActionsConnector")
    assert pipeline.names == ["ConvertToNumpyConnector", "ClipActionsConnector"]
    made = pipeline(ActionConnectorDataType("e", "a", {}, (torch.tensor([1, 0]), [], {})))
    made.output[0][0] = 5  # it can be written to
    assert made.output[0].tolist() == [5, 0]


def test_for_training_is_empty_in_evaluation() -> None:
    pipeline = AgentConnectorPipeline(CTX, [ObsPreprocessorConnector(), ViewRequirementAgentConnector()])
    data = [AgentConnectorDataType("e", "a", {"new_obs": np.ones(3, np.float32)})]
    assert pipeline.is_training
    assert pipeline(data)[0].data.for_training["new_obs"].tolist() == [1.0] * 3
    pipeline.in_eval()
    data = [AgentConnectorDataType("e", "a", {"new_obs": np.ones(3, np.float32)})]
    output = pipeline(data)[0].data
    assert (output.for_training, output.raw_dict["new_obs"].tolist()) == ({}, [1.0] * 3)


def test_connectors_of_a_nested_pipeline_have_its_context() -> None:
    inner = ActionConnectorPipeline(None, [ClipActionsConnector()])
    outer = ActionConnectorPipeline(ConnectorContext(action_space=gym.spaces.Box(0.0, 4.0, (1,))), [inner])
    inner.append(ImmutableActionsConnector())
    made = outer(ActionConnectorDataType("e", "a", {}, (np.array([5.0], np.float32), [], {}))).output[0]
    assert made.tolist() == [4.0]
    assert not made.flags.writeable
    with pytest.raises(ConnectorError, match="ConvertToNumpyConnector"):  # which is not there
        inner.remove(ConvertToNumpyConnector)


@pytest.mark.parametrize(("options", "expected"), [({"sign": True}, 1.0), ({"limit": 2.0}, 2.0), ({}, 7.0)])
def test_rewards_are_clipped_by_their_sign_or_a_limit(options: dict[str, float], expected: float) -> None:
    (made,) = ClipRewardAgentConnector(CTX, **options)([AgentConnectorDataType("e", "a", {"rewards": 7.0})])
    assert made.data == {"rewards": expected}
