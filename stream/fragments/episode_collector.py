"""Whole episodes from fragments: the chunks of an episode are collected until it has ended."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.infos import SlotInfos, info_of
from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.data.tree import Tree, concatenate_trees, map_tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import RECORDED, Final, Fragment, FragmentLayout, Start

F = TypeVar("F")
_NO_REASON = "its environment was lost"


class EnvChunk(NamedTuple):
    """Part of an environment's episode in a fragment; each environment is a slot where it has one agent."""

    env: int  # number of the environment in the lane
    id_: str
    t_started: int  # steps of the environment in the episode before
    num_steps: int  # transitions, of all agents
    is_done: bool
    add_to: Callable[[Any], None]  # adds it to its open episode


class EpisodeCollector(Generic[F]):
    """Collects the chunks of every environment's episode, and returns whole episodes once they have ended.

    Between two fragments it holds copies of the transitions of open episodes, and nothing else. This one is for
    environments with one agent.

    headless_steps    transitions of episodes without their beginning, which are discarded
    """

    def __init__(self) -> None:
        self.headless_steps = 0
        self._open: dict[tuple[int, int], Any] = {}  # by lane and environment

    @property
    def held_steps(self) -> int:
        """Transitions of the episodes that have not ended."""
        return sum(episode.num_steps for episode in self._open.values())

    def add(self, fragment: Any) -> F | None:
        """Take the next fragment of a lane; return the episodes that end in it, in the order of slots, or None."""
        ended: list[Any] = []
        seen: set[int] = set()
        for chunk in self._chunks(fragment):
            place = fragment.lane, chunk.env
            seen.add(chunk.env)
            episode = self._open.pop(place, None)
            if episode is not None and (episode.id_, episode.t) != (chunk.id_, chunk.t_started):
                ended.append(episode.truncated(self._loss_of(fragment, chunk.env) or _NO_REASON))
                episode = None
            if episode is None:
                if chunk.t_started:
                    self.headless_steps += chunk.num_steps
                    continue
                episode = self._begun(chunk)
            chunk.add_to(episode)
            if chunk.is_done:
                ended.append(episode)
            else:
                self._open[place] = episode
        ended += self._lost_without_a_step(fragment, seen)
        return self._whole(fragment, ended) if ended else None

    def _lost_without_a_step(self, fragment: Any, seen: set[int]) -> Iterator[Any]:
        """The episodes that a loss has ended before they made a step in the fragment."""
        for lane, env in [place for place in self._open if place[0] == fragment.lane and place[1] not in seen]:
            reason = self._loss_of(fragment, env)
            if reason is not None:
                yield self._open.pop((lane, env)).truncated(reason)

    # What differs with several agents

    def _chunks(self, fragment: Any) -> Iterator[EnvChunk]:
        """The chunks of a fragment that have a step, environment by environment."""
        for index, slot in enumerate(fragment.chunks.slot.tolist()):
            chunk = fragment.chunk(index)
            add_to = partial(_add_chunk, fragment, index, chunk, is_copied=not chunk.is_done)
            yield EnvChunk(slot, chunk.id_, chunk.t_started, len(chunk), chunk.is_done, add_to)

    def _begun(self, chunk: EnvChunk) -> Any:
        """An episode that begins with a chunk."""
        return OpenEpisode(chunk.id_, chunk.env)

    def _loss_of(self, fragment: Any, env: int) -> str | None:
        """The reason why an environment was lost in a fragment; None: it was not."""
        return next((loss.reason for loss in fragment.losses if env in loss.slots), None)

    def _whole(self, fragment: Any, ended: Sequence[Any]) -> Any:
        """Episodes that have ended in a fragment, as a fragment."""
        return WholeEpisodes(fragment, ended)


class WholeEpisodes(Fragment):
    """Whole episodes as a fragment of one slot, end to end, without lookback: each episode is one chunk.

    Columns are those of a `Fragment`, `any[T, 1, ...]`, T being the sum of the episodes' lengths. `lane` and `sequence`
    are those of the fragment in which the episodes ended.
    """

    def __init__(self, last: Fragment, episodes: Sequence["OpenEpisode"]) -> None:
        num_rows = sum(episode.num_steps for episode in episodes)
        layout = FragmentLayout(
            num_slots=1,
            num_rows=num_rows,
            lookback=0,
            action_space=last.layout.action_space,
            resets_next_step=False,
            episode_id=partial(_id_of, [episode.id_ for episode in episodes]),
        )
        starts = {"episode_start": np.zeros(1, np.int64), "episode_number": np.zeros(1, np.int64)}
        super().__init__(layout, last.lane, last.sequence, _columns(last, episodes), **starts)
        self.observation_space = last.observation_space
        self.infos = [info for episode in episodes for part in episode.parts for info in part.infos]
        self.infos.append(episodes[-1].parts[-1].last_infos)
        self.finals = list(_finals(episodes))
        self.starts = list(_starts(episodes))
        self.custom_data = {(0, number): episode.custom_data for number, episode in enumerate(episodes)}
        self._env_slots = np.array([episode.slot for episode in episodes], np.int64)
        if last.origin is not None:
            self.origin = Origin(last.origin.ledger, 0, last.origin.name)  # the collector counts what is lost
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


