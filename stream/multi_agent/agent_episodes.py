"""The ongoing episodes of agents, as views that move on with their lane."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.column import Column
from rollflow.stream.columns import Columns
from rollflow.stream.live_episode import LaneEpisodes, LiveEpisode
from rollflow.stream.tree import Tree, map_tree, stack_trees

if TYPE_CHECKING:
    from rollflow.stream.fragment import Fragment, FragmentLayout
    from rollflow.stream.multi_agent.agent_lane import AgentLane


class AgentEpisodes(LaneEpisodes):
    """Episodes of some agent slots, K of them, with their newest observations: what pieces are shown of a part.

    slots           i64[K] ascending
    is_rewritten    whether pieces have written observations
    """

    def __init__(self, lane: "AgentLane", slots: NDArray[np.int64], observations: Tree, *, is_rewritten: bool) -> None:
        super().__init__(lane)  # type: ignore[arg-type]  # it has what is asked of a lane here
        self.slots = slots
        self.is_rewritten = is_rewritten
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

    def observations(self) -> Tree:
        """The newest observation of every slot, a tree of arrays `any[K, ...]`: views, not to be written to."""
        if self._items is not None:
            self._latest, self._items = stack_trees(self._items), None
        return self._latest

    def set_observations(self, observations: Tree) -> None:
        """Replace the newest observation of every slot by a tree of arrays `any[K, ...]`."""
        self._latest, self._items, self.is_rewritten = observations, None, True

    def observation(self, slot: int) -> Tree:
        """The newest observation of one slot."""
        place = self._place_of[slot]
        return self._items[place] if self._items is not None else map_tree(lambda leaf: leaf[place], self._latest)

    def set_observation(self, slot: int, observation: Tree) -> None:
        """Replace the newest observation of one slot."""
        if self._items is None:
            self._items = [map_tree(lambda leaf, i=i: leaf[i], self._latest) for i in range(len(self))]
        self._items[self._place_of[slot]] = observation
        self.is_rewritten = True

    def whose(self, place: int) -> str:
        """The environment, the agent and the module of the one at a place, in words."""
        lane, slot = self._agents, int(self.slots[place])
        env, agent = divmod(slot, len(lane.part.agents))
        module_id = lane.module_ids[lane.module[slot]]
        return f"environment {lane.first_env + env}, agent {lane.part.agents[agent]!r} of module '{module_id}'"

    def shows(self, slot: int) -> bool:
        """Whether it is one of the slots."""
        return slot in self._place_of

    def recent_observations(self, count: int) -> Tree:
        """See `LaneEpisodes.recent_observations`."""
        if count == 1 or self._steps_there(count - 1).any():
            return super().recent_observations(count)

        def after_zeros(leaf: NDArray[Any]) -> NDArray[Any]:
            frames = np.zeros((len(leaf), count, *leaf.shape[1:]), leaf.dtype)
            frames[:, -1] = leaf
            return frames

        # At first the column may be of another type than that in which pieces have left the observations.
        return map_tree(after_zeros, self.observations())

    def previous(self, name: str) -> Tree | None:
        """What the step before recorded in a column, a tree of arrays `any[K, ...]`; None where it has nothing yet."""
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

    def _steps_there(self, count: int, slots: Any = None) -> NDArray[np.bool_]:
        rows = self._rows[:, None] + np.arange(-count, 0)
        there: NDArray[np.bool_] = rows >= np.maximum(self._starts, 0)[:, None]
        return there

    def _recent(self, name: str, count: int, slots: Any = None) -> Tree:
        rows = np.maximum(self._rows[:, None] + np.arange(-count, 0), 0)
        before = ~self._steps_there(count)

        def window(leaf: NDArray[Any]) -> NDArray[Any]:
            taken: NDArray[Any] = leaf[rows, self.slots[:, None]]
            taken[before] = 0
            return taken

        return map_tree(window, self._columns[name].tree)

    @property
    def _columns(self) -> Mapping[str, Column]:
        """As the module calls them whose agents these are."""
        lane = self._agents
        return (lane.fragment_for(_module_in(lane, int(self.slots[0]))) if len(self) else lane.fragment).columns


def _module_in(lane: "AgentLane", slot: int) -> int:
    """Place of the module that serves a slot, or that has served it in the episode that the last step has ended."""
    has_ended = lane.ended is not None and lane.ended.has(slot)
    return int(lane.fragment.module_of[lane.at[slot] - 1, slot] if has_ended else lane.module[slot])


class LiveAgents:
    """The ongoing episode of every agent slot, made when first asked for, and then kept.

    shown    what pieces are working on; None: nothing
    """

    def __init__(self, lane: "AgentLane") -> None:
        self.shown: AgentEpisodes | None = None
        self._lane = lane
        self._made: dict[int, LiveEpisode] = {}

    def __getitem__(self, slot: int) -> LiveEpisode:
        made = self._made.get(slot)
        if made is None:
            made = self._made[slot] = LiveEpisode(_SlotLane(self._lane, slot), slot)  # type: ignore[arg-type]
            made.agent_id = self._lane.part.agents[slot % len(self._lane.part.agents)]
        lane, ended = self._lane, self._lane.ended
        module = _module_in(lane, slot)
        number = (ended.numbers if ended is not None and ended.has(slot) else lane.episode_number)[slot]
        made.module_id = lane.module_ids[module] if module < len(lane.module_ids) else None
        made.multi_agent_episode_id = lane.parents.get((slot, int(number)))
        return made

    def show(self, slots: NDArray[np.int64], observations: Tree, *, is_rewritten: bool) -> AgentEpisodes:
        """Have pieces work on some."""
        self.shown = AgentEpisodes(self._lane, slots, observations, is_rewritten=is_rewritten)
        return self.shown

    def hide(self) -> None:
        """The pieces are done."""
        self.shown = None


class _SlotLane:
    """What a `LiveEpisode` asks of its lane, for one agent slot, which has a row of its own."""

    def __init__(self, lane: "AgentLane", slot: int) -> None:
        self._lane, self._slot = lane, slot

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
            self._lane.fragment.columns[Columns.OBS].write_slot(self.row, slot, observation)

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
