"""Whole episodes of environments with several agents, from fragments."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.infos import SlotInfos, info_of
from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.data.tree import Tree, kind_of, map_tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.episode_collector import EnvChunk, EpisodeCollector, OpenEpisode, part_of
from rollflow.stream.fragments.fragment import RECORDED, FragmentLayout, Start
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock, ModuleFragment, column_name
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

_Chunks = list[tuple[int, ModuleFragment, int]]
"""Chunks of agents in one environment's episode: the number of their part, and the fragment and index in it."""


class WholeMultiAgentEpisodes(MultiAgentFragment):
    """Whole episodes of a lane's environments as a fragment, without lookback.

    Each episode is by itself, as that of an environment with one episode, whose first vector step is 0. `lane` and
    `sequence` are those of the fragment in which the episodes ended.
    """

    def __init__(self, last: MultiAgentFragment, episodes: Sequence["OpenEnvEpisode"]) -> None:
        none, ids = np.zeros(len(episodes), np.int64), [episode.id_ for episode in episodes]
        ends = sorted((episode.t, env, episode.is_truncated, False) for env, episode in enumerate(episodes))
        clock = EnvClock(0, none, none, partial(_id_of, ids), ends)
        self._envs = np.array([episode.env for episode in episodes], np.int64)
        super().__init__(
            last.lane,
            last.sequence,
            [_whole_part(index, part, episodes, clock) for index, part in enumerate(last.parts)],
            num_envs=len(episodes),
            num_rows=max(episode.t for episode in episodes),
            clock=clock,
            custom_data={(env, 0): episode.custom_data for env, episode in enumerate(episodes)},
        )
        for part in self.parts:
            part.envs = self._envs
        if last.origin is not None:
            self.origin = Origin(last.origin.ledger, 0, last.origin.name)  # the collector counts what is lost

    def env_slot(self, env: int) -> int:
        return int(self._envs[env])

    def __repr__(self) -> str:
        held = f"{self.num_envs} episodes, {self.num_steps} agent steps"
        return f"<WholeMultiAgentEpisodes {self.sequence} of lane {self.lane}: {held}>"


class AgentEpisodeCollector(EpisodeCollector[WholeMultiAgentEpisodes]):
    """Collects the chunks of episodes of environments with several agents."""

    def _chunks(self, fragment: MultiAgentFragment) -> Iterator[EnvChunk]:
        clock, of_agents = fragment.clock, _by_episode(fragment)
        for env in range(fragment.num_envs):
            for nth in range(clock.count(env)):
                started, end = clock.start(env, nth), clock.end_of(env, nth)
                begin, stop = max(clock.first, started), clock.first + fragment.num_rows if end is None else end[0]
                if begin == stop:
                    continue  # lost before the first step, or begun behind the last
                chunks, number = of_agents.get((env, nth), []), int(clock.numbers[env]) + nth
                num_steps = sum(int(view.chunks.stop[i] - view.chunks.start[i]) for _, view, i in chunks)
                add_to = partial(_add_chunks, fragment, number, chunks, started, stop, end)
                id_ = fragment.episode_id(env, number)
                yield EnvChunk(env, id_, begin - started, num_steps, end is not None, add_to)

    def _begun(self, chunk: EnvChunk) -> "OpenEnvEpisode":
        return OpenEnvEpisode(chunk.id_, chunk.env)

    def _loss_of(self, fragment: MultiAgentFragment, env: int) -> str | None:
        return next((reason for _, reason in fragment.losses), None)

    def _whole(self, fragment: MultiAgentFragment, ended: Sequence["OpenEnvEpisode"]) -> WholeMultiAgentEpisodes | None:
        stepped = [episode for episode in ended if episode.num_steps]
        return WholeMultiAgentEpisodes(fragment, stepped) if stepped else None


