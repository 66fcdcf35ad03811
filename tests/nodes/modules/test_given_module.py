"""Policies that are no torch module: functions of observations, and objects with two methods, in every place."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from remote_hosts import listening
from remote_rollouts import rollouts_on
from small_env import SmallEnv
from together import Together

from rollflow import EpsilonGreedy, MultiAgentRollout, Policy, RemoteRollouts, RLModule, Rollout
from rollflow.nodes.modules.given_module import GivenModule, is_function
from rollflow.stream import ColumnError, ModuleError, PolicyError


class Counts(SmallEnv):
    """Shows how many steps it has made, and pays the action."""

    observation_space, action_space = spaces.Box(0, 100, (1,)), spaces.Discrete(5)
    length, truncates = 10, True

    def look(self) -> Any:
        return np.full(1, self.t, np.float32)

    def pay(self, action: Any) -> float:
        return float(action)


def modulo(observations: Any) -> Any:
    """The actions 0, 1, 2, 3, 4, 0, …"""
    return observations[:, 0].long() % 5


def modulo_outputs(observations: Any) -> Any:
    return {"action_dist_inputs": np.eye(5, dtype=np.float32)[modulo(observations)] * 99, "seen": observations}


class ModuloPolicy:
    """Has the two methods that acting takes, and no others."""

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": modulo(batch["obs"])}

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": modulo(batch["obs"]).numpy().tolist()}


class CalledPolicy:
    def __call__(self, observations: Any) -> Any:
        return modulo(observations).tolist()

    def acts(self, observations: Any, /) -> Any:
        return modulo(observations).numpy()


def with_shift(observations: Any, shift: int) -> Any:
    return (observations[:, 0].long() + shift) % 5


POLICIES: dict[str, Any] = {
    "function": modulo,
    "lambda": lambda obs: obs[:, 0].numpy().astype(int) % 5,
    "outputs": modulo_outputs,
    "object": ModuloPolicy(),
    "made": lambda observation_space, action_space: ModuloPolicy(),
    "made function": lambda observation_space, action_space: modulo,
    "called": CalledPolicy(),
    "method": CalledPolicy().acts,
    "partial": partial(with_shift, shift=5),
}
EXPECTED = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4] * 2  # of two episodes


def batch_of(module: Any, env: Any = Counts, **options: Any) -> Any:
    """The train batch of two episodes of an environment, unless the options say otherwise."""
    settings = {"num_envs": 1, "fragment_length": 20, "num_fragments": 1, "seed": 0, **options}
    with Rollout(env, module=module, **settings) as rollout:
        [batch] = rollout.batches()
    return batch


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_acts(policy: str, explore: bool) -> None:
    options: Any = {"module": POLICIES[policy], "num_envs": 2, "fragment_length": 20, "seed": 0}
    with Rollout(Counts, num_fragments=1, explore=explore, **options) as rollout:
        batch = next(rollout.batches())
        assert rollout.evaluate(episodes=3).returns.tolist() == [20, 20, 20]
    assert batch["actions"].reshape(2, 20).tolist() == [EXPECTED] * 2
    assert isinstance(rollout.module, GivenModule)
    assert rollout.module.given is POLICIES[policy] or policy.startswith("made")
    if policy == "outputs":
        torch.testing.assert_close(batch["seen"], batch["obs"])


@pytest.mark.parametrize("where", ["threads", "processes", "rollouts", "agents", "hosts"])
@pytest.mark.parametrize("policy", ["function", "object", "lambda"])
def test_it_acts_in_every_place(policy: str, where: Any) -> None:
    options: Any = {"module": POLICIES[policy], "fragment_length": 20, "num_fragments": 1, "seed": 0}
    if where == "agents":
        with MultiAgentRollout(lambda: Together({"a": Counts(), "b": Counts()}), num_envs=1, **options) as agents:
            [batches] = agents.batches()
        [batch] = batches.values()
    elif where == "hosts":
        envs = listening(RemoteRollouts)
        with rollouts_on(envs.addresses[0], [Counts], module=POLICIES[policy]), Rollout(envs, **options) as rollout:
            [batch] = rollout.batches()
    else:
        batch = batch_of(POLICIES[policy], where=where)
    assert batch["actions"].reshape(-1, 20).tolist() == [EXPECTED] * (2 if where == "agents" else 1)


def test_exploration_goes_by_its_outputs() -> None:
    chance: Any = {"module_to_env_connector": lambda env: EpsilonGreedy(schedule=1.0)}
    batch = batch_of(modulo_outputs, num_envs=4, fragment_length=50, **chance)
    assert batch["actions"].unique().tolist() == [0, 1, 2, 3, 4]
    assert batch["action_logp"].unique().tolist() == [pytest.approx(np.log(0.2))]


def test_dicts_of_actions_are_actions() -> None:
    class Pushes(Counts):
        action_space: Any = spaces.Dict({"push": spaces.Discrete(5)})

        def step(self, action: Any) -> Any:
            return super().step(action["push"])

    assert batch_of(lambda obs: {"push": modulo(obs)}, Pushes)["rewards"].tolist() == EXPECTED


def test_its_weights_are_published_if_it_has_any() -> None:
    class Weighted(ModuloPolicy):
        def __init__(self) -> None:
            self.weight = torch.zeros(1)

        def state_dict(self) -> dict[str, Any]:
            return {"weight": self.weight}

        def load_state_dict(self, weights: dict[str, Any]) -> None:
            self.weight = weights["weight"]

        def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"actions": self.weight.long().expand(len(batch["obs"]))}

    mine = Weighted()
    options: Any = {"num_envs": 1, "fragment_length": 4, "num_fragments": 2, "seed": 0}
    with Rollout(Counts, module=mine, **options) as rollout:
        batches = iter(rollout.batches())
        assert next(batches)["actions"].tolist() == [0] * 4
        assert rollout.publish({"weight": torch.full((1,), 3.0)}) == 1
        assert next(batches)["actions"].tolist() == [3] * 4
    assert mine.weight.tolist() == [0]  # a copy of it acts


def test_a_function_that_can_be_imported_is_saved(tmp_path: Path) -> None:
    for name in ("function", "outputs"):
        policy = Policy(POLICIES[name], observation_space=Counts.observation_space, action_space=Counts.action_space)
        policy.save(tmp_path / name)
        loaded = Policy.load(tmp_path / name, allow=[__name__])
        assert loaded.act_batch(np.arange(6, dtype=np.float32)[:, None]).tolist() == [0, 1, 2, 3, 4, 0]
        with pytest.raises(PolicyError, match="modulo"):
            Policy.load(tmp_path / name)


@pytest.mark.parametrize("name", ["lambda", "object", "partial"])
def test_what_can_not_be_found_again_is_not_saved(name: str, tmp_path: Path) -> None:
    refused = pytest.raises(PolicyError, match="given")
    with Rollout(Counts, module=POLICIES[name], num_envs=1, seed=0) as rollout, refused:
        rollout.save_policy(tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


class GivesTensor(ModuloPolicy):
    def forward_exploration(self, batch: dict[str, Any]) -> Any:
        return modulo(batch["obs"])


def giving(outputs: Any) -> Any:
    return lambda obs: outputs


class GivesNothing(ModuloPolicy):
    def forward_exploration(self, batch: dict[str, Any]) -> Any:
        return None


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (giving(None), "lambda> gave None, which is no tensor or array"),
        (giving("left"), "lambda> gave 'left', which is no tensor"),
        (giving(object()), "lambda> gave <object object"),
        (GivesTensor(), "GivesTensor gave a Tensor int64.*, expected actions any"),
        (GivesNothing(), "GivesNothing gave None, which is no tensor or array, nor a dict of those"),
    ],
    ids=["none", "text", "object", "tensor", "none of a method"],
)
def test_what_is_no_action_is_refused(module: Any, told: str) -> None:
    with pytest.raises(ModuleError, match=told):
        batch_of(module)


@pytest.mark.parametrize("agents", [False, True], ids=["one agent", "several"])
@pytest.mark.parametrize(
    ("space", "actions", "told"),
    [
        (spaces.Discrete(2), [1, 5], r"slot 1 of the lane is 5, expected one in Discrete\(2\)"),
        (spaces.Discrete(2, start=1), [0, 1], r"slot 0 of the lane is 0, expected one in Discrete\(2, start=1\)"),
        (spaces.MultiDiscrete([2, 3]), [[1, 2], [1, 3]], r"slot 1 of the lane is \[1, 3\], expected one in MultiD"),
        (spaces.MultiBinary(2), [[0, 1], [2, 0]], r"slot 1 of the lane is \[2, 0\], expected one in MultiBinary"),
        (spaces.Box(-1, 1, (1,)), [[0.5], [3.0]], None),
        (spaces.Discrete(2, start=1), [1, 2], None),
    ],
)
def test_first_actions_outside_their_space_are_refused(space: Any, actions: Any, told: str, agents: bool) -> None:
    class Takes(Counts):
        action_space = space

        def pay(self, action: Any) -> float:
            return 0.0

    options: Any = {"module": giving(np.array(actions)), "fragment_length": 2, "num_fragments": 1}
    if agents:
        rollout: Any = MultiAgentRollout(lambda: Together({"a": Takes(), "b": Takes()}), num_envs=1, **options)
    else:
        rollout = Rollout(Takes, num_envs=2, **options)
    with nullcontext() if told is None else pytest.raises(ColumnError, match=f"action of {told}"), rollout:
        list(rollout.fragments())


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (object(), "module is object, which has no method forward_exploration"),
        (lambda: None, r"takes \(\), expected \(observation_space, action_space\), \(observations\) of a function"),
        (lambda a, b, c: None, r"takes \(a, b, c\), expected \(observation_space, action_space\)"),
    ],
)
def test_what_is_no_policy_is_refused(module: Any, expected: str) -> None:
    with pytest.raises(ModuleError, match=expected):
        Rollout(Counts, module=module, num_envs=1)


def test_what_makes_modules_is_no_policy() -> None:
    assert not any(map(is_function, (RLModule, RLModule(), torch.nn.Linear(1, 1), lambda o, a: 0, lambda *args: 0)))
    assert not any(map(is_function, (lambda: 0, 3, print, lambda o, a=0: 0)))
    assert all(map(is_function, (modulo, CalledPolicy(), lambda obs, *, scale=1: obs)))
