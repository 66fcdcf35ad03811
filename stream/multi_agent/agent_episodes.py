"""Live episodes of agents: the ongoing episodes of agent slots, as views that move on with their lane."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree, map_tree, stack_trees
from rollflow.stream.fragments.live_episode import LaneEpisodes, LiveEpisode

if TYPE_CHECKING:
    from rollflow.stream.fragments.fragment import Fragment, FragmentLayout
    from rollflow.stream.multi_agent.agent_lane import AgentLane


class AgentEpisodes(LaneEpisodes):
    """Episodes of K agent slots of one part, with their newest observations, for connector pieces.

    slots           i64[K] ascending
    is_rewritten    whether pieces have written observations
    space           that the last piece that has written leaves observations in; None: not known
    """

    def __init__(self, lane: "AgentLane", slots: NDArray[np.int64], observations: Tree, *, is_rewritten: bool) -> None:
        super().__init__(lane)  # type: ignore[arg-type]  # it has the attributes that are used here
        self.slots = slots
        self.is_rewritten = is_rewritten
        self.space: Any = None
        self._is_written = False  # and not converted: see `settle`
        self._agents = lane
        self._latest = observations
        self._items: list[Tree] | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: Any) -> Any:
        slots = self.slots[index]
        if isinstance(slots, np.ndarray):
            return [self._agents.live[slot] for slot in slots.tolist()]
        return self._agents.live[int(slots)]

    def env_slots(self) -> NDArray[np.int64]:
        """i64[K]: the number in the lane of each agent's environment."""
        envs: NDArray[np.int64] = self.slots // len(self._agents.part.agents)
        return envs

    def newest(self) -> Tree:
        """The newest observation of every slot: a tree of views `any[K, ...]`, not to be written to."""
        if self._items is not None:
            self._latest, self._items = stack_trees(self._items), None
        return self._latest

    def set_observations(self, observations: Tree) -> None:
        """Replace the newest observation of every slot by a tree of arrays `any[K, ...]`."""
        self._latest, self._items, self.is_rewritten = observations, None, True
        self._is_written = True

    def settle(self, space: Any) -> None:
        """End the turn of a piece: what it has written is converted to the dtypes of its space, if it fits."""
        if self._is_written:
            self._is_written, self.space = False, space
        elif self._agents.raw is None or space is not self._agents.observation_space:
            return
        self._latest = self._agents.columns.converted(space, self.newest(), len(self))

    def observation(self, slot: int) -> Tree:
        """The newest observation of one slot, any[...]."""
        place = self._place_of[slot]
        return self._items[place] if self._items is not None else map_tree(lambda leaf: leaf[place], self._latest)

    def set_observation(self, slot: int, observation: Tree) -> None:
        """Replace the newest observation of one slot by `observation`, any[...]."""
        if self._items is None:
            self._items = [map_tree(lambda leaf, i=i: leaf[i], self._latest) for i in range(len(self))]
        self._items[self._place_of[slot]] = observation
        self.is_rewritten = self._is_written = True

    def whose(self, place: int) -> str:
        """A text of the environment, the agent and the module of the slot `slots[place]`, for errors."""
        lane, slot = self._agents, int(self.slots[place])
        env, agent = divmod(slot, len(lane.part.agents))
        module_id = lane.module_ids[lane.module[slot]]
        return f"environment {lane.first_env + env}, agent {lane.part.agents[agent]!r} of module '{module_id}'"

    def shows(self, slot: int) -> bool:
        """True if `slot` is one of the slots."""
        return slot in self._place_of

    def recent_observations(self, count: int) -> Tree:
        """The last `count` observations, oldest first, `any[K, count, ...]`: see `LaneEpisodes.recent_observations`."""
        if count == 1 or self.steps_there(count - 1).any():
            return super().recent_observations(count)

        def after_zeros(leaf: NDArray[Any]) -> NDArray[Any]:
            frames = np.zeros((len(leaf), count, *leaf.shape[1:]), leaf.dtype)
            frames[:, -1] = leaf
            return frames

        # Before the first step the column may have another type than the observations after the pieces.
        return map_tree(after_zeros, self.newest())

    def values_before(self, name: str) -> Tree | None:
        column = self._columns.get(name)
        return None if column is None else column.items(np.maximum(self._rows - 1, 0), self.slots)

    def just_begun(self) -> NDArray[np.bool_]:
        """bool[K]: whether the slot's newest observation is its episode's first."""
        begun: NDArray[np.bool_] = self._starts >= self._rows
        return begun

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {slot: place for place, slot in enumerate(self.slots.tolist())}

    @property
    def _rows(self) -> NDArray[np.int64]:
        return self._agents.at[self.slots]

    @property
    def _starts(self) -> NDArray[np.int64]:
        ended = self._agents.ended
        starts = self._agents.episode_start if ended is None else ended.starts
        return starts[self.slots]

    def steps_there(self, count: int) -> NDArray[np.bool_]:
        """bool[K, count]: which of the last `count` steps `recent` has values of, rather than zeros."""
        rows = self._rows[:, None] + np.arange(-count, 0)
        there: NDArray[np.bool_] = rows >= np.maximum(self._starts, 0)[:, None]
        return there

    def recent(self, name: str, count: int) -> Tree:
        """A column's values at the last `count` steps, oldest first: see `LaneEpisodes.recent`."""
        rows = np.maximum(self._rows[:, None] + np.arange(-count, 0), 0)
        before = ~self.steps_there(count)

        def window(leaf: NDArray[Any]) -> NDArray[Any]:
            taken: NDArray[Any] = leaf[rows, self.slots[:, None]]
            taken[before] = 0
            return taken

        return map_tree(window, self._columns[name].tree)

    @property
    def _columns(self) -> Mapping[str, Column]:
        """The columns, by the names that the module of these slots uses."""
        lane = self._agents
        return (lane.fragment_for(_module_in(lane, int(self.slots[0]))) if len(self) else lane.fragment).columns


