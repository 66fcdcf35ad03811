"""Drawn plays of several agents as episodes whose items are vectors, and modules for them that can be told apart."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from drawn_turns import AGENTS, Told
from gymnasium import spaces

from rollflow import MultiAgentEpisode, RLModule, SingleAgentEpisode

MODULES = {"a": "m", "b": "n", "c": "m"}
OBSERVED = spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTED = spaces.Discrete(3)
OBSERVATIONS = spaces.Dict(dict.fromkeys(AGENTS, OBSERVED))
ACTIONS = spaces.Dict(dict.fromkeys(AGENTS, ACTED))


def module_for(agent_id: str, episode: Any) -> str:
    return MODULES[agent_id]


def vector(item: int) -> Any:
    return np.array([item / 100, item % 7], np.float32)


def outputs_of(item: int) -> dict[str, Any]:
    logp, value = np.float32(-1.0 - item % 3), np.float32(item % 5)
    return {"action_logp": logp, "vf_preds": value, "state_out": {"h": vector(item)}}


def steps_of(told: Told) -> list[dict[str, Any]]:
    """The env steps as an episode takes them; the first has the reset."""
    return [
        {
            **step,
            "observations": {agent_id: vector(item) for agent_id, item in step["observations"].items()},
            "actions": {agent_id: item % 3 for agent_id, item in step["actions"].items()},
            "extra_model_outputs": {agent_id: outputs_of(item) for agent_id, item in step["actions"].items()},
        }
        for step in told.steps
    ]


def played(told: Told, id_: str = "e", made: type = MultiAgentEpisode, numpy: bool = False) -> Any:
    """A play as an episode; agents "a" and "c" are of module "m", "b" of "n"."""
    first, *steps = steps_of(told)
    ids = {agent_id: f"{id_}-{agent_id}" for agent_id in AGENTS}
    agents = {"agent_episode_ids": ids, "agent_to_module_mapping_fn": module_for}
    episode = made(id_, observation_space=OBSERVATIONS, action_space=ACTIONS, **agents)
    episode.add_env_reset(observations=first["observations"], infos=first["infos"])
    for step in steps:
        episode.add_env_step(**step)
    if numpy:
        episode.to_numpy()
    return episode


def all_played(tolds: Sequence[Told], numpy: bool = False) -> list[Any]:
    return [played(told, f"e{place}", numpy=numpy) for place, told in enumerate(tolds)]


def alone(episode: SingleAgentEpisode) -> SingleAgentEpisode:
    """A copy of an agent's episode that knows of no others."""
    state = {**episode.get_state(), "agent_id": None, "module_id": None, "multi_agent_episode_id": None}
    return SingleAgentEpisode.from_state(state)


class Linear(RLModule):
    """Values and logits are sums of an observation's numbers, each module's with a weight of its own."""

    def __init__(self, weight: float, *, state: bool = False) -> None:
        super().__init__(OBSERVED, ACTED, model_config={"max_seq_len": 3})
        self.weight, self.state = weight, state

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        sums = self.weight * batch["obs"].float().sum(-1)
        return {"action_dist_inputs": torch.stack([sums, -sums, 0 * sums], -1), "vf_preds": sums}

    def get_initial_state(self) -> Any:
        return {"h": np.full(2, self.weight, np.float32)} if self.state else {}


def modules(**states: bool) -> dict[str, Linear]:
    return {"m": Linear(0.25, state=states.get("m", False)), "n": Linear(-0.5, state=states.get("n", False))}
