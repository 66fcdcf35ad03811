"""Rollouts of several agents whose environments were lost, held against the environments' logs."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from agent_logs import AgentStep, At, steps_of
from ending_agent_envs import logs_of
from fragment_equality import in_time
from numbered_agents import AgentsTold
from serial_module import at_of

from rollflow import MultiAgentRollout
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


def numbers(at: Any) -> At:
    return tuple(int(number) for number in np.asarray(at))


def agent_chunks(fragments: Sequence[MultiAgentFragment]) -> list[tuple[MultiAgentFragment, Any]]:
    """Every chunk of every agent, lane by lane in the order of time."""
    return [
        (fragment, chunk)
        for fragment in in_time(fragments)
        for module_id in fragment.module_ids
        for chunk in fragment.agent_episodes(module_id)
    ]


def emitted_steps(fragments: Sequence[MultiAgentFragment]) -> list[AgentStep]:
    """The agents' steps in all chunks; what was lost is not truncated by its environment."""
    steps = []
    for _, chunk in agent_chunks(fragments):
        at, rewards, actions = at_of(chunk.get_observations()), chunk.get_rewards(), chunk.get_actions()
        is_lost = "lost" in chunk.custom_data
        assert not is_lost or (chunk.is_truncated and not chunk.is_terminated)
        for i in range(len(chunk)):
            last = i == len(chunk) - 1
            flags = last and chunk.is_terminated, last and chunk.is_truncated and not is_lost
            steps.append(AgentStep(numbers(at[i]), int(actions[i]), float(rewards[i]), numbers(at[i + 1]), *flags))
    return steps


def not_emitted(fragments: Sequence[MultiAgentFragment], logs: Sequence[Sequence[AgentsTold]]) -> int:
    """Count logged steps that are in no chunk; fail for a chunk's step that is in no log, or twice."""
    told = Counter(step for log in logs for step in steps_of(log)[0])
    emitted = Counter(emitted_steps(fragments))
    assert not emitted - told
    return (told - emitted).total()


def check_continuity(fragments: Sequence[MultiAgentFragment]) -> None:
    """An agent's chunks join, and where one goes on nowhere it has ended, or a loss says why not."""
    by_agent: dict[tuple[int, int], list[tuple[MultiAgentFragment, Any]]] = {}
    for fragment, chunk in agent_chunks(fragments):
        by_agent.setdefault(numbers(at_of(chunk.get_observations(0)))[:2], []).append((fragment, chunk))
    for chunks in by_agent.values():
        # Those of one fragment came module by module.
        chunks.sort(key=lambda each: numbers(at_of(each[1].get_observations(0))))
        ids = [chunk.id_ for _, chunk in chunks]
        assert len(set(ids)) == 1 + sum(one != other for one, other in pairwise(ids))
        for (earlier, before), (later, chunk) in pairwise(chunks):
            if chunk.id_ == before.id_:
                assert (chunk.t_started, before.is_done) == (before.t, False)
                assert numbers(at_of(chunk.get_observations(0))) == numbers(at_of(before.get_observations(-1)))
            else:
                assert chunk.t_started == 0
                between = [each for each in in_time(fragments) if earlier.sequence <= each.sequence <= later.sequence]
                assert before.is_done or any(each.losses for each in between if each.lane == earlier.lane)


def check_multi_agent_chunks(fragments: Sequence[MultiAgentFragment]) -> None:
    """Chunks of environments' episodes join, and those that were lost say so."""
    by_env: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    for fragment in in_time(fragments):
        steps = 0
        for episode in fragment.episodes():
            steps += sum(len(each) for each in episode.agent_episodes.values())
            agent = next(iter(episode.agent_episodes.values()))
            slot = numbers(at_of(agent.get_observations(-1)))[0]
            by_env.setdefault((fragment.lane, slot), []).append((fragment.sequence, episode))
            for each in episode.agent_episodes.values():
                assert ("lost" in each.custom_data) <= ("lost" in episode.custom_data)
            episode.to_numpy().get_state()
            if "lost" in episode.custom_data:
                assert (episode.is_truncated, episode.is_terminated) == (True, False)
        assert steps == fragment.num_steps
    for episodes in by_env.values():
        ids = [episode.id_ for _, episode in episodes]
        assert len(set(ids)) == 1 + sum(one != other for one, other in pairwise(ids))
        for (earlier, before), (later, episode) in pairwise(episodes):
            if episode.id_ == before.id_ and later == earlier + 1:
                assert (episode.env_t_started, before.is_done) == (before.env_t, False)


def check_laws(rollout: MultiAgentRollout, fragments: Sequence[MultiAgentFragment], folder: Path, envs: int) -> None:
    """Check that each step in the environments' logs stands in a chunk or is counted, and the other laws."""
    logs = [log for slot in range(envs) for log in logs_of(folder, slot)]
    missing = not_emitted(fragments, logs)
    assert missing <= rollout.lost.get("workers", 0)
    assert rollout.num_steps == len(emitted_steps(fragments))
    assert rollout.lost.keys() <= {"workers"}
    check_continuity(fragments)
    check_multi_agent_chunks(fragments)