def _module_in(lane: "AgentLane", slot: int) -> int:
    """Place of the module that serves a slot, or that served it in the episode that the last step has ended."""
    has_ended = lane.ended is not None and lane.ended.has(slot)
    return int(lane.fragment.module_of[lane.at[slot] - 1, slot] if has_ended else lane.module[slot])


class LiveAgents:
    """The ongoing episode of every agent slot, made on first use, and then kept.

    shown    episodes that pieces are working on; None: pieces are not at work
    """

    def __init__(self, lane: "AgentLane") -> None:
        self.shown: AgentEpisodes | None = None
        self._lane = lane
        self._made: dict[int, LiveEpisode] = {}

    def __getitem__(self, slot: int) -> LiveEpisode:
        made = self._made.get(slot)
        if made is None:
            made = self._made[slot] = LiveEpisode(_SlotLane(self._lane, slot), slot)  # type: ignore[arg-type]
            made.slot, place = divmod(slot, len(self._lane.part.agents))
            made.agent_id = self._lane.part.agents[place]
        lane, ended = self._lane, self._lane.ended
        module = _module_in(lane, slot)
        number = (ended.numbers if ended is not None and ended.has(slot) else lane.episode_number)[slot]
        made.module_id = lane.module_ids[module] if module < len(lane.module_ids) else None
        made.multi_agent_episode_id = lane.parents.get((slot, int(number)))
        return made

    def show(self, slots: NDArray[np.int64], observations: Tree, *, is_rewritten: bool) -> AgentEpisodes:
        """Begin the pieces' work on K slots, i64[K], with their observations, `any[K, ...]`."""
        self.shown = AgentEpisodes(self._lane, slots, observations, is_rewritten=is_rewritten)
        return self.shown


class _SlotLane:
    """The part of a `Lane`'s interface that a `LiveEpisode` uses, for one agent slot with a row of its own."""

    def __init__(self, lane: "AgentLane", slot: int) -> None:
        self._lane, self._slot = lane, slot

    @property
    def index(self) -> int:
        return self._lane.index

    @property
    def layout(self) -> "FragmentLayout":
        return self._lane.layout

    @property
    def fragment(self) -> "Fragment":
        return self._lane.fragment_for(_module_in(self._lane, self._slot))

    @property
    def row(self) -> int:
        return int(self._lane.at[self._slot])

    @property
    def episode_start(self) -> Mapping[int, int]:
        starts = self._lane.ended.starts if self._has_ended else self._lane.episode_start  # type: ignore[union-attr]
        return {self._slot: int(starts[self._slot])}

    @property
    def episode_number(self) -> Mapping[int, int]:
        numbers = self._lane.ended.numbers if self._has_ended else self._lane.episode_number  # type: ignore[union-attr]
        return {self._slot: int(numbers[self._slot])}

    @property
    def custom_data(self) -> dict[tuple[int, int], dict[Any, Any]]:
        return self._lane.custom_data

    @property
    def observation_space(self) -> Any:
        return self._lane.observation_space

    def observation(self, slot: int) -> Tree:
        shown = self._lane.live.shown
        if shown is not None and shown.shows(slot):
            return shown.observation(slot)
        return self._lane.newest_of(slot)

    def set_observation(self, slot: int, observation: Tree) -> None:
        shown = self._lane.live.shown
        if shown is not None and shown.shows(slot):
            shown.set_observation(slot, observation)
        else:
            column = self._lane.fragment.columns[Columns.OBS]
            column.write_slot(self.row, slot, column.whole(observation))

    def settle(self, space: Any) -> None:
        if self._lane.live.shown is not None:
            self._lane.live.shown.settle(space)

    def is_settled(self, slot: int) -> bool:
        shown = self._lane.live.shown
        return shown is None or not shown.shows(slot)

    def has_ended(self, slot: int) -> bool:
        return self._has_ended

    def infos_at(self, row: int, slot: int) -> Mapping[str, Any]:
        if self._has_ended and row == self.row:
            return self._lane.ended.infos  # type: ignore[union-attr]
        return self._lane.fragment.infos[row]

    @property
    def _has_ended(self) -> bool:
        return self._lane.ended is not None and self._lane.ended.has(self._slot)
