"""What the agents of one part did in one fragment of a multi-agent lane."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.agent_share import PendingAction
from rollflow.stream.chunk_index import ChunkIndex
from rollflow.stream.column import Column
from rollflow.stream.columns import Columns
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ColumnError
from rollflow.stream.fragment import Final, Fragment
from rollflow.stream.infos import SlotInfos
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.tree import Tree, map_tree


class AgentInfos(SlotInfos):
    """The infos of those agent slots that have any, in one row."""

    def __init__(self) -> None:
        super().__init__(())
        self.of_slots: dict[int, Mapping[str, Any]] = {}

    @property
    def dicts(self) -> list[dict[str, Any]]:
        """Those that there are, by slot."""
        return [dict(self.of_slots[slot]) for slot in sorted(self.of_slots)]

    def of(self, slot: int) -> dict[str, Any]:
        """A copy of one slot's."""
        return dict(self.of_slots.get(slot, {}))


class AgentFragment(Fragment):
    """The steps of a part's agents: as in a `Fragment`, a slot being one agent of one environment, an agent slot.

    A row is a step of that agent and not of its environment: slots have as many rows as they have made steps, up to
    `stops`; what stands behind is of no meaning. Next to the columns:

        clock        i64[H+T+1, S]   vector step at which the observation came
        module_of    i16[H+T, S]     which of `module_ids` acted; several may have one id, added one after the other
        stops        i64[S]          row after the slot's last transition
        acts         bool[S]         whether the newest observation, in row `stops`, waits for an action
        waits        bool[S]         whether an action stands there whose observation is yet to come
        received     f32[S]          what the agent received since
        serves       i16[S]          which of `module_ids` serves the slot at the end
        ends         (row, slot) of an episode's last step -> the vector step that it was
        parents      (slot, number of its episode) -> id of the multi-agent episode that it is a part of
        outputs      module id -> its extra outputs, name -> column: those that all modules give alike which have been
                     added under the id. Columns of others have zeros in its rows. An output that is not like one of
                     the same name of another module has a column of its own, which `of_module` calls by the name
    """

    clock: NDArray[np.int64]
    module_of: NDArray[np.int16]

    def __init__(self, *args: Any, part: AgentPart, **options: Any) -> None:
        super().__init__(*args, **options)
        self.part = part
        rows, slots = self.first_row + self.num_rows, self.layout.num_slots
        self.clock = np.zeros((rows + 1, slots), np.int64)
        self.module_of = np.zeros((rows, slots), np.int16)
        self.ends: dict[tuple[int, int], int] = {}
        self.parents: Mapping[tuple[int, int], str] = {}
        self.module_ids: Sequence[Any] = ()
        self.outputs: Mapping[Any, Mapping[str, str]] = {}
        self.acts = self.waits = np.zeros(slots, np.bool_)
        self.received = np.zeros(slots, np.float32)
        self.serves = np.zeros(slots, np.int16)
        self._stops = np.full(slots, rows)
        self._of_modules: dict[Any, ModuleFragment] = {}

    @property
    def stops(self) -> NDArray[np.int64]:
        """i64[S]: the row after the last transition of every slot."""
        return self._stops

    @property
    def policy_version(self) -> int:
        """The oldest policy version that an action of this fragment was computed with; -1 without any."""
        versions = self.gather(Columns.POLICY_VERSION)
        return int(versions.min()) if len(versions) else -1

    @cached_property
    def chunk_modules(self) -> NDArray[np.int16]:
        """i16[C]: which of `module_ids` acted in each chunk."""
        return self.module_of[self.chunks.start, self.chunks.slot]

    def of_module(self, module_id: Any) -> "ModuleFragment":
        """The chunks in which this module acted. Raises ColumnError for a module that never did, nor could have."""
        if module_id not in self.outputs:
            raise ColumnError(f"{self!r}: module '{module_id}' has not acted; {sorted(map(str, self.outputs))} have")
        made = self._of_modules.get(module_id)
        if made is None:
            made = self._of_modules[module_id] = ModuleFragment(self, module_id)
        return made

    def chunk(self, index: int) -> SingleAgentEpisode:
        """Chunk number `index` of `chunks`, as an episode that knows its agent, module and multi-agent episode."""
        episode = super().chunk(index)
        slot, number = int(self.chunks.slot[index]), int(self.chunks.number[index])
        episode.agent_id = self.part.agents[slot % len(self.part.agents)]
        episode.multi_agent_episode_id = self.parents[slot, number]
        episode.module_id = self.module_ids[int(self.chunk_modules[index])]
        return episode

    def rest_of(self, slot: int) -> SingleAgentEpisode:
        """The episode of a slot that has made no step here: with its lookback, and its newest observation."""
        stop, ended = int(self._stops[slot]), int(np.count_nonzero(self.chunks.slot == slot))
        ended += sum(slot in loss.slots and slot not in loss.cut for loss in self.losses)
        t_started = 0 if ended else max(0, self.first_row - int(self.episode_start[slot]))
        number, lookback = int(self.episode_number[slot]) + ended, min(t_started, self.layout.lookback)
        flags = {"terminated": False, "truncated": False, "t_started": t_started}
        module_id = self.module_ids[int(self.serves[slot])]
        view = self.of_module(module_id) if module_id in self.outputs else self
        return view._episode(slot, number, stop, stop, lookback, **flags)

    def action_in(self, row: int, slot: int) -> PendingAction:
        """What a slot did in a row, with the extra outputs, before an observation answers it."""
        values = {name: map_tree(lambda leaf: leaf[row, slot], self.columns[name].tree) for name in self.extra_columns}
        return PendingAction(map_tree(lambda leaf: leaf[row, slot], self.columns[Columns.ACTIONS].tree), values)

    def seal_at(self, stops: NDArray[np.int64]) -> None:
        """Take so many rows of every slot as the whole, and make all of it read-only."""
        self._stops = stops
        rows = int(stops.max()) - self.first_row
        beyond = np.arange(self.first_row, self.first_row + rows)[:, None] >= stops
        for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS):
            self.columns[name].tree[self.first_row : self.first_row + rows][beyond] = False
        self.seal(rows)
        self.clock.flags.writeable = self.module_of.flags.writeable = False

    def __repr__(self) -> str:
        agents = ", ".join(map(str, self.part.agents[:3])) + (", …" if len(self.part.agents) > 3 else "")
        return f"<AgentFragment {self.sequence} of lane {self.lane}: agents {agents}>"


