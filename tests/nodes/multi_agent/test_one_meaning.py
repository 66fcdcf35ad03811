"""Whatever way the same steps are told in, they mean the same."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from agent_logs import episodes_by_hand, observation_of
from drawn_agents import Drawn, drawn_settings, envs_of, made, mapping_of, modules_of, run
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_agents import NumberedAgents
from serial_module import SerialModule, at_of

from rollflow.nodes import ArrayStep, ConnectorV2, GeneralAdvantageEstimation, MultiAgentRollout, MultiAgentVectorEnv
from rollflow.stream import MultiAgentEpisode
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

few = settings(max_examples=25)
COUNT = st.integers(1, 5)


def outputs_of(fragments: list[MultiAgentFragment]) -> Callable[[str, tuple[int, ...]], dict[str, Any]]:
    """What the module of an agent gave for an observation: of steps and of hanging actions."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    for fragment in fragments:
        for part in fragment.parts:
            columns = {name: part.columns[name].tree for name in part.extra_columns}
            slots = range(part.layout.num_slots)
            for slot in slots:
                for row in range(part.first_row, int(part.stops[slot]) + int(part.waits[slot])):
                    at = tuple(at_of(part.columns["obs"].tree)[row, slot].tolist())
                    names = (*part.outputs[part.module_ids[part.module_of[row, slot]]], "policy_version")
                    known[at] = {name: columns[name][row, slot] for name in names}
    return lambda agent, at: known[at]


def chunks_by_env(fragments: list[MultiAgentFragment]) -> dict[int, list[MultiAgentEpisode]]:
    """The multi-agent chunks of each environment, in the order of time."""
    by_env: dict[int, list[MultiAgentEpisode]] = {}
    for fragment in sorted(fragments, key=lambda each: (each.lane, each.sequence)):
        for chunk in fragment.episodes():
            slot = next(int(at_of(each.get_observations(-1))[0]) for each in chunk.agent_episodes.values())
            by_env.setdefault(slot, []).append(chunk)
    return by_env


def plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: plain(part) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(part) for part in tree]
    return tree.tolist() if isinstance(tree, np.ndarray | np.generic) else tree


NAMES = ["observations", "infos", "actions", "rewards", "extra_model_outputs"]


def assert_same_episodes(one: MultiAgentEpisode, other: MultiAgentEpisode, lookback: int) -> None:
    """Getters by env steps and by agents' own steps, with the lookback of each agent; flags and clocks."""
    assert (one.env_t_started, one.env_t, len(one)) == (other.env_t_started, other.env_t, len(other))
    assert (one.is_terminated, one.is_truncated) == (other.is_terminated, other.is_truncated)
    assert one.agent_ids == other.agent_ids
    assert one.get_terminateds() == other.get_terminateds()
    assert one.get_truncateds() == other.get_truncateds()
    assert one.get_agents_that_stepped() == other.get_agents_that_stepped()
    assert one.get_agents_to_act() == other.get_agents_to_act()
    assert one.agent_steps() == other.agent_steps()
    assert one.get_return(include_hanging_rewards=False) == other.get_return(include_hanging_rewards=False)
    for agent, mine in one.agent_episodes.items():
        theirs = other.agent_episodes[agent]
        assert (mine.t_started, mine.t, mine.is_terminated, mine.is_truncated) == (
            theirs.t_started, theirs.t, theirs.is_terminated, theirs.is_truncated,
        )  # fmt: skip
    for name in NAMES:
        by_agent_steps = [plain(getattr(each, f"get_{name}")(env_steps=False)) for each in (one, other)]
        assert by_agent_steps[0] == by_agent_steps[1], name
        by_env_steps = [plain(getattr(each, f"get_{name}")()) for each in (one, other)]
        assert by_env_steps[0] == by_env_steps[1], name
        listed = [plain(getattr(each, f"get_{name}")(return_list=True)) for each in (one, other)]
        if name != "extra_model_outputs":
            assert listed[0] == listed[1], name


@few
@given(drawn_settings, COUNT)
def test_chunks_are_the_episodes_that_were_built_by_hand(drawn: Drawn, count: int) -> None:
    envs, rollout = made(drawn._replace(lanes=1))
    fragments = run(rollout, count)
    by_env = chunks_by_env(fragments)
    cuts = [fragment.clock.first + fragment.num_rows for fragment in fragments]
    cuts += [fragment.clock.first for fragment in fragments if fragment.clock.first]
    last = max(cuts)
    outputs = outputs_of(fragments)
    for env in envs:
        by_hand = episodes_by_hand(env, cuts, drawn.lookback, outputs, last)
        missing = [chunk for chunk in by_hand if not chunk.agent_ids]
        assert not missing
        for mine, theirs in zip(by_env[env.slot], by_hand, strict=True):
            assert_same_episodes(mine, theirs.to_numpy(), drawn.lookback)
