"""Whole episodes from fragments: the chunks of an episode are collected until it has ended."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.infos import SlotInfos, copied, info_of
from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.data.tree import Tree, kind_of, map_tree
from rollflow.stream.fragments.fragment import RECORDED, Final, Fragment, FragmentLayout
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock
from rollflow.stream.multi_agent.multi_agent_fragment import AgentChunk, AnyFragment, MultiAgentFragment

_NO_REASON = "its environment was lost"
_NO_OUTPUTS = (Columns.OBS, *RECORDED, Columns.POLICY_VERSION)


class EnvChunk(NamedTuple):
    """Part of an environment's episode in a fragment; each environment is a slot if it has one agent.

    Steps are counted from any step on, which is the same for all parts of an episode.
    """

    env: int  # number of the environment in the lane
    id_: str
    started: int  # step at which the episode began
    begin: int
    stop: int
    is_done: bool
    agents: Sequence[AgentChunk]
    custom_data: Mapping[Any, Any] = {}
    is_truncated: bool = False  # of several agents
    early: Mapping[Any, list[tuple[int, float]]] = {}  # agent's key -> steps and rewards before its first observation

    @property
    def num_steps(self) -> int:
        """Transitions, of all agents."""
        return sum(int(each.chunks.stop[index] - each.chunks.start[index]) for _, each, index in self.agents)


class EpisodeCollector:
    """Collects the chunks of every environment's episode, and returns whole episodes once they have ended.

    Between two fragments it holds copies of the transitions of open episodes, and nothing else.

    headless_steps    transitions of episodes without their beginning, which are discarded
    """

    def __init__(self) -> None:
        self.headless_steps = 0
        self._open: dict[tuple[int, int], OpenEpisode] = {}  # by lane and environment

    @property
    def held_steps(self) -> int:
        """Transitions of the episodes that have not ended."""
        return sum(episode.num_steps for episode in self._open.values())

    def get_state(self) -> dict[str, Any]:
        """The open episodes: none is copied."""
        opened = []
        for place, episode in self._open.items():
            agents = [[key, vars(steps)] for key, steps in episode.agents.items()]
            opened.append([*place, vars(episode) | {"agents": agents, "early": list(episode.early.items())}])
        return {"headless_steps": self.headless_steps, "open": opened}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` gave."""
        self.headless_steps = state["headless_steps"]
        for lane, env, fields in state["open"]:
            self._open[lane, env] = episode = OpenEpisode.__new__(OpenEpisode)
            vars(episode).update(fields | {"agents": {}, "early": dict(fields["early"])})
            for key, of_agent in fields["agents"]:
                episode.agents[key] = AgentSteps.__new__(AgentSteps)
                vars(episode.agents[key]).update(of_agent)

    def add(self, fragment: AnyFragment) -> AnyFragment | None:
        """Take the next fragment of a lane; return the episodes that end in it, in the order of slots, or None."""
        ended: list[OpenEpisode] = []
        seen: set[int] = set()
        for chunk in _env_chunks(fragment):
            place = fragment.lane, chunk.env
            seen.add(chunk.env)
            episode = self._open.pop(place, None)
            if episode is not None and (episode.id_, episode.stop) != (chunk.id_, chunk.begin):
                ended.append(episode.truncated(_loss_of(fragment, chunk.env) or _NO_REASON))
                episode = None
            if episode is None:
                if chunk.begin > chunk.started:
                    self.headless_steps += chunk.num_steps
                    continue
                episode = OpenEpisode(chunk)
            episode.add(chunk)
            if chunk.is_done:
                ended.append(episode)
            else:
                self._open[place] = episode
        for place in [place for place in self._open if place[0] == fragment.lane and place[1] not in seen]:
            reason = _loss_of(fragment, place[1])  # before the episode made a step in the fragment
            if reason is not None:
                ended.append(self._open.pop(place).truncated(reason))
        ended = [episode for episode in ended if episode.num_steps]
        if not ended:
            return None
        make: Any = _agents_whole if isinstance(fragment, MultiAgentFragment) else _one_agent_whole
        whole: AnyFragment = make(fragment, ended)
        if fragment.origin is not None:  # the collector counts what is lost of them
            whole.origin = Origin(fragment.origin.ledger, 0, fragment.origin.name)
        return whole


