"""AgentLane: the agents of one part in the environments of a lane, and the fragment that they are filling.

Every agent slot stands at a row of its own: row `at[slot]` has its newest observation, and the action that answers it.
A vector step is

    record_actions(...)    write the modules' actions into the rows of slots that act
    record_step(...)       write the environments' answer; slots with an observation move on by one row
    begin(...)             write first observations, if environments were reset
    show(...), commit(...) connector pieces read the newest observations and may write them back

An agent that acted and has no observation yet stays in its row, and its rewards are added up. While all agents of the
part act in every step, they stand in one row. Then a step is a handful of writes of whole rows.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.infos import SlotInfos, copied
from rollflow.stream.data.space import row_of
from rollflow.stream.data.tree import Tree, concatenate_trees, kind_of, map_tree, stack_trees
from rollflow.stream.fragments.fragment import Final, FragmentLayout
from rollflow.stream.fragments.lane import LaneColumns, SlotLane, copy_rows, outputs_error
from rollflow.stream.fragments.live_episode import EndedEpisodes, LaneEpisodes, LiveEpisode
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock
from rollflow.stream.multi_agent.agent_part import AgentPart, Observed, PartStep

Slots = NDArray[np.int64]
_OF_SLOTS = "episode_start", "episode_number", "lives", "begun_at"  # which a fragment has not as they are now


class ModuleTurn:
    """The slots of a part that one module is to act for in a vector step, from their episodes to its recorded outputs.

        part, place    lane of the agents, and place of the module in it
        acting         the module
        slots          i64[K]
        shared_data    of the module's connector pieces

    places    of the slots' agents in the part, if it is a block of them; else None

    To the stages behind the connector pieces a turn is what a `Lane` is to those of one agent:

    episodes          the slots' episodes
    batch             data between the stages: column -> tree of arrays `any[K, ...]`, or a `LaneOutput`
    policy_version    of the weights that the batch was last made by
    actions           that the environments are stepped with next, `any[K, ...]`
    is_first          True until outputs of the module have been recorded in the lane

    While all slots of the part act, the same turns are taken until modules change. If a module then
    serves the same agents in every environment, at equal distances, they are a block: while all slots stand in one row,
    it is read and written by views of the fragment's columns, `[row, environment, agent, ...]`.
    """

    device: Any = None  # of the columns' tensors: they are arrays

    def __init__(self, part: "AgentLane", place: int, slots: Slots, shared_data: dict[str, Any]) -> None:
        self.part, self.place, self.slots, self.shared_data = part, place, slots, shared_data
        self.acting, self.is_first, self.layout = part.modules[place], place not in part.outputs, part.layout
        self.episodes: Any = None
        self.batch: Any = None
        self.actions: Tree = None
        self.policy_version = -1
        agents, num_slots = len(part.part.agents), part.layout.num_slots
        self._shape, self._count = (num_slots // agents, agents), len(slots)
        self.places = None if part.acting is not part.everyone else places_of(slots, agents, num_slots)
        self._observations: Tree = None
        self._newest: tuple[int, ...] = ()  # shape of observations that are one array
        # Name of an output, its column's rows and dtype, the shape that it has, and the shape in a row.
        self.outputs: list[tuple[str, NDArray[Any], Any, tuple[int, ...], tuple[int, ...]]] | None = None
        self._version: int | None = None  # that all later rows have

    @property
    def where(self) -> str:
        """The module, the lane and its vector step, for errors."""
        return f"module '{self.acting.module_id}', lane {self.part.index}, vector step {self.part.vector_steps}"

    @property
    def whose(self) -> str:
        """The agents, each once, as they are named behind `where`."""
        agents = self.part.part.agents
        return f", agents {[agents[place] for place in np.unique(self.slots % len(agents)).tolist()]}"

    def record_actions(self, outputs: Mapping[str, Tree]) -> None:
        """Write the outputs for the slots: see `AgentLane.record_actions`."""
        self.part.record_actions(self, outputs)

    def begin_fragment(self) -> None:
        """Go on with the same observations in another fragment."""
        self._observations = self.outputs = self._version = None

    def observations(self, row: int) -> Tree:
        """The observations of the slots in a row, a tree of arrays any[K, ...]."""
        if self._observations is None:
            self._observations = map_tree(self._rows_of, self.part.fragment.columns[Columns.OBS].tree)
            if isinstance(self._observations, np.ndarray):
                self._newest = (self._count, *self._observations.shape[3:])
        if self._newest:
            return self._observations[row].reshape(self._newest)
        return map_tree(lambda leaf: leaf[row].reshape(self._count, *leaf.shape[3:]), self._observations)

    def resolve(self, names: Iterable[str]) -> None:
        """Find the views of these columns that `write` writes to; there are none of outputs that are trees."""
        columns = self.part.fragment.columns
        trees = {name: columns[name].tree for name in names}
        if self.places is not None and all(isinstance(tree, np.ndarray) for tree in trees.values()):
            views = {name: self._rows_of(tree) for name, tree in trees.items()}
            self.outputs = [(name, v, v.dtype, (self._count, *v.shape[3:]), v.shape[1:]) for name, v in views.items()]
            self._versions = self._rows_of(columns[Columns.POLICY_VERSION].tree)
            self._waits = self.part.waits.reshape(self._shape)[:, self.places]

    def write(self, row: int, outputs: Mapping[str, Any]) -> bool:
        """Write what `AgentLane.record_actions` is given; False: an output is to be looked at before it is written."""
        views = self.outputs
        if views is None or len(outputs) != len(views):
            return False
        try:
            for name, rows, dtype, shape, in_row in views:
                values = outputs[name]
                if values.dtype is not dtype or values.shape != shape:
                    return False
                rows[row] = values.reshape(in_row)
        except (AttributeError, KeyError):
            return False
        if self.policy_version != self._version:
            # Later rows are written too: versions change seldom.
            self._versions[row:] = self._version = self.policy_version
        self._waits.fill(True)
        return True

    def _rows_of(self, column: NDArray[Any]) -> NDArray[Any]:
        return column.reshape(len(column), *self._shape, *column.shape[2:])[:, :, self.places]


class AgentLane(SlotLane):
    """The agent slots of one part.

    part                 the agents and their spaces

    at                   i64[S] row of each slot's newest observation
    module               i16[S] place of the module that serves each slot, or served it last
    modules              the lane's modules, by place: see `MultiAgentLane`
    first_env            number of the lane's first environment
    is_shared            whether columns of all fragments but the first lie in shared memory
    acting               i64[K] ascending: slots whose newest observation needs an action
    lives                bool[S] whether the slot has an episode
    begun_at             i64[S] vector step of the first observation of the slot's newest episode
    waits                bool[S] whether the slot has acted and has no observation since
    received             f32[S] rewards of slots that wait
    vector_steps         vector steps since the first reset
    raw                  newest observations as they came, in one row, if pieces have changed their type; else None
    """

    fragment: AgentFragment

    def __init__(
        self,
        index: int,
        layout: FragmentLayout,
        part: AgentPart,
        clock: EnvClock,
        modules: Sequence[Any],
        first_env: int,
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(index, layout, part.observation_space, LaneColumns(layout, None, is_shared=is_shared))
        self.part, self.modules, self.first_env = part, modules, first_env
        slots = layout.num_slots
        self.at: Slots = np.full(slots, layout.lookback)
        self.module = np.zeros(slots, np.int16)
        self._row: int | None = layout.lookback  # row of all slots; None: slots stand in different rows
        self.vector_steps = 0
        self.outputs: dict[int, list[str]] = {}  # module's place -> names of its extra outputs
        columns = self.columns.first(self.observation_space)
        self.fragment = self._fragment(0, columns, AgentFragment, part=part, env_clock=clock)
        self.acting: Slots = self.everyone[:0]
        self.lives = np.zeros(slots, np.bool_)
        self.shown: LaneEpisodes | None = None
        self.waits = np.zeros(slots, np.bool_)
        self.received = np.zeros(slots, np.float32)
        self.begun_at = np.full(slots, -1)
        self._fresh = np.zeros(slots, np.bool_)  # `acting` as a mask
        self.raw: Column | None = None
        self._edited: tuple[Slots, Tree] | None = None  # newest observations as joint pieces left them
        self._turns: Sequence[ModuleTurn] | None = None  # while all slots act, in this fragment
        self._nobody, self._unset = self.everyone[:0], bytes(slots)  # of slots: none, and flags none of which is set

    # Recording

    def begin(self, observed: Observed, vector_step: int) -> Slots:
        """Write the first observations of episodes; return their slots, i64[K]."""
        slots, observations = observed
        slots = self.everyone if slots is None else slots
        self._begin(slots, vector_step)
        self._take(slots, observations, vector_step)
        self.acting = self.everyone if self._fresh.all() else np.flatnonzero(self._fresh)
        return slots

    def record_actions(self, turn: ModuleTurn, outputs: Mapping[str, Tree]) -> None:
        """Write the outputs for a turn's slots: `actions` and every extra output, trees of arrays `any[K, ...]`."""
        if self._row is not None and turn.write(self._row, outputs):
            return
        columns, slots, names = self.fragment.columns, turn.slots, self.outputs.get(turn.place)
        if names is None:
            turn.is_first = False
            names = self.outputs[turn.place] = [name for name in outputs if name != Columns.ACTIONS]
            for name in names:
                self._add_output(name, outputs[name], turn)
        if outputs.keys() != {Columns.ACTIONS, *names}:
            whose = f"lane {self.index}: the outputs of module '{turn.acting.module_id}'"
            raise outputs_error(whose, names, outputs)
        for name, values in outputs.items():
            self._write(columns[name], slots, values)
        columns[Columns.POLICY_VERSION].tree[self.rows_of(slots), slots] = turn.policy_version
        self.waits[slots] = True
        turn.resolve(outputs)

    def record_step(self, step: PartStep, vector_step: int) -> Slots:
        """Write the results of a vector step for the part; return the slots, i64[K], of agents that begin with it.

        vector_step    its number, counted from 1
        """
        observed, rewards, terminateds, truncateds = step
        self.vector_steps, row = vector_step, self._row
        if (
            self.acting is self.everyone  # so that no slot has a reward from before
            and observed.slots is None
            and row is not None
            and 0 not in self.waits.tobytes()
            and terminateds.tobytes() == self._unset == truncateds.tobytes()
        ):  # all slots act before the step and after it, and no episode ends: flags are False already
            columns, self._row = self.fragment.columns, row + 1
            columns[Columns.REWARDS].tree[row] = rewards
            self.waits.fill(False)
            self.at += 1
            self.num_steps += self.layout.num_slots
            self._edited = None
            if self.raw is None:
                columns[Columns.OBS].write(row + 1, observed.observations)
            else:
                self.raw.write_items(0, self.everyone, observed.observations)
            self.fragment.clock[row + 1] = vector_step
            return self._nobody
        self._fresh[:] = False
        self._edited = None
        num_slots, done = self.layout.num_slots, np.logical_or(terminateds, truncateds)
        slots, observations = observed
        slots = self.everyone if slots is None else slots
        place = np.full(num_slots, -1)  # index of each slot in `slots`; -1: it has no observation
        place[slots] = np.arange(len(slots))
        np.add(self.received, rewards, out=self.received, where=self.waits)
        for slot in np.flatnonzero(rewards * ~self.waits).tolist():
            self.fragment.early.append((vector_step, slot, float(rewards[slot])))
        closed = np.flatnonzero(self.waits & ((place >= 0) | done))
        self._close(closed, step)
        ended = closed[done[closed]]
        self._row = None if row is None or len(closed) < num_slots else row + 1
        self.at[closed] += 1
        if len(ended):
            came = ended[place[ended] >= 0]
            self._end(ended, came, map_tree(lambda leaf: leaf[place[came]], observations), vector_step)
        self.lives[done] = False
        going = slots[~done[slots]]
        if len(going) < len(slots):
            observations = map_tree(lambda leaf: leaf[place[going]], observations)
        new = going[~self.lives[going]]
        if len(new):
            self._begin(new, vector_step)
        self._take(going, observations, vector_step)
        self.acting = self.everyone if self._fresh.all() else np.flatnonzero(self._fresh)
        return new

    def lose(self, reason: str, *, is_under_way: bool) -> int:
        """End every episode with its newest observation: the environments were lost.

        is_under_way    whether the environments had got the newest actions

        Episodes with a step in this fragment end as truncated, with `reason` in their chunks' `custom_data["lost"]`.
        Returns the number of agent steps under way. New episodes begin by `begin`.
        """
        under_way = self.waits if is_under_way else self.waits & ~self._fresh
        count, slots = int(np.count_nonzero(under_way)), np.flatnonzero(self.lives)
        cut, ends = self._end_lost(slots, reason)
        seen = self.fragment.clock[ends + 1, cut].tolist()
        self.fragment.ends.update(zip(zip(ends.tolist(), cut.tolist(), strict=True), seen, strict=True))
        self.episode_number[slots] += 1
        for of_slots in (self.lives, self.waits, self._fresh, self.received):
            of_slots[:] = 0
        self.acting, self._edited = self.everyone[:0], None
        return count

    def record_infos(self, infos: Mapping[int, Mapping[str, Any]], *, are_first: bool = False) -> None:
        """Keep the infos of the step, or of first observations after it: slot -> info. Call it before `commit_ended`.

        Infos without an observation are dropped.
        """
        for slot, info in infos.items():
            if not are_first and (ended := self._ended_with(slot)) is not None:
                ended.infos.of_slots[slot] = copied(dict(info))  # type: ignore[attr-defined]
            elif self._fresh[slot]:
                self._infos_in(self.fragment, int(self.at[slot])).of_slots[slot] = copied(dict(info))

    def assign(self, slots: Slots, modules: Slots) -> None:
        """Set the modules, i16[K], that serve slots, i64[K]."""
        changed = self.module[slots] != modules
        if changed.any():
            slots, modules, self._turns = slots[changed], modules[changed], None
            self.module[slots] = modules
            for row in np.unique(self.at[slots]).tolist():
                here = self.at[slots] == row
                self.fragment.module_of[row:, slots[here]] = modules[here]

    def module_id(self, place: int) -> Any:
        """The id of the module at a place; None: there is none."""
        return self.modules[place].module_id if place < len(self.modules) else None

    def ended_by_module(self) -> list[tuple[int, Slots]]:
        """Pairs (place of a module, i64[K] slots that it served) of the episodes that ended with the last step."""
        assert self.ended is not None
        return _grouped(self.fragment.module_of[self.ended.rows, self.ended.slots], self.ended.slots)

    def recorded_actions(self) -> tuple[Slots | None, Tree]:
        """The slots that act (None: all) and copies of their recorded actions, a tree of arrays `any[K, ...]`."""
        column, slots = self.fragment.columns[Columns.ACTIONS], self.acting
        if slots is self.everyone and self._row is not None:
            return None, map_tree(lambda leaf: leaf.copy(), column.row(self._row))
        actions = column.items(self.rows_of(slots), slots)
        return (None if len(slots) == self.layout.num_slots else slots), actions

    def turns(self, shared_data: Callable[[int], dict[str, Any]]) -> Sequence[ModuleTurn]:
        """The turns of the modules that have slots to act for.

        shared_data    gives what a module's connector pieces share, by its place
        """
        acting, turns = self.acting, self._turns
        if turns is None or acting is not self.everyone:
            groups = _grouped(self.module[acting], acting)
            turns = [ModuleTurn(self, place, slots, shared_data(place)) for place, slots in groups]
            self._turns = turns if acting is self.everyone else None
        return turns

    # Reading and writing by connector pieces

    def rows_of(self, slots: Slots) -> Slots | int:
        return self.at[slots] if self._row is None else self._row

    def row_of(self, slot: int) -> int:
        return int(self.at[slot])

    def envs_of(self, slots: Slots) -> Slots:
        """The environments of slots, i64[K]."""
        envs: Slots = slots // len(self.part.agents)
        return envs

    def parent_of(self, slot: int) -> str:
        return self.fragment.parent_of(max(0, self.start_of(slot)), slot)

    def named(self, slots: Sequence[int]) -> str:
        return "; ".join(map(self._named, slots))

    def live(self, slot: int) -> LiveEpisode:
        made, module = super().live(slot), self._module_shown(slot)
        made.slot, place = divmod(slot, len(self.part.agents))
        made.agent_id = self.part.agents[place]
        made.module_id = self.module_id(module)
        return made

    def show(self, turn: ModuleTurn) -> LaneEpisodes:
        """The episodes of a turn's slots, for pieces; `commit` records the observations that they leave."""
        row, is_settled = self._row, self._edited is None and self.raw is None
        if row is None or turn.places is None or not is_settled:
            turn.episodes = self._show(turn.slots, self._newest(turn.slots), is_settled=is_settled)
        elif turn.episodes is None:
            turn.episodes = self._show(turn.slots, turn.observations(row), is_settled=True)
        else:
            self.shown = turn.episodes
            turn.episodes.show(turn.observations(row), is_settled=True)
        shown: LaneEpisodes = turn.episodes
        return shown

    def show_ended(self, slots: Slots) -> LaneEpisodes:
        """The episodes of some of the slots that ended with the last step, for pieces; see `EndedEpisodes.take`."""
        return self._show(slots, self._last(slots), is_settled=False)

    def reveal_ended(self, envs: Slots | None, *, of_these: bool = True) -> None:
        """Show pieces only the ended agents of `envs`, i64[E], or (`of_these` False) only the others; None: all."""
        if self.ended is not None:
            slots = self.ended.slots
            if envs is not None:
                slots = slots[np.isin(self.envs_of(slots), envs) == of_these]
            self.ended.shown = frozenset(slots.tolist())

    def show_jointly(self, *, with_those_that_act: bool) -> LaneEpisodes:
        """The episodes shown as ended, and those of acting slots, for joint pieces; see `take_jointly`."""
        acting = self.acting if with_those_that_act else self.everyone[:0]
        shown = [(acting, self._newest(acting))]
        if self.ended is not None and self.ended.shown:
            ended = np.array(sorted(self.ended.shown), np.int64)
            shown = [(ended, self._last(ended)), *(shown if len(acting) else ())]
        slots = np.concatenate([each for each, _ in shown])
        order = np.argsort(slots)
        joined = map_tree(lambda leaf: leaf[order], concatenate_trees([observations for _, observations in shown]))
        return self._show(slots[order], joined, is_settled=False)

    def take_jointly(self, shown: LaneEpisodes) -> None:
        """Take the observations as joint pieces have left them: the modules' own pieces see them next."""
        self.shown = None
        acts = np.isin(shown.slots, self.acting)
        if self.ended is not None:
            self.ended.take(shown)
            acts &= ~np.isin(shown.slots, list(self.ended.shown))
        if shown.is_rewritten and acts.any():
            self._edited = shown.slots[acts], map_tree(lambda leaf: leaf[acts], shown.newest())

    def commit(self, shown: LaneEpisodes) -> None:
        """Record the newest observations as the pieces have left them; the first call fixes the `obs` column's type."""
        if not shown.is_settled:
            self._record(shown)
        self._typing, self.shown = False, None

    def commit_ended(self) -> None:
        super().commit_ended()
        self.shown = None

    def cut(self, clock: EnvClock) -> AgentFragment:
        """Return the fragment, read-only, and begin the next one, with a clock and the last H steps of every slot."""
        old, stops = self.fragment, self.at if self._row is None else self._row
        new, rows = self._next(stops, AgentFragment, part=self.part, env_clock=clock)
        copy_rows(new.clock, old.clock, rows)
        new.module_of[:] = self.module
        self._tell(old)
        old.seal_at(self.at.copy())
        self.at[:] = self._row = self.layout.lookback
        for turn in self._turns or ():
            turn.begin_fragment()
        if old.early:
            new.early = self._early_so_far(old.early, clock.started)
        return old

    def so_far(self) -> AgentFragment:
        """The fragment as it is so far: its arrays are the lane's."""
        begun = copy.copy(self.fragment)
        begun.observation_space, begun.infos = self.observation_space, begun.infos[: int(self.at.max()) + 1]
        begun.end_at(self.at)
        self._tell(begun)
        return begun

    def get_state(self) -> dict[str, Any]:
        """What another lane needs beside the fragment so far, to go on from this one."""
        of_slots = {name: getattr(self, name).copy() for name in _OF_SLOTS}
        data = [[*key, data] for key, data in copy.deepcopy(self.custom_data).items()]
        return {**of_slots, "data": data, "num_steps": self.num_steps, "vector_steps": self.vector_steps}

    def go_on(self, begun: AgentFragment, state: Mapping[str, Any]) -> None:
        """Go on with the fragment that another lane had begun, and from what its `get_state` gave.

        The modules are there. Before the first step of this lane.
        """
        assert begun.observation_space is not None
        self._take_rows({name: column.tree for name, column in begun.columns.items()}, begun.observation_space)
        fragment, row = self.fragment, int(begun.stops[0])
        for name in ("sequence", "finals", "starts", "losses", "env_clock", "ends", "early"):
            setattr(fragment, name, getattr(begun, name))
        fragment.infos[: len(begun.infos)] = begun.infos
        fragment.episode_start[:], fragment.episode_number[:] = begun.episode_start, begun.episode_number
        fragment.clock[: len(begun.clock)] = begun.clock
        self.module[:] = fragment.module_of[:] = begun.serves
        fragment.module_of[: len(begun.module_of)] = begun.module_of
        self.at[:], self._row = begun.stops, row if (begun.stops == row).all() else None
        self._fresh[:], self.waits[:], self.received[:] = begun.acts, begun.waits, begun.received
        self.acting = self.everyone if self._fresh.all() else np.flatnonzero(self._fresh)
        ids = enumerate(begun.module_ids)
        self.outputs = {place: list(begun.outputs[each]) for place, each in ids if each in begun.outputs}
        for name in _OF_SLOTS:
            getattr(self, name)[:] = state[name]
        self.custom_data = {(slot, number): data for slot, number, data in state["data"]}
        self.num_steps, self.vector_steps = state["num_steps"], state["vector_steps"]

    def shown_again(self, shared_data: Callable[[int], dict[str, Any]]) -> Sequence[ModuleTurn]:
        """The turns of a lane that goes on, with the observations that pieces have left in another one."""
        turns = self.turns(shared_data)
        for turn in turns:
            observations = self._column.items(self.rows_of(turn.slots), turn.slots)
            turn.episodes, self.shown = self._show(turn.slots, observations, is_settled=True), None
        return turns

    def release(self) -> None:
        super().release()
        self._turns, self.shown = None, None

    # Inside

    def _tell(self, fragment: AgentFragment) -> None:
        """Give a fragment what it has of the slots' modules, and of their newest observations, at its end."""
        fragment.serves = self.module.copy()
        fragment.module_ids = tuple(module.module_id for module in self.modules)
        fragment.outputs = {self.module_id(place): names for place, names in self.outputs.items()}
        # A slot in `_fresh` that also waits has an action that the environments never got: it does not count.
        fragment.acts, fragment.waits = self._fresh.copy(), self.waits & ~self._fresh
        fragment.received = self.received.copy()

    def _early_so_far(
        self, early: Sequence[tuple[int, int, float]], started: NDArray[np.int64]
    ) -> list[tuple[int, int, float]]:
        """The early rewards of slots without an observation in the ongoing episode, one sum for each slot."""
        sums: dict[int, tuple[int, float]] = {}
        for vector_step, slot, reward in early:
            begin = started[slot // len(self.part.agents)]
            if vector_step > begin > self.begun_at[slot]:
                sums[slot] = vector_step, sums.get(slot, (0, 0.0))[1] + reward
        return [(vector_step, slot, reward) for slot, (vector_step, reward) in sums.items()]

    def _close(self, slots: Slots, step: PartStep) -> None:
        """Write the rewards and flags of the slots' steps, into the rows where they stand."""
        rows, columns = self.at[slots], self.fragment.columns
        columns[Columns.REWARDS].tree[rows, slots] = self.received[slots]
        columns[Columns.TERMINATEDS].tree[rows, slots] = step.terminateds[slots]
        columns[Columns.TRUNCATEDS].tree[rows, slots] = step.truncateds[slots]
        self.received[slots] = 0.0
        self.waits[slots] = False
        self.num_steps += len(slots)

    def _end(self, slots: Slots, came: Slots, observations: Tree, vector_step: int) -> None:
        """End the episodes of `slots`, i64[K], in the rows before those where the slots stand now.

        came, observations    slots with a last observation, i64[E], and these, `any[E, ...]`

        For other slots the observation before is repeated: pieces have seen it, and don't see it again.
        """
        if len(came):
            starts, numbers = self.episode_start.copy(), self.episode_number.copy()
            infos = SlotInfos(count=self.layout.num_slots)
            self.ended = EndedEpisodes(self, came, observations, self.at[came] - 1, starts, numbers, infos)
            self.ended.settle(self.observation_spaces[0])
        rows = self.at[slots] - 1
        self.fragment.ends.update(dict.fromkeys(zip(rows.tolist(), slots.tolist(), strict=True), vector_step))
        is_without = ~np.isin(slots, came)
        if is_without.any():
            places = rows[is_without], slots[is_without]
            self.fragment.finals.append(Final(*places, self._column.items(*places), {}))
        self.episode_number[slots] += 1
        self.lives[slots] = False

    def _begin(self, slots: Slots, vector_step: int) -> None:
        """Begin episodes of these slots in the rows where they stand."""
        self.lives[slots] = True
        self.begun_at[slots] = vector_step
        self.episode_start[slots] = self.at[slots]
        new = slots[self.at[slots] == self.layout.lookback]  # slots without an episode in the fragment so far
        self.fragment.episode_start[new] = self.layout.lookback

    def _take(self, slots: Slots, observations: Tree, vector_step: int) -> None:
        if not len(slots):
            return
        if self.raw is None:
            self._write(self.fragment.columns[Columns.OBS], slots, observations)
        else:
            self.raw.write_items(0, slots, observations)
        if self._row is not None and len(slots) == self.layout.num_slots:
            self.fragment.clock[self._row] = vector_step
        else:
            self.fragment.clock[self.at[slots], slots] = vector_step
        self._fresh[slots] = True

    def _newest(self, slots: Slots) -> Tree:
        """The newest observations of slots, `any[K, ...]`, as they came or as joint pieces have left them."""
        if self._edited is not None:
            edited, values = self._edited
            places = np.searchsorted(edited, slots)
            return map_tree(lambda leaf: leaf[places], values)
        if self.raw is not None:
            return self.raw.items(0, slots)
        column = self.fragment.columns[Columns.OBS]
        if self._row is not None and len(slots) == self.layout.num_slots:
            return column.row(self._row)
        return column.items(self.rows_of(slots), slots)

    def _show(self, slots: Slots, observations: Tree, *, is_settled: bool) -> LaneEpisodes:
        """Begin the pieces' work on K slots, i64[K], with their observations, `any[K, ...]`."""
        dtypes_of = self.observation_space if self.raw is None else None
        self.shown = LaneEpisodes(self, slots, observations, is_settled=is_settled, dtypes_of=dtypes_of)
        return self.shown

    def _last(self, slots: Slots) -> Tree:
        """The last observations of slots whose episodes have ended, `any[K, ...]`."""
        assert self.ended is not None
        return stack_trees([self.ended.observation(slot) for slot in slots.tolist()])

    def _module_shown(self, slot: int) -> int:
        """Place of the module that serves a slot, or that served it in the episode that the last step has ended."""
        return int(self.fragment.module_of[self.at[slot] - 1, slot] if self.has_ended(slot) else self.module[slot])

    def _named(self, slot: int) -> str:
        env, agent = divmod(slot, len(self.part.agents))
        module_id = self.module_id(self.module[slot])
        return f"environment {self.first_env + env}, agent {self.part.agents[agent]!r} of module '{module_id}'"

    def _retype(self, space: Any) -> None:
        if space is not self.observation_space:
            self.raw = Column.empty(Columns.OBS, row_of(self.observation_space, self.layout.num_slots), 1)
            self.raw.write(0, self._column.row(self.layout.lookback))
            self._turns = None
        super()._retype(space)

    def _write(self, column: Column, slots: Slots, values: Tree) -> None:
        if self._row is not None and len(slots) == self.layout.num_slots:
            column.write(self._row, values)
        else:
            column.write_items(self.rows_of(slots), slots, values)

    def _add_output(self, name: str, values: Tree, turn: ModuleTurn) -> None:
        """Add a column of zeros for an output; modules share one. Raises ColumnError if its type is another."""
        row = map_tree(
            lambda leaf: np.zeros((self.layout.num_slots, *np.shape(leaf)[1:]), np.asarray(leaf).dtype), values
        )
        column = self.fragment.columns.get(name)
        if column is None:
            self.fragment.columns[name] = self.columns.extra(name, row)
        elif kind_of(column.row(0)) != kind_of(row):
            raise ColumnError(
                f"output '{name}' of module '{turn.acting.module_id}' is {kind_of(row)}, but {kind_of(column.row(0))} "
                "of another that serves agents with the same spaces; expected one type, or another name"
            ).see("agents")


def _grouped(modules: NDArray[np.int16], slots: Slots) -> list[tuple[int, Slots]]:
    """Pairs (module, i64[K] slots) of slots, i64[S], by their modules, i16[S]."""
    places = np.unique(modules).tolist()
    return [(place, slots if len(places) == 1 else slots[modules == place]) for place in places]


def places_of(slots: Slots, agents: int, num_slots: int) -> slice | None:
    """The places of some of `agents` agents whose slots, in every environment, are the ascending ones given.

    None: they are not at equal distances, or not the same in every environment.
    """
    envs = num_slots // agents
    own = slots[: len(slots) // envs].tolist()
    step = own[1] - own[0] if len(own) > 1 else 1
    places = range(agents)[own[0] : own[-1] + 1 : step] if own and own[-1] < agents else range(0)
    everywhere = np.add.outer(np.arange(envs) * agents, np.array(places, np.int64)).reshape(-1)
    return slice(own[0], own[-1] + 1, step) if len(places) and np.array_equal(slots, everywhere) else None