class ModuleFragment(AgentFragment):
    """Those chunks of an `AgentFragment` in which one module acted, over the same columns."""

    def __init__(self, whole: AgentFragment, module_id: Any) -> None:
        # All but the chunks is the whole one's, so its constructor is not called again.
        self.__dict__.update(whole.__dict__)
        self._module_id = module_id
        renamed = {column for names in whole.outputs.values() for name, column in names.items() if name != column}
        if renamed:
            self.columns = named_columns(whole.columns, whole.outputs[module_id], renamed)
        places = [place for place, each in enumerate(whole.module_ids) if each == module_id]
        chosen = np.isin(whole.chunk_modules, places)
        chunks = whole.chunks
        fields = {name: getattr(chunks, name)[chosen] for name in ChunkIndex.__slots__}
        self.__dict__ |= {"chunks": ChunkIndex(**fields), "chunk_modules": whole.chunk_modules[chosen]}
        for name in ("row_order", "_final_items"):
            self.__dict__.pop(name, None)

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Names of this module's extra outputs, `policy_version` among them."""
        return (*self.outputs[self._module_id], Columns.POLICY_VERSION)

    def chunk_at(self, start: int, slot: int) -> SingleAgentEpisode:
        """The chunk that begins in a row of a slot."""
        [index] = np.flatnonzero((self.chunks.slot == slot) & (self.chunks.start == start))
        return self.chunk(int(index))

    def last_observations(self) -> Tree:
        """The observation after the last step of every chunk: a tree of new arrays `any[C, ...]`."""
        mine = copy.copy(self)
        mine.finals = list(self._finals_of_mine())
        return Fragment.last_observations(mine)

    def _finals_of_mine(self) -> Iterator[Final]:
        ends = set(zip((self.chunks.stop - 1).tolist(), self.chunks.slot.tolist(), strict=True))
        for final in self.finals:
            mine = np.array([(final.row, slot) in ends for slot in final.slots.tolist()], np.bool_)
            if mine.all():
                yield final
            elif mine.any():
                chosen: Any = np.flatnonzero(mine)
                observations = map_tree(lambda leaf, at=chosen: leaf[at], final.observations)
                yield Final(final.row, final.slots[chosen], observations, final.infos)


def named_columns(
    columns: Mapping[str, Column], outputs: Mapping[str, str], renamed: Collection[str]
) -> dict[str, Column]:
    """Columns as one module calls them.

    outputs    of the module: name -> column
    renamed    columns that are not called as the outputs in them
    """
    own = {name: columns[column] for name, column in outputs.items()}
    return {name: column for name, column in columns.items() if name not in renamed} | own
