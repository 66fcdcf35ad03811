"""Whole episodes from fragments: the chunks of an episode are collected until it has ended."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.infos import SlotInfos, info_of
from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.data.tree import Tree, concatenate_trees, map_tree
from rollflow.stream.fragments.fragment import Final, Fragment, FragmentLayout, Start

_NO_REASON = "its environment was lost"


class EpisodeCollector:
    """Collects the chunks of every slot's episode, and returns whole episodes once they have ended.

    Between two fragments it holds copies of the transitions of open episodes, and nothing else.

    headless_steps    transitions of episodes without their beginning, which are discarded
    """

    def __init__(self) -> None:
        self.headless_steps = 0
        self._open: dict[tuple[int, int], _OpenEpisode] = {}  # by lane and slot

    @property
    def held_steps(self) -> int:
        """Transitions of the episodes that have not ended."""
        return sum(episode.num_steps for episode in self._open.values())

    def add(self, fragment: Fragment) -> "WholeEpisodes | None":
        """Take the next fragment of a lane; return the episodes that end in it, slot by slot, or None."""
        ended: list[_OpenEpisode] = []
        seen: set[int] = set()
        for chunk in _chunks_of(fragment):
            place = fragment.lane, chunk.slot
            seen.add(chunk.slot)
            episode = self._open.pop(place, None)
            if episode is not None and not episode.is_followed_by(chunk):
                ended.append(episode.truncated(_loss_of(fragment, chunk.slot) or _NO_REASON))
                episode = None
            if episode is None:
                if chunk.t_started:
                    self.headless_steps += chunk.stop - chunk.start
                    continue
                episode = _OpenEpisode(chunk.id_, chunk.slot)
            episode.add(fragment, chunk)
            if chunk.is_done:
                ended.append(episode)
            else:
                self._open[place] = episode
        ended += self._lost_without_a_step(fragment, seen)
        return WholeEpisodes(fragment, ended) if ended else None

    def _lost_without_a_step(self, fragment: Fragment, seen: set[int]) -> Iterator["_OpenEpisode"]:
        """The episodes that a loss has ended before they made a step in the fragment."""
        for lane, slot in [place for place in self._open if place[0] == fragment.lane and place[1] not in seen]:
            reason = _loss_of(fragment, slot)
            if reason is not None:
                yield self._open.pop((lane, slot)).truncated(reason)


class WholeEpisodes(Fragment):
    """Whole episodes as a fragment of one slot, end to end, without lookback: each episode is one chunk.

    Columns are those of a `Fragment`, `any[T, 1, ...]`, T being the sum of the episodes' lengths. `lane` and `sequence`
    are those of the fragment in which the episodes ended.
    """

    def __init__(self, last: Fragment, episodes: Sequence["_OpenEpisode"]) -> None:
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


class _Chunk(NamedTuple):
    """One entry of a fragment's `ChunkIndex`, with the episode's id."""

    id_: str
    slot: int
    number: int
    start: int
    stop: int
    t_started: int
    is_done: bool


class _Part(NamedTuple):
    """The n rows of one chunk, and the observation after its last step."""

    columns: Mapping[str, Tree]  # name -> tree of arrays any[n, ...]
    infos: list[Mapping[str, Any]]  # vector infos of one slot, one for each step
    last_observation: Tree  # any[...]
    last_infos: Mapping[str, Any]


class _OpenEpisode:
    """Chunks of an episode that has not ended."""

    def __init__(self, id_: str, slot: int) -> None:
        self.id_, self.slot = id_, slot
        self.parts: list[_Part] = []
        self.num_steps = 0
        self.initial_state: Tree = None
        self.custom_data: dict[Any, Any] = {}

    def is_followed_by(self, chunk: _Chunk) -> bool:
        """True if the chunk follows the last one."""
        return chunk.id_ == self.id_ and chunk.t_started == self.num_steps

    def add(self, fragment: Fragment, chunk: _Chunk) -> None:
        """Add the chunk's rows: copies, if the episode goes on, since the fragment's memory will be reused."""
        self.parts.append(_part_of(fragment, chunk))
        if not chunk.t_started:
            self.initial_state = fragment.initial_state(chunk.start, chunk.slot)
        self.num_steps += chunk.stop - chunk.start
        self.custom_data |= fragment.custom_data.get((chunk.slot, chunk.number), {})

    def truncated(self, reason: str) -> Self:
        """End the episode, which goes on, as truncated, since its environment was lost; return it."""
        self.parts[-1].columns[Columns.TRUNCATEDS][-1] = True
        self.custom_data["lost"] = reason
        return self


def _id_of(ids: Sequence[str], slot: int, number: int) -> str:
    return ids[number]


def _chunks_of(fragment: Fragment) -> Iterator[_Chunk]:
    chunks = fragment.chunks
    fields = chunks.slot, chunks.number, chunks.start, chunks.stop, chunks.t_started
    done = (chunks.terminated | chunks.truncated).tolist()
    for slot, number, start, stop, t_started, is_done in zip(*(each.tolist() for each in fields), done, strict=True):
        yield _Chunk(fragment.layout.episode_id(slot, number), slot, number, start, stop, t_started, is_done)


def _part_of(fragment: Fragment, chunk: _Chunk) -> _Part:
    start, stop, slot = chunk.start, chunk.stop, chunk.slot
    kept = np.asarray if chunk.is_done else np.array
    columns = {
        name: map_tree(lambda leaf: kept(leaf[start:stop, slot]), column.tree)
        for name, column in fragment.columns.items()
    }
    observation, infos = fragment.last_of(stop, slot)
    each = [_of_one_slot(fragment.infos[row], slot) for row in range(start, stop)]
    return _Part(columns, each, map_tree(kept, observation), _of_one_slot(infos, slot))


def _of_one_slot(infos: Mapping[str, Any], slot: int) -> Mapping[str, Any]:
    """The infos of one slot, as those of a vector of one environment."""
    return {} if type(infos) is dict and not infos else SlotInfos([info_of(infos, slot)])


def _loss_of(fragment: Fragment, slot: int) -> str | None:
    """The reason why the environment of a slot was lost; None: it was not."""
    return next((loss.reason for loss in fragment.losses if slot in loss.slots), None)


def _columns(last: Fragment, episodes: Sequence[_OpenEpisode]) -> dict[str, Column]:
    parts = [part for episode in episodes for part in episode.parts]
    columns = {}
    for name in last.columns:
        rows = [part.columns[name] for part in parts]
        if name == Columns.OBS:
            rows.append(map_tree(lambda leaf: np.asarray(leaf)[None], parts[-1].last_observation))
        columns[name] = Column(name, map_tree(lambda leaf: leaf[:, None], concatenate_trees(rows)))
    return columns


def _finals(episodes: Sequence[_OpenEpisode]) -> Iterator[Final]:
    stop = 0
    for episode in episodes:
        stop, last = stop + episode.num_steps, episode.parts[-1]
        observations = map_tree(lambda leaf: np.asarray(leaf)[None], last.last_observation)
        yield Final(stop - 1, np.zeros(1, np.int64), observations, last.last_infos)


def _starts(episodes: Sequence[_OpenEpisode]) -> Iterator[Start]:
    row, slot = 0, np.zeros(1, np.int64)
    for episode in episodes:
        if episode.initial_state is not None:
            yield Start(slot + row, slot, map_tree(lambda leaf: np.array(leaf)[None], episode.initial_state))
        row += episode.num_steps
