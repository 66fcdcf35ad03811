"""`where="auto"` with several agents: measured without a trace, and what is announced is made."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from numbered_agents import NumberedAgents
from serial_module import SerialModule

from rollflow.nodes import ArrayStep, ConnectorV2, MultiAgentRollout, MultiAgentVectorEnv
from rollflow.nodes.rollout import placement_probe
from rollflow.nodes.rollout.placement_cost_model import PlacementChoice, fastest
from rollflow.nodes.work_timing import Took


@pytest.fixture(autouse=True)
def _by_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing tried in the places themselves, which takes seconds."""
    monkeypatch.setattr("rollflow.nodes.rollout.placement.is_worth_while", lambda choices, measured: False)


def makers() -> list[Any]:
    return [partial(NumberedAgents, slot, agents=2, nested=0, at_once=True) for slot in range(4)]


@pytest.fixture
def _waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it measured that environments sleep for 10 ms a step, and all else of a vector step takes 0.4 ms.

    The meters' share of the environments is by the clock, so that a busy machine has it look smaller than it is.
    """

    def stepped(parts: Sequence[Any]) -> list[Any]:
        times = []
        for part in parts:
            part()
            env_s = 0.01 * part.rollout.environments.num_envs
            times.append(Took(env_s + 4e-4, env_s / (env_s + 4e-4), env_s + 4e-4))
        return times

    def share_of_envs(trial: Any) -> float:
        env_s = 0.01 * trial.rollout.environments.num_envs
        return float(env_s / (env_s + 4e-4))

    monkeypatch.setattr(placement_probe, "in_turns", stepped)
    monkeypatch.setattr(placement_probe._Trial, "share_of_envs", share_of_envs)
    monkeypatch.setattr("rollflow.nodes.rollout.placement.core_count", lambda: 2)


@pytest.mark.usefixtures("_waits")
def test_environments_that_wait_are_put_into_threads() -> None:
    options: Any = {"module": SerialModule(), "fragment_length": 3, "num_fragments": 1, "seed": 0}
    with MultiAgentRollout(makers(), where="auto", **options) as rollout:
        assert len(list(rollout.fragments())) == 4
        text = rollout.explain()
    assert "4 lanes × 1 environment × 2 agents, a thread each" in text
    assert "where='threads': a step of 4 environments takes 40000 µs (100% of it waiting), all else" in text


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lanes": 2}, {"workers": 1}, {"max_batch": 4}], ids=str)
def test_what_is_announced_is_what_is_made(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PlacementChoice] = []

    def chosen(choices: Sequence[PlacementChoice], worth: float) -> PlacementChoice:
        made.append(fastest(choices, worth))
        return made[-1]

    monkeypatch.setattr("rollflow.nodes.rollout.placement.fastest", chosen)
    rollout = MultiAgentRollout(makers(), where="auto", module=SerialModule(), **options)
    rollout.close()
    [choice] = made
    assert f"{choice} " in rollout.placement
    assert rollout.environments.num_lanes == (choice.lanes or 1)


def test_modules_and_pieces_stay_as_they_were() -> None:
    class Counting(ConnectorV2):
        calls = 0

        def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return batch

    piece, module = Counting(), SerialModule()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    rollout = MultiAgentRollout(
        makers(), where="auto", module={"default_policy": module}, env_to_module_connector=lambda part: piece, seed=0
    )
    rollout.close()
    assert piece.calls == 0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.rand(1), drawn)


def test_whole_rollouts_are_ruled_out_where_modules_can_not_be_handed_over() -> None:
    rollout = MultiAgentRollout(makers(), where="auto", module=SerialModule(), agent_to_module_mapping_fn=Unpicklable())
    rollout.close()
    assert "not where='rollouts': the module and the connectors can't go to another process" in rollout.placement


class Unpicklable:
    """A mapping that stays in its process."""

    def __call__(self, agent: Any, episode: Any) -> str:
        return "default_policy"

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


def test_what_is_here_already_stays_here() -> None:
    spaces = NumberedAgents(0, agents=1, nested=0)

    class Ready(MultiAgentVectorEnv):
        num_envs, possible_agents = 1, ("agent 0",)
        observation_spaces, action_spaces = spaces.observation_spaces, spaces.action_spaces

        def reset_arrays(self, seeds: Any) -> Any:
            raise NotImplementedError

        def step_arrays(self, actions: Any) -> ArrayStep:
            raise NotImplementedError

    rollout = MultiAgentRollout(Ready(), where="auto", module=SerialModule())
    rollout.close()
    assert rollout.placement == "where='inline': these vector environments are here already"
