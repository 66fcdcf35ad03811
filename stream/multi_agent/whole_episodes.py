"""Whole episodes of environments with several agents, from fragments."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.tree import Tree, kind_of, map_tree
from rollflow.stream.fragments.episode_collector import (
    AgentSteps,
    EnvChunk,
    EpisodeCollector,
    OpenEpisode,
    whole_layout,
    whole_origin,
)
from rollflow.stream.fragments.fragment import RECORDED
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock, column_name
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


class WholeMultiAgentEpisodes(MultiAgentFragment):
    """Whole episodes of a lane's environments as a fragment, without lookback.

    Each episode is by itself, as that of an environment with one episode, whose first vector step is 0. `lane` and
    `sequence` are those of the fragment in which the episodes ended.
    """

    def __init__(self, last: MultiAgentFragment, episodes: Sequence[OpenEpisode]) -> None:
        none, ids = np.zeros(len(episodes), np.int64), [episode.id_ for episode in episodes]
        ends = sorted((each.stop - each.started, env, each.is_truncated, False) for env, each in enumerate(episodes))
        clock = EnvClock(0, none, none, partial(_id_of, ids), ends)
        self._envs = np.array([episode.env for episode in episodes], np.int64)
        super().__init__(
            last.lane,
            last.sequence,
            [_whole_part(index, part, episodes, clock) for index, part in enumerate(last.parts)],
            num_rows=ends[-1][0],
            clock=clock,
            custom_data={(env, 0): episode.custom_data for env, episode in enumerate(episodes)},
        )
        for part in self.parts:
            part.envs = self._envs
        self.origin = whole_origin(last.origin)

    def env_slot(self, env: int) -> int:
        return int(self._envs[env])

    def __repr__(self) -> str:
        held = f"{self.num_envs} episodes, {self.num_steps} agent steps"
        return f"<WholeMultiAgentEpisodes {self.sequence} of lane {self.lane}: {held}>"


class AgentEpisodeCollector(EpisodeCollector[WholeMultiAgentEpisodes]):
    """Collects the chunks of episodes of environments with several agents.

    An agent's key is the number of its part, its place in that, and the id of its module.
    """

    def _chunks(self, fragment: MultiAgentFragment) -> Iterator[EnvChunk]:
        clock = fragment.clock
        for env in range(fragment.num_envs):
            for nth in range(clock.count(env)):
                started, end = clock.start(env, nth), clock.end_of(env, nth)
                begin, stop = max(clock.first, started), clock.first + fragment.num_rows if end is None else end[0]
                if begin == stop:
                    continue  # lost before the first step, or begun behind the last
                key = env, int(clock.numbers[env]) + nth
                yield EnvChunk(
                    env,
                    fragment.episode_id(*key),
                    started,
                    begin,
                    stop,
                    end is not None,
                    fragment._agent_chunks.get((env, nth), []),
                    fragment.custom_data.get(key, {}),
                    end is not None and end[1],
                    _early_of(fragment, env, started, stop),
                )

    def _loss_of(self, fragment: MultiAgentFragment, env: int) -> str | None:
        return next((reason for _, reason in fragment.losses), None)

    def _whole(self, fragment: MultiAgentFragment, ended: Sequence[OpenEpisode]) -> WholeMultiAgentEpisodes | None:
        stepped = [episode for episode in ended if episode.num_steps]
        return WholeMultiAgentEpisodes(fragment, stepped) if stepped else None


_NO_OUTPUTS = (Columns.OBS, *RECORDED, Columns.POLICY_VERSION)


def _id_of(ids: Sequence[str], env: int, number: int) -> str:
    return ids[env]


def _early_of(
    fragment: MultiAgentFragment, env: int, started: int, stop: int
) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """(part, place) -> vector steps and rewards of an agent before its first observation in an episode."""
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for number, part in enumerate(fragment.parts):
        for place, vector_step, reward in part.early_in(env, started, stop):
            found.setdefault((number, place), []).append((vector_step, reward))
    return found


def _whole_part(number: int, last: AgentFragment, episodes: Sequence[OpenEpisode], clock: EnvClock) -> AgentFragment:
    """The agents of one part in whole episodes, each of which is an environment."""
    num_agents = len(last.part.agents)
    agents = {
        env * num_agents + place: (module_id, agent)
        for env, episode in enumerate(episodes)
        for (part, place, module_id), agent in episode.agents.items()
        if part == number
    }
    num_slots = len(episodes) * num_agents
    stops = np.zeros(num_slots, np.int64)
    for slot, (_, agent) in agents.items():
        stops[slot] = agent.num_steps
    num_rows = int(stops.max(initial=0))
    module_ids = list(dict.fromkeys(module_id for module_id, _ in agents.values()))
    columns, outputs = _columns(last, agents, module_ids, num_rows, num_slots)
    ids = [agents[slot][1].id_ if slot in agents else "" for slot in range(num_slots)]
    layout = whole_layout(last, num_slots, num_rows, partial(_id_of, ids))
    whole = AgentFragment(layout, last.lane, last.sequence, columns, part=last.part, env_clock=clock)
    whole.observation_space, whole.module_ids, whole.outputs = last.observation_space, module_ids, outputs
    infos = [SlotInfos(count=num_slots) for _ in whole.infos]
    whole.infos = list(infos)
    for slot, (module_id, agent) in agents.items():
        steps, times = agent.num_steps, np.array(agent.times) - episodes[slot // num_agents].started
        whole.clock[: steps + 1, slot] = times
        whole.ends[steps - 1, slot] = int(times[-1])
        whole.module_of[:, slot] = module_ids.index(module_id)
        whole.custom_data[slot, 0] = agent.custom_data
        if agent.initial_state is not None:
            whole.starts[0, slot] = agent.initial_state
        for row, info in enumerate([*agent.infos, agent.last_info]):
            if info:
                infos[row].of_slots[slot] = info
    whole.early = sorted(
        (vector_step - episode.started, env * num_agents + place, reward)
        for env, episode in enumerate(episodes)
        for (part, place), received in episode.early.items()
        if part == number
        for vector_step, reward in received
    )
    whole.seal_at(stops)
    return whole


def _columns(
    last: AgentFragment,
    agents: Mapping[int, tuple[Any, AgentSteps]],
    module_ids: Sequence[Any],
    num_rows: int,
    num_slots: int,
) -> tuple[dict[str, Column], dict[Any, dict[str, str]]]:
    """Columns of agents by slots, zeros elsewhere, and module id -> name of an extra output -> column."""

    def empty(name: str, tree: Tree) -> Column:
        rows = num_rows + (name == Columns.OBS)
        made = map_tree(lambda leaf: np.zeros((rows, num_slots, *leaf.shape[1:]), leaf.dtype), tree)
        return Column(name, made)

    columns = {name: empty(name, last.columns[name].row(0)) for name in _NO_OUTPUTS}
    outputs: dict[Any, dict[str, str]] = {}
    for module_id in module_ids:
        parts = [columns for each, agent in agents.values() if each == module_id for columns in agent.columns]
        first, *others = ({name: kind_of(tree) for name, tree in part.items()} for part in parts)
        outputs[module_id] = {}
        for name, kind in first.items():
            if name not in _NO_OUTPUTS and all(each.get(name) == kind for each in others):
                column = outputs[module_id][name] = column_name(columns, name, kind)
                if column not in columns:
                    columns[column] = empty(column, parts[0][name])
    for slot, (module_id, agent) in agents.items():
        steps, own = agent.num_steps, {name: name for name in _NO_OUTPUTS} | outputs[module_id]
        for name, column in own.items():
            _write(columns[column].tree, slice(0, steps), slot, agent.rows(name))
        _write(columns[Columns.OBS].tree, steps, slot, agent.last_observation)
    return columns, outputs


def _write(tree: Tree, rows: Any, slot: int, values: Tree) -> None:
    map_tree(lambda leaf, value: leaf.__setitem__((rows, slot), value), tree, values)