def _env_chunks(fragment: AnyFragment) -> Iterator[EnvChunk]:
    """The chunks of a fragment that have a step, environment by environment."""
    if isinstance(fragment, MultiAgentFragment):
        yield from _agents_chunks(fragment)
        return
    chunks, dones = fragment.chunks, fragment.chunks.terminated | fragment.chunks.truncated
    fields = (chunks.slot, chunks.number, chunks.t_started, chunks.stop - chunks.start, dones)
    rows = zip(*(each.tolist() for each in fields), strict=True)
    for index, (slot, number, begin, length, is_done) in enumerate(rows):
        id_, agents = fragment.layout.episode_id(slot, number), [(None, fragment, index)]
        yield EnvChunk(slot, id_, 0, begin, begin + length, is_done, agents)


def _agents_chunks(fragment: MultiAgentFragment) -> Iterator[EnvChunk]:
    clock = fragment.clock
    for env in range(fragment.num_envs):
        for nth in range(clock.count(env)):
            started, end = clock.start(env, nth), clock.end_of(env, nth)
            begin, stop = max(clock.first, started), clock.first + fragment.num_rows if end is None else end[0]
            if begin == stop:
                continue  # lost before the first step, or begun behind the last
            key = env, int(clock.numbers[env]) + nth
            early: dict[tuple[int, int], list[tuple[int, float]]] = {}
            for number, part in enumerate(fragment.parts):
                for place, vector_step, reward in part.early_in(env, started, stop):
                    early.setdefault((number, place), []).append((vector_step, reward))
            yield EnvChunk(
                env,
                fragment.episode_id(*key),
                started,
                begin,
                stop,
                end is not None,
                fragment.agent_chunks.get((env, nth), []),
                fragment.custom_data.get(key, {}),
                end is not None and end[1],
                early,
            )


def _loss_of(fragment: AnyFragment, env: int) -> str | None:
    """The reason why an environment was lost in a fragment; None: it was not."""
    if isinstance(fragment, MultiAgentFragment):
        return next((reason for _, reason in fragment.losses), None)
    return next((loss.reason for loss in fragment.losses if env in loss.slots), None)


class OpenEpisode:
    """Chunks of an environment's episode.

    started, stop    step at which it began, and the one up to which it is there: see `EnvChunk`
    is_truncated     whether it has ended as truncated, of several agents
    custom_data      of several agents
    agents           agent's key -> its chunks; it may have ended before
    early            see `EnvChunk`
    """

    def __init__(self, chunk: EnvChunk) -> None:
        self.id_, self.env, self.started, self.stop = chunk.id_, chunk.env, chunk.started, chunk.begin
        self.is_truncated = False
        self.custom_data: dict[Any, Any] = {}
        self.agents: dict[Any, AgentSteps] = {}
        self.early: dict[Any, list[tuple[int, float]]] = {}

    @property
    def num_steps(self) -> int:
        """Steps of all agents so far."""
        return sum(agent.num_steps for agent in self.agents.values())

    def add(self, chunk: EnvChunk) -> None:
        """Add its next chunk; rows are copied if it goes on, since the fragment's memory will be reused."""
        for key, fragment, index in chunk.agents:
            if key not in self.agents:
                self.agents[key] = AgentSteps(fragment, index)
            self.agents[key].add(fragment, index, is_copied=not chunk.is_done)
        self.stop, self.is_truncated = chunk.stop, chunk.is_truncated
        self.custom_data |= chunk.custom_data
        self.early |= chunk.early  # with what came in the fragments before
        if chunk.is_done and "lost" in self.custom_data:
            self.truncated(self.custom_data["lost"])

    def truncated(self, reason: str) -> Self:
        """End the episode as truncated, and all agents that go on, since its environment was lost; return it."""
        self.is_truncated = True
        self.custom_data["lost"] = reason
        for agent in self.agents.values():
            agent.end(reason)
        return self


