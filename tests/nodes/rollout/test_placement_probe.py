"""Placement probe: it measures without a trace, and never chooses a place that refuses."""

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from idle_env import Given
from numbered_module import NumberedModule

from rollflow.nodes import (
    ConnectorV2,
    DefaultModelConfig,
    FlattenObservations,
    MetricsLogger,
    OneHotObservations,
    RLModule,
    Rollout,
)
from rollflow.nodes.rollout.placement_cost_model import PlacementChoice, fastest
from rollflow.stream import EnvError, ModuleError


class Waits(Given):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.01)  # what is measured: that time passes without work
        return super().step(action)


class Works(Given):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        until = time.thread_time() + 1e-3
        while time.thread_time() < until:
            pass
        return super().step(action)


class Policy(torch.nn.Module):
    """Counts batches while training, and draws random numbers."""

    def __init__(self, inputs: int = 3, actions: int = 7) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(inputs), torch.nn.Linear(inputs, actions)

    def forward_exploration(self, batch: Any) -> Any:
        return {"action_dist_inputs": self.linear(self.norm(batch["obs"])) + torch.randn(1)}

    forward_inference = forward_exploration


@pytest.fixture(autouse=True)
def _by_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried, which takes seconds; see test_race.py."""
    monkeypatch.setattr("rollflow.nodes.rollout.placement.is_worth_while", lambda choices, slots: False)


def placement(env: Any, **options: Any) -> str:
    """Return the reason that a rollout gives for its place, after a short run there."""
    options = {"module": NumberedModule(), "num_envs": 4, "fragment_length": 2, "num_fragments": 1} | options
    with Rollout(env, where="auto", seed=0, **options) as rollout:
        fragments = list(rollout.fragments())
        assert len(fragments) == rollout.environments.num_lanes
    return rollout.placement


def test_an_environment_that_waits_is_measured_and_put_into_threads() -> None:
    options: Any = {"module": NumberedModule(), "num_envs": 4, "num_fragments": 1, "fragment_length": 3, "seed": 0}
    with Rollout(Waits, where="auto", **options) as rollout:
        assert len(list(rollout.fragments())) == 4
        told = rollout.explain()
    assert "4 lanes × 1 slot, a thread each" in told
    assert "where='threads': a step of 4 environments takes " in told


def test_what_is_here_already_stays_here() -> None:
    with Rollout(gym.make_vec("CartPole-v1", num_envs=3), where="auto") as rollout:
        assert "where='inline': these vector environments are here already" in rollout.explain()


def test_a_vectorized_form_is_measured_as_such() -> None:
    told = placement("CartPole-v1", module=None, num_envs=8, max_batch=8)
    assert ": a step of 8 environments takes " in told


def test_what_was_asked_for_stays() -> None:
    with Rollout(Waits, where="auto", lanes=2, num_envs=4, module=NumberedModule()) as rollout:
        assert "2 lanes × 2 slots, a thread each" in rollout.explain()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lanes": 1}, {"lanes": 3}, {"workers": 1}, {}], ids=str)
def test_what_is_announced_is_what_is_made(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PlacementChoice] = []

    def chosen(choices: Sequence[PlacementChoice], worth: float) -> PlacementChoice:
        made.append(fastest(choices, worth))
        return made[-1]

    monkeypatch.setattr("rollflow.nodes.rollout.placement.fastest", chosen)
    rollout = Rollout(Works, where="auto", num_envs=4, module=NumberedModule(), **options)
    rollout.environments.close()
    [choice] = made
    assert f"{choice} " in rollout.placement
    assert rollout.environments.num_lanes == (choice.lanes or 1) == options.get("lanes", choice.lanes or 1)
    if choice.workers is not None:
        assert f"in {choice.workers} worker process" in rollout.environments.describe()


# Nothing is left of it


@pytest.mark.parametrize("how", ["instance", "function"])
def test_the_module_given_stays_as_it_was(how: str) -> None:
    module = Policy(16, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    given: Any = module if how == "instance" else lambda observations, actions: module
    told = placement("FrozenLake-v1", module=given, lanes=1, env_to_module_connector=lambda env: OneHotObservations())
    assert "all else of a vector step" in told
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    seen: Any = module.observation_space
    assert seen.shape == (16,)  # what the pieces make, not what the environment gives


def test_pieces_that_a_function_keeps_stay_as_they_were() -> None:
    class Counting(ConnectorV2):
        calls = 0

        def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return batch

    pieces = [Counting(), Counting()]
    rollout = Rollout(
        Given,
        module=NumberedModule(),
        where="auto",
        env_to_module_connector=lambda env: pieces[0],
        module_to_env_connector=lambda env, spaces, device: [pieces[1]],
    )
    rollout.environments.close()
    assert [piece.calls for piece in pieces] == [0, 0]
    assert "nothing could be measured" not in rollout.placement
    assert rollout.env_to_module[0] is pieces[0]


def test_nobody_else_s_random_numbers_are_used() -> None:
    class Draws(Given):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            np.random.random(random.randint(1, 3))
            return super().step(action)

    Given.action_space.seed(3)
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)

    def state() -> list[Any]:
        spaces = Given.action_space.np_random.bit_generator.state
        return [str(torch.get_rng_state()), str(np.random.get_state()), str(random.getstate()), str(spaces)]

    before = state()
    rollout = Rollout(Draws, module=Policy(), where="auto", num_envs=4)
    rollout.environments.close()
    assert "all else of a vector step" in rollout.placement
    assert state() == before


def test_the_environment_that_was_tried_is_closed() -> None:
    made: list[Any] = []

    class Closes(Given):
        closed = 0

        def __init__(self) -> None:
            made.append(self)

        def close(self) -> None:
            self.closed += 1

    rollout = Rollout(Closes, module=NumberedModule(), where="auto", max_batch=2, num_envs=2)
    rollout.environments.close()
    assert [env.closed for env in made] == [1, 1, 1]


# What is measured


def test_a_module_is_measured_behind_the_pieces() -> None:
    class Slow(RLModule):
        def _forward(self, batch: Any, **kwargs: Any) -> Any:
            assert batch["obs"].shape[1:] == (16,)
            time.sleep(0.05)
            return {"action_dist_inputs": torch.zeros(len(batch["obs"]), 4)}

    told = placement("FrozenLake-v1", module=Slow(), lanes=1, env_to_module_connector=lambda env: FlattenObservations())
    [rest] = [part for part in told.split(", ") if part.startswith("all else of a vector step ")]
    assert float(rest.split()[6]) > 10e3  # µs; a hundredth of it without the module


def test_a_stateful_module_is_measured_with_its_state() -> None:
    config = DefaultModelConfig(use_lstm=True, lstm_cell_size=4)
    told = placement(Given, module=None, model_config=config, lanes=1, max_batch=4)
    assert "all else of a vector step" in told


@pytest.mark.parametrize(("env", "share"), [(Waits, (0.9, 1.0)), (Works, (0.0, 0.2))])
def test_waiting_is_told_from_working(env: Any, share: tuple[float, float]) -> None:
    told = placement(env, lanes=1, max_batch=4)
    percent = float(told.split("(")[1].split("%")[0]) / 100
    assert share[0] <= percent <= share[1]


# What a place refuses


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"max_batch": 2},
            "not where='rollouts': max_batch, max_wait and forward_in_thread are for a forward pass",
        ),
        ({"forward_in_thread": True}, "not where='rollouts': max_batch, max_wait and forward_in_thread are for"),
        ({"max_wait": 0.001}, "not where='rollouts': max_batch, max_wait and forward_in_thread are for"),
        ({"metrics": object()}, "not where='rollouts': metrics of type object can't be merged"),
        ({"module": lambda *spaces: Locked()}, "not where='rollouts': the module and the connectors can't go"),
    ],
    ids=["max_batch", "forward_in_thread", "max_wait", "metrics", "module"],
)
def test_what_rollouts_can_not_do_is_done_elsewhere(options: dict[str, Any], why: str) -> None:
    assert why in placement(Works, **options)


class Locked(NumberedModule):
    """Can be copied, but not pickled."""

    def setup(self) -> None:
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> "Locked":
        return Locked(self.observation_space, self.action_space)


def test_an_environment_that_can_not_be_pickled_stays_in_this_process() -> None:
    lock = threading.Lock()

    def make() -> Any:
        assert not lock.locked()
        return Works()

    told = placement(make)
    assert "not where='processes': the environment can't go to another process: cannot pickle" in told
    assert "not where='rollouts'" in told


def test_infos_that_can_not_be_packed_stay_in_this_process() -> None:
    class Tells(Works):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return (*super().step(action)[:4], {"scene": object()})

    told = placement(Tells)
    assert "not where='processes': the environment can't go to another process: infos[0]['scene']: <object" in told


@pytest.mark.slow
def test_a_module_on_a_device_is_not_copied_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.nodes.rollout.placement_probe.device_of", lambda module: torch.device("cuda:0"))
    assert "not where='rollouts': the module acts on cuda:0, where a copy for each worker is none" in placement(Works)
    assert "not where" not in placement(Given, device="cpu")


# What can't be measured


def test_what_can_not_be_measured_stays_inline_and_says_so() -> None:
    class Once(Policy):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is one alone")

    class Rare(MetricsLogger):
        rare = True

    class Logs(ConnectorV2):
        def __call__(self, *, batch: Any, metrics: Any, **kwargs: Any) -> Any:
            assert metrics.rare
            return batch

    told = placement(Given, metrics=Rare(), env_to_module_connector=lambda env: Logs())
    assert told.startswith("where='inline': nothing could be measured: AttributeError: 'MetricsLogger' object has no")
    with pytest.raises(ModuleError, match="module 'Once' can't be copied: there is one alone"):
        placement(Given, module=Once())


def test_errors_are_those_of_the_rollout_itself() -> None:
    def fails() -> Any:
        raise OSError("no such simulator")

    with pytest.raises(EnvError, match="raised OSError: no such simulator"):
        Rollout(fails, where="auto")
    with pytest.raises(EnvError, match="environment 'Nowhere-v0' can't be made"):
        Rollout("Nowhere-v0", where="auto")
    with pytest.raises(ModuleError, match="module is object, which has no method forward_exploration"):
        Rollout(Given, module=object(), where="auto")
    with pytest.raises(ValueError, match="max_batch is 1, expected at least 2: a lane's slots go together"):
        Rollout(Given, module=NumberedModule(), where="auto", num_envs=2, lanes=1, max_batch=1)
