"""Whole episodes from fragments: the chunks of an episode are collected until it has ended."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.infos import SlotInfos, copied, info_of
from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.data.tree import Tree, concatenate_trees, map_tree
from rollflow.stream.fragments.fragment import RECORDED, Final, Fragment, FragmentLayout

F = TypeVar("F")
_NO_REASON = "its environment was lost"


AgentChunk = tuple[Any, Fragment, int]
"""Part of an agent's episode: the agent's key, the same in all fragments, a fragment, and the index in its `chunks`."""


class EnvChunk(NamedTuple):
    """Part of an environment's episode in a fragment; each environment is a slot where it has one agent.

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


class EpisodeCollector(Generic[F]):
    """Collects the chunks of every environment's episode, and returns whole episodes once they have ended.

    Between two fragments it holds copies of the transitions of open episodes, and nothing else. This one is for
    environments with one agent.

    headless_steps    transitions of episodes without their beginning, which are discarded
    """

    def __init__(self) -> None:
        self.headless_steps = 0
        self._open: dict[tuple[int, int], OpenEpisode] = {}  # by lane and environment

    @property
    def held_steps(self) -> int:
        """Transitions of the episodes that have not ended."""
        return sum(episode.num_steps for episode in self._open.values())

    def add(self, fragment: Any) -> F | None:
        """Take the next fragment of a lane; return the episodes that end in it, in the order of slots, or None."""
        ended: list[OpenEpisode] = []
        seen: set[int] = set()
        for chunk in self._chunks(fragment):
            place = fragment.lane, chunk.env
            seen.add(chunk.env)
            episode = self._open.pop(place, None)
            if episode is not None and (episode.id_, episode.stop) != (chunk.id_, chunk.begin):
                ended.append(episode.truncated(self._loss_of(fragment, chunk.env) or _NO_REASON))
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
        ended += self._lost_without_a_step(fragment, seen)
        return self._whole(fragment, ended) if ended else None

    def _lost_without_a_step(self, fragment: Any, seen: set[int]) -> Iterator["OpenEpisode"]:
        """The episodes that a loss has ended before they made a step in the fragment."""
        for lane, env in [place for place in self._open if place[0] == fragment.lane and place[1] not in seen]:
            reason = self._loss_of(fragment, env)
            if reason is not None:
                yield self._open.pop((lane, env)).truncated(reason)

    # What differs with several agents

    def _chunks(self, fragment: Any) -> Iterator[EnvChunk]:
        """The chunks of a fragment that have a step, environment by environment."""
        chunks, dones = fragment.chunks, fragment.chunks.terminated | fragment.chunks.truncated
        fields = (chunks.slot, chunks.number, chunks.t_started, chunks.stop - chunks.start, dones)
        rows = zip(*(each.tolist() for each in fields), strict=True)
        for index, (slot, number, begin, length, is_done) in enumerate(rows):
            id_, agents = fragment.layout.episode_id(slot, number), [(None, fragment, index)]
            yield EnvChunk(slot, id_, 0, begin, begin + length, is_done, agents)

    def _loss_of(self, fragment: Any, env: int) -> str | None:
        """The reason why an environment was lost in a fragment; None: it was not."""
        return next((loss.reason for loss in fragment.losses if env in loss.slots), None)

    def _whole(self, fragment: Any, ended: Sequence["OpenEpisode"]) -> Any:
        """Episodes that have ended in a fragment, as a fragment."""
        return WholeEpisodes(fragment, [agent for episode in ended for agent in episode.agents.values()])


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
        """Add its next chunk; rows are copied where it goes on, since the fragment's memory will be reused."""
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

    def rows(self, name: str) -> Tree:
        """All rows of a column: a tree of arrays `any[num_steps, ...]`."""
        return concatenate_trees([columns[name] for columns in self.columns])


class WholeEpisodes(Fragment):
    """Whole episodes as a fragment of one slot, end to end, without lookback: each episode is one chunk.

    Columns are those of a `Fragment`, `any[T, 1, ...]`, T being the sum of the episodes' lengths. `lane` and `sequence`
    are those of the fragment in which the episodes ended.
    """

    def __init__(self, last: Fragment, episodes: Sequence[AgentSteps]) -> None:
        stops = np.cumsum([episode.num_steps for episode in episodes])
        none, num_rows = np.zeros(1, np.int64), int(stops[-1])
        layout = whole_layout(last, 1, num_rows, partial(_id_of, [episode.id_ for episode in episodes]))
        columns = _columns(last, episodes)
        super().__init__(layout, last.lane, last.sequence, columns)
        self.observation_space, self.infos = last.observation_space, []
        for number, (episode, stop) in enumerate(zip(episodes, stops.tolist(), strict=True)):
            self.infos += [SlotInfos([info]) if info else {} for info in episode.infos]
            last_obs = map_tree(lambda leaf: np.asarray(leaf)[None], episode.last_observation)
            self.finals.append(Final(stop - 1, none, last_obs, SlotInfos([episode.last_info])))
            if episode.initial_state is not None:
                self.starts[stop - episode.num_steps, 0] = episode.initial_state
            self.custom_data[0, number] = episode.custom_data
        self.infos.append(self.finals[-1].infos)
        self._env_slots = np.array([episode.slot for episode in episodes], np.int64)
        self.origin = whole_origin(last.origin)
        self.seal(num_rows)

    def env_slots(self, slot: Any, number: Any) -> Any:
        """The lane's slots that chunks are from: an int or i64[C], as `number` is."""
        return self._env_slots[number]

    def describe(self) -> str:
        """A text of the contents, for errors."""
        return f"lane {self.lane}, {len(self._env_slots)} whole episodes, ended in fragment {self.sequence}"

    def __repr__(self) -> str:
        held = f"{len(self._env_slots)} episodes, {self.num_rows} steps"
        return f"<WholeEpisodes {self.sequence} of lane {self.lane}: {held}>"


def whole_layout(last: Fragment, num_slots: int, num_rows: int, episode_id: Any) -> FragmentLayout:
    """The layout of whole episodes, the last of which ended in a fragment."""
    return FragmentLayout(num_slots, num_rows, 0, last.layout.action_space, False, episode_id)


def whole_origin(origin: Origin | None) -> Origin | None:
    """The origin of whole episodes: the collector counts what is lost of them."""
    return None if origin is None else Origin(origin.ledger, 0, origin.name)


def _id_of(ids: Sequence[str], slot: int, number: int) -> str:
    return ids[number]


def _columns(last: Fragment, episodes: Sequence[AgentSteps]) -> dict[str, Column]:
    columns = {}
    for name in last.columns:
        rows = [chunk[name] for episode in episodes for chunk in episode.columns]
        if name == Columns.OBS:
            rows.append(map_tree(lambda leaf: np.asarray(leaf)[None], episodes[-1].last_observation))
        columns[name] = Column(name, map_tree(lambda leaf: leaf[:, None], concatenate_trees(rows)))
    return columns