class OpenEnvEpisode:
    """Chunks of an environment's episode.

    t               env steps so far
    is_truncated    whether it has ended as truncated
    agents          (part, agent's place in it) -> chunks of the agent, who may have ended before
    """

    def __init__(self, id_: str, env: int) -> None:
        self.id_, self.env = id_, env
        self.t = 0
        self.is_truncated = False
        self.custom_data: dict[Any, Any] = {}
        self.agents: dict[tuple[int, int], _OpenAgent] = {}
        self.early: dict[tuple[int, int], list[tuple[int, float]]] = {}  # env step and reward, by part and place

    @property
    def num_steps(self) -> int:
        """Steps of all agents so far."""
        return sum(agent.num_steps for agent in self.agents.values())

    def truncated(self, reason: str) -> Self:
        """End the episode as truncated, since its environment was lost; return it."""
        self.is_truncated = True
        self.custom_data["lost"] = reason
        return self


class _OpenAgent(OpenEpisode):
    """Chunks of one agent in an environment's episode.

    times    i64[n + 1] for each chunk: env steps of its observations
    """

    def __init__(self, chunk: SingleAgentEpisode, slot: int) -> None:
        super().__init__(chunk.id_, slot)
        self.module_id = chunk.module_id
        self.times: list[NDArray[np.int64]] = []

    def end(self, reason: Any) -> None:
        """End the agent with its environment, which was lost, unless it has ended."""
        columns = self.parts[-1].columns
        if not (columns[Columns.TERMINATEDS][-1] or columns[Columns.TRUNCATEDS][-1]):
            self.truncated(reason)

    def names(self) -> dict[str, Tree]:
        """The extra outputs that all chunks have alike, with their kinds."""
        first, *others = (
            {name: kind_of(tree) for name, tree in part.columns.items() if name not in _NO_OUTPUTS}
            for part in self.parts
        )
        return {name: kind for name, kind in first.items() if all(each.get(name) == kind for each in others)}


_NO_OUTPUTS = (Columns.OBS, *RECORDED, Columns.POLICY_VERSION)


def _id_of(ids: Sequence[str], env: int, number: int) -> str:
    return ids[env]


def _by_episode(fragment: MultiAgentFragment) -> dict[tuple[int, int], _Chunks]:
    """(environment, number of its episode in the fragment) -> chunks of its agents."""
    found: dict[tuple[int, int], _Chunks] = {}
    for number, part in enumerate(fragment.parts):
        for module_id in part.outputs:
            view = part.of_module(module_id)
            envs, begun = view.chunks.slot // len(part.part.agents), part.clock[view.chunks.start, view.chunks.slot]
            for index, key in enumerate(zip(envs.tolist(), fragment.clock.nth_of(envs, begun).tolist(), strict=True)):
                found.setdefault(key, []).append((number, view, index))
    return found


def _add_chunks(
    fragment: MultiAgentFragment,
    number: int,
    chunks: _Chunks,
    started: int,
    stop: int,
    end: tuple[int, bool] | None,
    episode: OpenEnvEpisode,
) -> None:
    """Add a chunk of an environment's episode, from vector step `started` on, until `stop`, and its end."""
    episode.t = stop - started
    episode.custom_data |= fragment.custom_data.get((episode.env, number), {})
    for part_number, view, index in chunks:
        chunk, slot = view.chunk(index), int(view.chunks.slot[index])
        agent = episode.agents.setdefault((part_number, slot % len(view.part.agents)), _OpenAgent(chunk, slot))
        agent.add(chunk, part_of(view, index, is_copied=end is None))
        last = int(view.chunks.stop[index])
        times = view.clock[int(view.chunks.start[index]) : last + 1, slot] - started
        if chunk.is_done:
            times[-1] = view.ends[last - 1, slot] - started
        agent.times.append(times)
    for part_number, part in enumerate(fragment.parts):
        early: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for vector_step, slot, reward in part.early:
            env, place = divmod(slot, len(part.part.agents))
            if env == episode.env and started < vector_step <= stop:
                early.setdefault((part_number, place), []).append((vector_step - started, reward))
        episode.early |= early  # with what came in the fragments before
    if end is not None:
        episode.is_truncated = end[1]