class _Part(NamedTuple):
    """The n rows of one chunk, and the observation after its last step."""

    columns: Mapping[str, Tree]  # name -> tree of arrays any[n, ...]
    infos: list[Mapping[str, Any]]  # vector infos of one slot, one for each step
    last_observation: Tree  # any[...]
    last_infos: Mapping[str, Any]


class OpenEpisode:
    """Chunks of an agent's episode, whose environment's has not ended.

    slot    of the fragments that they are from
    """

    def __init__(self, id_: str, slot: int) -> None:
        self.id_, self.slot = id_, slot
        self.parts: list[_Part] = []
        self.num_steps = 0
        self.initial_state: Tree = None
        self.custom_data: dict[Any, Any] = {}

    @property
    def t(self) -> int:
        """Steps so far."""
        return self.num_steps

    def add(self, chunk: SingleAgentEpisode, part: _Part) -> None:
        """Add a chunk, and its rows."""
        self.parts.append(part)
        if not chunk.t_started:
            self.initial_state = chunk.initial_state
        self.num_steps += len(chunk)
        self.custom_data |= chunk.custom_data

    def truncated(self, reason: str) -> Self:
        """End the episode, which goes on, as truncated, since its environment was lost; return it."""
        self.parts[-1].columns[Columns.TRUNCATEDS][-1] = True
        self.custom_data["lost"] = reason
        return self

    def rows(self, name: str) -> Tree:
        """All rows of a column: a tree of arrays `any[num_steps, ...]`."""
        return concatenate_trees([part.columns[name] for part in self.parts])


def _id_of(ids: Sequence[str], slot: int, number: int) -> str:
    return ids[number]


def _add_chunk(
    fragment: Fragment, index: int, chunk: SingleAgentEpisode, episode: OpenEpisode, *, is_copied: bool
) -> None:
    """Add a chunk of a fragment to its episode."""
    episode.add(chunk, part_of(fragment, index, is_copied=is_copied))


def part_of(fragment: Fragment, index: int, *, is_copied: bool) -> _Part:
    """The rows of a chunk: copies where its episode goes on, since the fragment's memory will be reused."""
    chunks, kept = fragment.chunks, np.array if is_copied else np.asarray
    start, stop, slot = (int(each[index]) for each in (chunks.start, chunks.stop, chunks.slot))
    columns = {
        name: map_tree(lambda leaf: kept(leaf[start:stop, slot]), fragment.columns[name].tree)
        for name in (Columns.OBS, *RECORDED, *fragment.extra_columns)
    }
    observation, infos = fragment.last_of(stop, slot)
    each = [_of_one_slot(fragment.infos[row], slot) for row in range(start, stop)]
    return _Part(columns, each, map_tree(kept, observation), _of_one_slot(infos, slot))


def _of_one_slot(infos: Mapping[str, Any], slot: int) -> Mapping[str, Any]:
    """The infos of one slot, as those of a vector of one environment."""
    return {} if type(infos) is dict and not infos else SlotInfos([info_of(infos, slot)])


def _columns(last: Fragment, episodes: Sequence[OpenEpisode]) -> dict[str, Column]:
    parts = [part for episode in episodes for part in episode.parts]
    columns = {}
    for name in last.columns:
        rows = [part.columns[name] for part in parts]
        if name == Columns.OBS:
            rows.append(map_tree(lambda leaf: np.asarray(leaf)[None], parts[-1].last_observation))
        columns[name] = Column(name, map_tree(lambda leaf: leaf[:, None], concatenate_trees(rows)))
    return columns


def _finals(episodes: Sequence[OpenEpisode]) -> Iterator[Final]:
    stop = 0
    for episode in episodes:
        stop, last = stop + episode.num_steps, episode.parts[-1]
        observations = map_tree(lambda leaf: np.asarray(leaf)[None], last.last_observation)
        yield Final(stop - 1, np.zeros(1, np.int64), observations, last.last_infos)


def _starts(episodes: Sequence[OpenEpisode]) -> Iterator[Start]:
    row, slot = 0, np.zeros(1, np.int64)
    for episode in episodes:
        if episode.initial_state is not None:
            yield Start(slot + row, slot, map_tree(lambda leaf: np.array(leaf)[None], episode.initial_state))
        row += episode.num_steps
