"""Modules that act: which serves whom, whose weights act, which explore, and what they give."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from small_env import SmallEnv
from together import Together

from rollflow import MultiAgentRollout, RLModule
from rollflow.stream import ColumnError, ModuleError

AGENTS = ("a", "b")


class Steps(SmallEnv):
    """Shows the number of the step, in episodes of `length`."""

    action_space = gym.spaces.Discrete(50)

    def __init__(self, length: int, high: int = 1000) -> None:
        self.length, self.observation_space = length, gym.spaces.Box(0, high, (1,), np.float32)

    def look(self) -> Any:
        return np.full(1, self.t, np.float32)

    def pay(self, action: Any) -> float:
        return 1.0


def alike(length: int) -> Together:
    return Together({agent: Steps(length) for agent in AGENTS})


def asking(names: dict[str, str]) -> tuple[list[tuple[Any, str]], Any]:
    """What a mapping to these names was asked of, and the mapping."""
    asked: list[tuple[Any, str]] = []
    return asked, lambda agent, episode: asked.append((agent, episode.id_)) or names[agent]  # type: ignore[func-returns-value]


def unlike(length: int) -> Together:
    """Two agents with spaces of their own."""
    return Together({"a": Steps(length), "b": Steps(length, high=999)})


class Acts(RLModule):
    """Acts by a number of its own, and counts its steps in its state if it has one."""

    def __init__(self, action: int = 0, *, state: int = 0, outputs: Any = None) -> None:
        super().__init__(model_config={"max_seq_len": 4})
        self.action, self.state, self.outputs = action, state, outputs or {}
        self.weight = torch.nn.Parameter(torch.full((2,), float(action)))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        made = {name: value.expand(len(batch["obs"]), *value.shape) for name, value in self.outputs.items()}
        actions = torch.full(batch["obs"].shape[:-1], self.action)
        if self.state:
            made["state_out"] = {"count": batch["state_in"]["count"] + 1}
            made["count"] = made["state_out"]["count"][:, :1]
        return {"actions": actions, **made}

    def get_initial_state(self) -> Any:
        return {"count": np.zeros(self.state, np.float32)} if self.state else {}


def marathon(length: int = 4, **options: Any) -> MultiAgentRollout:
    given = {"module": {"a": Acts(0), "b": Acts(1)}, "fragment_length": 2, "num_fragments": 8, "seed": 0}
    return MultiAgentRollout(partial(alike, length), **{**given, **options})


def rows(fragment: Any, module_id: Any, name: str = "actions") -> list[Any]:
    return fragment.of_module(module_id).gather(name).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [alike, unlike])
@pytest.mark.parametrize("where", ["inline", "threads"])
def test_the_mapping_is_asked_once_for_an_agent_in_an_episode(make: Any, where: str) -> None:
    """Lookback and cuts ask of none."""
    asked, mapping = asking({"a": "a", "b": "b"})
    options: dict[str, Any] = {"fragment_length": 3, "num_fragments": 12, "lookback": 2, "where": where}
    modules, played = {"a": Acts(0), "b": Acts(1)}, set()
    rollout = MultiAgentRollout(
        partial(make, 4), module=modules, num_envs=2, agent_to_module_mapping_fn=mapping, seed=0, **options
    )
    probes = len(asked)
    with rollout:
        for fragment in rollout.fragments():
            played |= {episode.id_ for episode in fragment.episodes()}
    assert len(set(asked)) == len(asked)
    of_episodes = asked[probes:]
    assert {id_ for _, id_ in of_episodes} >= played
    assert not {id_ for _, id_ in asked[:probes]} & played
    assert probes == (0 if make is alike else 2 * 16)  # to tell which module has which spaces


# Outputs


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"outputs": {"told": torch.zeros(3)}}, {"outputs": {"told": torch.zeros(2)}}),
        ({"outputs": {"told": torch.tensor(7)}}, {"outputs": {"told": torch.tensor(0.25)}}),
        ({"state": 1}, {"state": 3}),
    ],
)
def test_outputs_of_one_name_have_one_type_for_agents_of_the_same_spaces(ours: Any, theirs: Any) -> None:
    told = "output '(told|state_out)' of module 'b' is .*, but .* of another that serves agents with the same spaces"
    with pytest.raises(ColumnError, match=told), marathon(module={"a": Acts(**ours), "b": Acts(**theirs)}) as rollout:
        list(rollout.fragments())
    modules = {"a": Acts(**ours), "b": Acts(**theirs)}
    with MultiAgentRollout(partial(unlike, 4), module=modules, fragment_length=2, num_fragments=1) as rollout:
        assert len(list(rollout.fragments())) == 1  # of other spaces


# Weights that act


def test_the_weights_that_act_are_those_published_last() -> None:
    with marathon(num_fragments=3) as rollout:
        for number, _ in enumerate(rollout.fragments()):
            version, weights = rollout.acting_weights("a")
            assert version == number
            assert weights["weight"].tolist() == [float(number)] * 2
            weights["weight"] += 100
            with torch.no_grad():
                rollout.module["a"].weight += 50  # training alone changes nothing
            rollout.publish({"a": Acts(number + 1).state_dict()})
            assert rollout.acting_weights("a").version == number + 1
        with pytest.raises(ModuleError, match="there is no module 'c'"):
            rollout.acting_weights("c")


# Exploring


class Sure(RLModule):
    """Finds action 3 the likeliest, by little."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        logits = torch.zeros(len(batch["obs"]), 50)
        logits[:, 3] = 0.1
        return {"action_dist_inputs": logits}


@pytest.mark.parametrize(
    ("explore", "greedy"), [(True, ""), (False, "ab"), ({"a": False}, "a"), ({"a": True, "b": False}, "b"), ({}, "")]
)
def test_some_modules_explore_and_others_do_not(explore: Any, greedy: str) -> None:
    with marathon(module={"a": Sure(), "b": Sure()}, explore=explore, num_fragments=1, fragment_length=20) as rollout:
        [fragment] = rollout.fragments()
    for module_id in AGENTS:
        assert (set(rows(fragment, module_id)) == {3}) == (module_id in greedy)


# Which module serves whom


class Asked(dict[Any, Any]):
    """A mapping that counts how often it is asked."""

    count = 0

    def __getitem__(self, agent: Any) -> Any:
        self.count += 1
        return super().__getitem__(agent)


def test_a_dict_is_asked_for_agents_and_a_function_for_their_episodes() -> None:
    asked = Asked(a="a", b="b")
    called, mapping = asking({"a": "a", "b": "b"})
    options: Any = {"num_envs": 16, "length": 2, "fragment_length": 10, "num_fragments": 2}
    with marathon(agent_to_module_mapping_fn=asked, **options) as rollout:
        by_dict = [rows(fragment, "b") for fragment in rollout.fragments()]
    assert asked.count <= 2 * (1 + 10)  # whenever agents begin, each once for all environments

    with marathon(agent_to_module_mapping_fn=mapping, **options) as rollout:
        called.clear()  # of what was asked to find out spaces, and at the first reset
        by_function = [rows(fragment, "b") for fragment in rollout.fragments()]
    assert by_function == by_dict
    assert len(called) == len(set(called)) == 2 * 16 * 10