def _whole_part(number: int, last: AgentFragment, episodes: Sequence[OpenEnvEpisode], clock: EnvClock) -> AgentFragment:
    """The agents of one part in whole episodes, each of which is an environment."""
    num_agents = len(last.part.agents)
    agents = {
        env * num_agents + place: agent
        for env, episode in enumerate(episodes)
        for (part, place), agent in episode.agents.items()
        if part == number
    }
    for slot, agent in agents.items():
        agent.end(episodes[slot // num_agents].custom_data.get("lost"))
    stops = np.zeros(len(episodes) * num_agents, np.int64)
    for slot, agent in agents.items():
        stops[slot] = agent.num_steps
    num_rows, num_slots = int(stops.max(initial=0)), len(stops)
    module_ids = list(dict.fromkeys(agent.module_id for agent in agents.values()))
    columns, outputs = _columns(last, agents, module_ids, num_rows, num_slots)
    layout = FragmentLayout(
        num_slots=num_slots,
        num_rows=num_rows,
        lookback=0,
        action_space=last.layout.action_space,
        resets_next_step=False,
        episode_id=partial(_id_of, [agents[slot].id_ if slot in agents else "" for slot in range(num_slots)]),
    )
    whole = AgentFragment(
        layout,
        last.lane,
        last.sequence,
        columns,
        part=last.part,
        env_clock=clock,
        clock=np.zeros((num_rows + 1, num_slots), np.int64),
        module_of=np.zeros((num_rows, num_slots), np.int16),
        episode_start=np.zeros(num_slots, np.int64),
        episode_number=np.zeros(num_slots, np.int64),
    )
    whole.observation_space, whole.module_ids, whole.outputs = last.observation_space, module_ids, outputs
    infos_of_rows = [SlotInfos(count=num_slots) for _ in whole.infos]
    whole.infos = list(infos_of_rows)
    for slot, agent in agents.items():
        steps, times = agent.num_steps, np.concatenate([*(each[:-1] for each in agent.times), agent.times[-1][-1:]])
        whole.clock[: steps + 1, slot] = times
        whole.ends[steps - 1, slot] = int(times[-1])
        whole.module_of[:, slot] = module_ids.index(agent.module_id)
        whole.custom_data[slot, 0] = agent.custom_data
        if agent.initial_state is not None:
            state = map_tree(lambda leaf: np.array(leaf)[None], agent.initial_state)
            whole.starts.append(Start(np.zeros(1, np.int64), np.array([slot]), state))
        seen = [info for part in agent.parts for info in part.infos]
        for row, infos in enumerate([*seen, agent.parts[-1].last_infos]):
            if infos and (info := info_of(infos, 0)):
                infos_of_rows[row].of_slots[slot] = info
    whole.early = sorted(
        (step, env * num_agents + place, reward)
        for env, episode in enumerate(episodes)
        for (part, place), received in episode.early.items()
        if part == number
        for step, reward in received
    )
    whole.restore_stops(stops)
    return whole


def _columns(
    last: AgentFragment, agents: Mapping[int, _OpenAgent], module_ids: Sequence[Any], num_rows: int, num_slots: int
) -> tuple[dict[str, Column], dict[Any, dict[str, str]]]:
    """Columns of agents by slots, zeros elsewhere, and module id -> name of an extra output -> column."""

    def empty(name: str, tree: Tree) -> Column:
        rows = num_rows + (name == Columns.OBS)
        made = map_tree(lambda leaf: np.zeros((rows, num_slots, *leaf.shape[1:]), leaf.dtype), tree)
        return Column(name, made)

    columns = {name: empty(name, last.columns[name].row(0)) for name in _NO_OUTPUTS}
    outputs: dict[Any, dict[str, str]] = {}
    for module_id in module_ids:
        first, *others = (agent.names() for agent in agents.values() if agent.module_id == module_id)
        outputs[module_id] = {}
        for name, kind in first.items():
            if all(each.get(name) == kind for each in others):
                column = column_name(columns, name, kind)
                outputs[module_id][name] = column
                if column not in columns:
                    example = next(agent for agent in agents.values() if agent.module_id == module_id)
                    columns[column] = empty(column, example.parts[0].columns[name])
    for slot, agent in agents.items():
        steps, own = agent.num_steps, {name: name for name in _NO_OUTPUTS} | outputs[agent.module_id]
        for name, column in own.items():
            _write(columns[column].tree, slice(0, steps), slot, agent.rows(name))
        _write(columns[Columns.OBS].tree, steps, slot, agent.parts[-1].last_observation)
    return columns, outputs


def _write(tree: Tree, rows: Any, slot: int, values: Tree) -> None:
    map_tree(lambda leaf, value: leaf.__setitem__((rows, slot), value), tree, values)
