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
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
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
        for index, slot in enumerate(fragment.chunks.slot.tolist()):
            chunk, place = fragment.chunk(index), (fragment.lane, slot)
            seen.add(slot)
            episode = self._open.pop(place, None)
            if episode is not None and not episode.is_followed_by(chunk):
                ended.append(episode.truncated(_loss_of(fragment, slot) or _NO_REASON))
                episode = None
            if episode is None:
                if chunk.t_started:
                    self.headless_steps += len(chunk)
                    continue
                episode = _OpenEpisode(chunk.id_, slot)
            episode.add(chunk, _part_of(fragment, index, is_copied=not chunk.is_done))
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

    def is_followed_by(self, chunk: SingleAgentEpisode) -> bool:
        """True if the chunk follows the last one."""
        return chunk.id_ == self.id_ and chunk.t_started == self.num_steps

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


def _id_of(ids: Sequence[str], slot: int, number: int) -> str:
    return ids[number]


def _part_of(fragment: Fragment, index: int, *, is_copied: bool) -> _Part:
    """The rows of a chunk: copies where its episode goes on, since the fragment's memory will be reused."""
    chunks, kept = fragment.chunks, np.array if is_copied else np.asarray
    start, stop, slot = (int(each[index]) for each in (chunks.start, chunks.stop, chunks.slot))
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