class AgentSteps:
    """Chunks of an agent's episode.

    slot         of the fragments that they are from
    columns      of each chunk, name -> tree of arrays any[n, ...]
    infos        one for each step; `last_info` is that of the observation after the last one, `last_observation`
    times        of the observations: see `Fragment.times_of`
    """

    def __init__(self, fragment: Fragment, index: int) -> None:
        self.slot = int(fragment.chunks.slot[index])
        self.id_ = fragment.layout.episode_id(self.slot, int(fragment.chunks.number[index]))
        self.columns: list[dict[str, Tree]] = []
        self.infos: list[dict[str, Any]] = []
        self.times: list[int] = []
        self.num_steps = 0
        self.initial_state: Tree = None
        self.last_observation: Tree = None
        self.last_info: dict[str, Any] = {}
        self.custom_data: dict[Any, Any] = {}

    def add(self, fragment: Fragment, index: int, *, is_copied: bool) -> None:
        """Add a chunk of a fragment, or copies of its rows."""
        chunks, slot, kept = fragment.chunks, self.slot, np.array if is_copied else np.asarray
        start, stop = int(chunks.start[index]), int(chunks.stop[index])
        columns = {
            name: map_tree(lambda leaf: kept(leaf[start:stop, slot]), fragment.columns[name].tree)
            for name in (Columns.OBS, *RECORDED, *fragment.extra_columns)
        }
        observation, last_infos = fragment.last_of(stop, slot)
        rows = *fragment.infos[start:stop], last_infos
        *infos, self.last_info = [copied(info_of(each, slot)) if each else {} for each in rows]
        self.last_observation = map_tree(kept, observation)
        self.columns.append(columns)
        self.infos += infos
        self.times += fragment.times_of(index).tolist()[bool(self.times) :]  # the first is the last before
        if not chunks.t_started[index]:
            self.initial_state = fragment.starts.get((start, slot))
        self.num_steps += stop - start
        self.custom_data |= fragment.custom_data.get((slot, int(chunks.number[index])), {})

    def end(self, reason: str) -> None:
        """End the episode as truncated with its environment, which was lost, unless it has ended."""
        columns = self.columns[-1]
        if not (columns[Columns.TERMINATEDS][-1] or columns[Columns.TRUNCATEDS][-1]):
            columns[Columns.TRUNCATEDS][-1] = True
            self.custom_data["lost"] = reason

    def write(self, whole: Fragment, row: int, slot: int, number: int, names: Sequence[str]) -> None:
        """Write the episode into the columns of these names of a fragment, and its records, from a row on.

        slot, number    of the fragment, and of the episode there
        """
        begin = row
        for chunk in self.columns:
            rows = slice(begin, begin + len(chunk[Columns.REWARDS]))
            for name in names:
                _put(whole.columns[name], rows, slot, chunk[name])
            begin = rows.stop
        _put(whole.columns[Columns.OBS], begin, slot, self.last_observation)
        for at, info in enumerate([*self.infos, self.last_info], row):
            infos: Any = whole.infos[at]
            infos.of_slots.pop(slot, None)  # the last one of the episode before
            if info:
                infos.of_slots[slot] = info
        if self.initial_state is not None:
            whole.starts[row, slot] = self.initial_state
        whole.custom_data[slot, number] = self.custom_data


def _one_agent_whole(last: Fragment, episodes: Sequence[OpenEpisode]) -> Fragment:
    """Whole episodes as a fragment of one slot, end to end, without lookback: each episode is one chunk.

    Columns are those of a `Fragment`, `any[T, 1, ...]`, T being the sum of the episodes' lengths. `lane` and `sequence`
    are those of the fragment in which the episodes ended.
    """
    agents = [agent for episode in episodes for agent in episode.agents.values()]
    stops = np.cumsum([agent.num_steps for agent in agents]).tolist()
    columns = {name: _empty(name, column.row(0), stops[-1], 1) for name, column in last.columns.items()}
    ids = [agent.id_ for agent in agents]
    layout = FragmentLayout(1, stops[-1], 0, last.layout.action_space, False, partial(_id_at, ids, by_number=True))
    whole = Fragment(layout, last.lane, last.sequence, columns)
    whole.observation_space = last.observation_space
    whole.envs = np.array([agent.slot for agent in agents], np.int64)
    whole.infos = [SlotInfos(count=1) for _ in whole.infos]
    for number, (agent, stop) in enumerate(zip(agents, stops, strict=True)):
        agent.write(whole, stop - agent.num_steps, 0, number, list(columns))
        observation = map_tree(lambda leaf: np.asarray(leaf)[None], agent.last_observation)
        whole.finals.append(Final(stop - 1, np.zeros(1, np.int64), observation, SlotInfos([agent.last_info])))
    whole.seal(stops[-1])
    return whole


