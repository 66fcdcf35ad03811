"""Mistakes of a first program get one line: what was wrong, where, and what was expected."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from graph_rows import row
from gymnasium import spaces
from numbered_agents import NumberedAgents

from rollflow import ConnectorV2, GeneralAdvantageEstimation, MultiAgentRollout, RLModule, Rollout
from rollflow.nodes import SingleAgentObservationPreprocessor
from rollflow.stream import ConnectorError, GraphError, ModuleError


class Gives(RLModule):
    """Gives more than it should, beside what it chooses actions by."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.more = more

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        count = len(batch["obs"])
        logits = self.more.get("action_dist_inputs", lambda batch: torch.zeros(count, 2))(batch)
        return {**{name: make(batch) for name, make in self.more.items()}, "action_dist_inputs": logits}


def run(module: Any, **options: Any) -> None:
    with Rollout("CartPole-v1", num_envs=2, fragment_length=4, num_fragments=1, module=module, **options) as rollout:
        list(rollout.batches())


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "inline") for name in ("obs", "rewards", "terminateds", "truncateds", "infos", "policy_version")),
        ("rewards", "rollouts"),
    ],
)
def test_a_module_does_not_give_what_the_rollout_records(name: str, where: Any) -> None:
    told = rf"Gives.forward_exploration returned '{name}', which the rollout records itself; expected what the module"
    with pytest.raises(ModuleError, match=told):
        run(Gives(**{name: lambda batch: torch.zeros(len(batch["obs"]))}), where=where, seed=0)


def test_a_module_gives_tensors_to_choose_actions_by() -> None:
    with pytest.raises(ModuleError, match=r"returned 'action_dist_inputs' with a ndarray, expected tensors"):
        run(Gives(action_dist_inputs=lambda batch: np.zeros((2, 2), np.float32)))


def test_a_device_that_there_is_not_is_named() -> None:
    with pytest.raises(ModuleError, match="device is 'gpu0', to which the module can't go: "):
        Rollout("CartPole-v1", device="gpu0")


def test_a_module_that_can_not_be_made_for_the_spaces_says_for_which() -> None:
    class ForBoxes(RLModule):
        def setup(self) -> None:
            self.layer = torch.nn.Linear(4, self.action_space.shape[0])  # CartPole's has no axis

    with pytest.raises(IndexError) as raised:
        Rollout("CartPole-v1", module=ForBoxes)
    [note] = raised.value.__notes__
    assert note.startswith("where a module is made for observations in Box(")
    assert note.endswith("actions in Discrete(2); see docs/how_to/modules.md#outputs")


def without_annotation(fragment):  # type: ignore[no-untyped-def]
    """Says nothing of what it gives."""


def annotated(fragment: Any) -> int:
    return 1


@pytest.mark.parametrize(
    ("node", "remedy"),
    [(without_annotation, ": def sink(item) -> None"), (annotated, "connect it to an inlet, or make it an output")],
    ids=["without annotation", "annotated"],
)
def test_an_outlet_that_is_connected_to_nothing_is_told_with_the_remedy(node: Any, remedy: str) -> None:
    graph = row(rollout=Rollout("CartPole-v1"), last=node)
    with pytest.raises(GraphError, match=r"outlet 'last.out' is connected to nothing") as raised:
        graph.validate()
    assert str(raised.value).endswith(remedy)


def test_a_preprocessor_that_forgets_to_return_is_named() -> None:
    class Forgets(SingleAgentObservationPreprocessor):
        def preprocess(self, observation: Any, episode: Any) -> Any:
            """Gives nothing."""

    with pytest.raises(ConnectorError, match="Forgets: preprocess gave None, expected the observation") as raised:
        run(None, env_to_module_connector=lambda env: Forgets(), seed=0)
    assert any("in connector piece 'Forgets'" in note for note in raised.value.__notes__)


class Changes(ConnectorV2):
    """Does something to the batch, and says that observations are of another shape if `space` is one."""

    def __init__(self, change: Any = lambda batch: None, space: Any = None) -> None:
        self.change, self.space = change, space
        super().__init__()

    def recompute_output_observation_space(self, observation_space: Any, action_space: Any) -> Any:
        return self.space or observation_space

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.change(batch)
        return batch


WRONG_PIECES: dict[str, tuple[str, Changes, str]] = {
    "deletes actions": ("module_to_env", Changes(lambda batch: batch.pop("actions")), "'actions'"),
    "too few actions": ("module_to_env", Changes(lambda batch: batch.update(actions=[0])), "column 'actions': got"),
    "a list": ("env_to_module", Changes(lambda batch: batch.update(obs=[[0.0] * 4] * 2)), "'list' object has no"),
    "too few rows": (
        "env_to_module",
        Changes(lambda batch: batch.update(obs=[np.zeros(4)])),
        r"has shape \[1, 2\], exp",
    ),
    "another space": ("env_to_module", Changes(space=spaces.Box(-1, 1, (7,))), r"'obs' has shape \[2, 4\], expected"),
    "another length": ("learner", Changes(lambda batch: batch.update(mine=[1] * 5)), "column 'mine' has 5 rows"),
}


@pytest.mark.parametrize("case", WRONG_PIECES)
def test_a_piece_that_leaves_what_others_can_not_take_is_named(case: str) -> None:
    pipeline, piece, told = WRONG_PIECES[case]
    with pytest.raises((AttributeError, KeyError, ValueError), match=told) as raised:
        run(None, **{f"{pipeline}_connector": lambda *spaces: piece}, seed=0)
    assert "behind the connector piece Changes" in raised.value.__notes__


def test_the_default_module_says_what_takes_other_observations() -> None:
    class Square(gym.Env[Any, Any]):
        observation_space = spaces.Box(-1, 1, (2, 3))
        action_space = spaces.Discrete(2)

    with pytest.raises(ModuleError, match="the default module takes no others; FlattenObservations as an env_to_modul"):
        Rollout(Square)


def test_pieces_that_want_a_module_say_where_it_is_missing() -> None:
    piece: ConnectorV2 = GeneralAdvantageEstimation()
    with Rollout("CartPole-v1", num_envs=2, fragment_length=4, num_fragments=1, seed=0) as rollout:
        episodes = next(iter(rollout.fragments())).episodes()
    with pytest.raises(ModuleError, match="needs values, and there is no module: expected module=… where the pipeline"):
        piece(rl_module=None, batch={}, episodes=list(episodes), shared_data={})


@pytest.mark.parametrize(
    ("mapping", "told"),
    [
        (lambda agent: "x" if agent == "agent 0" else "y", r"it raised TypeError\(.*takes 1 positional argument"),
        (lambda agent, episode: {"agent 0": "x"}.get(agent, "Y"), r"it named 'Y', 'x'"),
    ],
)
def test_what_a_mapping_of_agents_gave_is_told(mapping: Any, told: str) -> None:
    expected = rf"module '.': which agents it serves, .* gave for their ids \({told}"
    with pytest.raises(ModuleError, match=expected):
        MultiAgentRollout(lambda: NumberedAgents(0), module={"x": None, "y": None}, agent_to_module_mapping_fn=mapping)


@torch.inference_mode()
def test_a_rollout_made_in_inference_mode_takes_weights() -> None:
    with Rollout("CartPole-v1", num_envs=2, fragment_length=4, num_fragments=3) as rollout:
        versions = [
            (batch["policy_version"][0], rollout.publish(rollout.module.state_dict())) for batch in rollout.batches()
        ]
    assert versions == [(0, 1), (1, 2), (2, 3)]