def _agents_whole(last: MultiAgentFragment, episodes: Sequence[OpenEpisode]) -> MultiAgentFragment:
    """Whole episodes of several agents, without lookback.

    Each is by itself, as that of an environment with one episode, whose first vector step is 0. Lane and sequence are
    those of the fragment in which the episodes ended.
    """
    none, ids = np.zeros(len(episodes), np.int64), [episode.id_ for episode in episodes]
    ends = sorted((each.stop - each.started, env, each.is_truncated, False) for env, each in enumerate(episodes))
    clock = EnvClock(0, none, none, partial(_id_at, ids), ends)
    envs = np.array([episode.env for episode in episodes], np.int64)
    return MultiAgentFragment(
        last.lane,
        last.sequence,
        [_whole_part(index, part, episodes, clock, envs) for index, part in enumerate(last.parts)],
        num_rows=ends[-1][0],
        clock=clock,
        custom_data={(env, 0): episode.custom_data for env, episode in enumerate(episodes)},
        envs=envs,
    )


def _whole_part(
    number: int, last: AgentFragment, episodes: Sequence[OpenEpisode], clock: EnvClock, envs: np.ndarray[Any, Any]
) -> AgentFragment:
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
    columns = {name: _empty(name, last.columns[name].row(0), num_rows, num_slots) for name in _NO_OUTPUTS}
    outputs: dict[Any, list[str]] = {}  # module id -> names of extra outputs
    for module_id in dict.fromkeys(module_id for module_id, _ in agents.values()):
        chunks = [chunk for each, agent in agents.values() if each == module_id for chunk in agent.columns]
        first, *others = ({name: kind_of(tree) for name, tree in chunk.items()} for chunk in chunks)
        outputs[module_id] = []
        for name, kind in first.items():
            if name in _NO_OUTPUTS or any(each.get(name) != kind for each in others):
                continue
            if name not in columns:
                columns[name] = _empty(name, map_tree(lambda leaf: leaf[:1], chunks[0][name]), num_rows, num_slots)
            if kind_of(columns[name].row(0)) == kind:  # of another that has gone, its type may have been another
                outputs[module_id].append(name)
    ids = [agents[slot][1].id_ if slot in agents else "" for slot in range(num_slots)]
    layout = FragmentLayout(num_slots, num_rows, 0, last.layout.action_space, False, partial(_id_at, ids))
    whole = AgentFragment(layout, last.lane, last.sequence, columns, part=last.part, env_clock=clock)
    whole.observation_space, whole.module_ids, whole.outputs = last.observation_space, list(outputs), outputs
    whole.infos = [SlotInfos(count=num_slots) for _ in whole.infos]
    whole.envs = envs
    for slot, (module_id, agent) in agents.items():
        steps, times = agent.num_steps, np.array(agent.times) - episodes[slot // num_agents].started
        whole.clock[: steps + 1, slot] = times
        whole.ends[steps - 1, slot] = int(times[-1])
        whole.module_of[:, slot] = whole.module_ids.index(module_id)
        agent.write(whole, 0, slot, 0, [*_NO_OUTPUTS, *outputs[module_id]])
    whole.early = sorted(
        (vector_step - episode.started, env * num_agents + place, reward)
        for env, episode in enumerate(episodes)
        for (part, place), received in episode.early.items()
        if part == number
        for vector_step, reward in received
    )
    whole.seal_at(stops)
    return whole


def _empty(name: str, row: Tree, num_rows: int, num_slots: int) -> Column:
    """A column of zeros. `row` has the types, a tree of arrays any[n, ...]."""
    rows = num_rows + (name == Columns.OBS)
    return Column(name, map_tree(lambda leaf: np.zeros((rows, num_slots, *leaf.shape[1:]), leaf.dtype), row))


def _put(column: Column, rows: Any, slot: int, values: Tree) -> None:
    map_tree(lambda leaf, value: leaf.__setitem__((rows, slot), value), column.tree, values)


def _id_at(ids: Sequence[str], slot: int, number: int, *, by_number: bool = False) -> str:
    return ids[number if by_number else slot]
