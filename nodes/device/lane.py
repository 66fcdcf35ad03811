"""A lane whose columns are tensors on one device: nothing is copied from there, and nothing waited for, in a step."""

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow.nodes.connectors.common.batches import CHOSEN_BY, array_of, as_array
from rollflow.nodes.device.columns import DeviceColumn, DeviceColumns, on_device, write_tensors
from rollflow.nodes.device.fragment import DeviceFragment
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ConnectorError, RunError
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.fragments.fragment import Fragment, FragmentLayout, Loss
from rollflow.stream.fragments.lane import F, Lane, LaneBlocks, LaneColumns
from rollflow.stream.fragments.live_episode import LaneEpisodes


class DeviceEpisodes(LaneEpisodes):
    """The episodes of all slots of a lane on a device: columns of tensors, and no episode by itself."""

    lane: "DeviceLane"

    def __init__(self, lane: "DeviceLane", observations: Tree, counted: torch.Tensor | None = None) -> None:
        super().__init__(lane, lane.everyone, observations, is_settled=False)
        self.counted = counted  # of episodes that have ended
        self._is_written = counted is not None

    def __getitem__(self, index: Any) -> Any:
        raise ConnectorError(
            f"an episode of lane {self.lane.index} is asked for by itself, which has no form for tensors on "
            f"{self.lane.device}; expected a piece that works with columns, or environments with allow_host_copies=True"
        )

    def observations(self) -> Tree:
        """The latest observation of every slot: a tree of tensors `any[N, ...]`, not to be written to."""
        return self.newest()

    def recent(self, name: str, count: int) -> Tree:
        row, before = self.lane.row, ~self.steps_there(count)

        def window(leaf: torch.Tensor) -> torch.Tensor:
            taken = torch.stack([leaf[max(each, 0)] for each in range(row - count, row)], 1)
            return taken.masked_fill_(before.view(*before.shape, *[1] * (taken.ndim - 2)), 0)

        return map_tree(window, self._columns[name].tree)

    def previous(self, name: str) -> Tree | None:
        values = self.values_before(name)
        if values is None and name not in self._columns and self.lane.vector_steps:
            raise ColumnError(f"there is no column '{name}', expected one of {', '.join(self._columns)}").see("piece")
        return values

    def just_begun(self) -> Any:
        """bool[N], a tensor: whether the slot's latest observation is its episode's first."""
        return self.lane.episode_start >= self.lane.row

    def steps_there(self, count: int) -> Any:
        """bool[N, count], a tensor: which of the last `count` steps `recent` has values of, rather than zeros."""
        row = self.lane.row
        rows = torch.arange(row - count, row, device=self.lane.device)
        return rows >= self.lane.episode_start.clamp(min=0)[:, None]


class DeviceLane(Lane):
    """A `Lane` of environments under SAME_STEP that step on a device; no infos are kept, and no data of pieces.

    If a step gives last observations it gives them of all slots: those of slots whose episodes go on mean nothing.
    """

    ended: DeviceEpisodes | None  # type: ignore[assignment]
    fragment: DeviceFragment
    columns: DeviceColumns
    _start: Any

    def __init__(
        self, index: int, layout: FragmentLayout, observation_space: gym.Space[Any], device: torch.device
    ) -> None:
        self.device, self._counted = device, layout.lookback  # the row up to which ends are counted
        self._initial: Tree = None  # state of episodes that begin
        self._copies: dict[Any, torch.Tensor] = {}  # of states in main memory
        self._stood_in = torch.zeros(layout.lookback, layout.num_slots, dtype=torch.uint8, device=device)
        super().__init__(index, layout, observation_space)
        self._chosen = self.columns.actions(layout.action_space)
        self._taken: DeviceColumn | None = None  # of what the environments get, from the first step on
        self._spaces = {Columns.ACTIONS: layout.action_space}

    @property
    @torch.inference_mode(False)
    def episode_start(self) -> Any:
        """i64[N]: row of the first observation of each slot's episode, worked out if it is asked for."""
        first, stop = self._counted, self.row - (self.ended is not None)
        if first != stop:
            self._counted, count = stop, stop - first
            # Numbers as small as can be: a quarter of the time of i64.
            small = torch.uint8 if count < 256 else torch.int32
            ends = self._ends(slice(first, stop)) * torch.arange(1, count + 1, dtype=small, device=self.device)[:, None]
            last = ends.amax(0).long()
            self._start = torch.where(last > 0, last + first, self._start)
        return self._start

    @episode_start.setter
    def episode_start(self, start: Any) -> None:
        self._start = start

    @property
    def has_begun_again(self) -> bool:
        """True once a slot's first episode may have been followed by another."""
        return self.vector_steps > 0

    def actions_of(self, batch: dict[str, Tree], env_space: gym.Space[Any] | None) -> Tree:
        """Bring a batch's actions, any[N, ...], to the dtypes of their spaces, in place; those of the environments.

        env_space    of what the environments get; None: that in which `actions` are recorded

        Raises ColumnError for actions of another structure, shape, kind or device.
        """
        chosen, slots = self._chosen, self.layout.num_slots
        if Columns.ACTIONS not in batch:
            return None  # which recording them refuses
        actions = batch[Columns.ACTIONS]
        is_kept = type(actions) is torch.Tensor and (actions.dtype, actions.shape, actions.device) == chosen.kind
        if not is_kept or actions.is_inference():
            actions = batch[Columns.ACTIONS] = _writable(chosen.cast(actions, slots))
        is_one = env_space is None or env_space is self.layout.action_space
        for_env = batch.get(Columns.ACTIONS_FOR_ENV)
        if for_env is None and is_one:
            return actions
        taken = self._taken
        if taken is None:
            space = self._spaces[Columns.ACTIONS_FOR_ENV] = env_space or self.layout.action_space
            taken = self._taken = self.columns.actions(space)
        made = _writable(taken.cast(actions if for_env is None else for_env, slots))
        if for_env is not None or made is not actions:
            batch[Columns.ACTIONS_FOR_ENV] = made
        return made

    def record_actions(self, outputs: Mapping[str, Tree]) -> None:
        columns, row = self.fragment.columns, self.row
        if outputs.keys() != self._outputs:
            self._take_outputs(outputs)
        write_tensors(columns, row, outputs)
        if self.policy_version != self._version_written or self.at_start:
            columns[Columns.POLICY_VERSION].tree[row:] = self._version_written = self.policy_version
        self.fragment.versions.append(self.policy_version)

    def initial_state(self, given: Tree) -> Tree:
        """The state, a tree of tensors any[...], of episodes that begin with the newest observations.

        given    as the module has it now: it is taken once a fragment, with the observations that the next begins with
        """
        if self.is_full or self._initial is None:
            copies, self._copies = self._copies, {}

            def there(leaf: Any) -> torch.Tensor:
                if torch.is_tensor(leaf) and leaf.device == self.device:
                    return leaf.detach().clone()
                array = as_array(leaf)
                key = array.dtype.str, array.shape, array.tobytes()  # a copy to the device would be waited for
                self._copies[key] = copies[key] if key in copies else torch.tensor(array, device=self.device)
                return self._copies[key]

            self._initial = map_tree(there, given)
            if not self.is_full:
                self.fragment.initial_state = self._initial
        return self._initial

    def lose(self, reason: str, *, is_under_way: bool = True) -> int:
        """Raise RunError: environments on a device step in this process, and are not lost."""
        raise RunError(f"lane {self.index} is on {self.device}, where environments can't be lost")

    def get_state(self) -> dict[str, Any]:
        """Its open fragment, and what its next steps follow from, in plain form: none is copied."""
        part = copy.copy(self.fragment)
        part.num_rows, part.observation_space = self.num_rows, self.observation_space
        return {
            "fragment": part.get_state(self.observation_spaces),
            "start": self.episode_start,
            "number": self.episode_number,
            "stood_in": self._stood_in,
            "initial": self._initial,
            "batch": self.batch,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one gave, before the first step of this one."""
        fragment, there = state["fragment"], on_device(state, self.device)
        self.fragment.complete(fragment)
        self.go_on(there["fragment"]["columns"], fragment["space"], fragment["num_rows"], np.empty(0, np.int64))
        self.episode_start, self.episode_number = there["start"], there["number"]
        self._stood_in, self._initial, self.batch = there["stood_in"], there["initial"], there["batch"]
        self._counted = self.row

    def fragment_in(self, state: Mapping[str, Any]) -> DeviceFragment:
        """The fragment of this lane, or of the one that it goes on from, that gave this state."""
        columns: dict[str, Column] = {
            name: DeviceColumn(name, on_device(rows, self.device)) for name, rows in state["columns"].items()
        }
        begun, number = state["begun"]
        made = DeviceFragment(self.layout, self.index, state["sequence"], columns, begun, number, self.device)
        made.observation_space = self.observation_spaces[state["space"]]
        made.complete(state)
        made.seal(state["num_rows"])
        return made

    @torch.inference_mode(False)
    def begin_anew(self, reason: str) -> None:
        row, fragment, columns = self.row, self.fragment, self.fragment.columns
        cut = self.episode_start.clamp(min=fragment.first_row) < row
        newest = self._column.row(row)
        has_ended, last = (self._ends(row - 1) if row > fragment.first_row else cut), fragment.last_rows.get(row - 1)
        if last is not None:
            cuts = map_tree(lambda leaf: cut.view(-1, *[1] * (leaf.ndim - 1)), newest)
            fragment.last_rows[row - 1] = map_tree(torch.where, cuts, newest, last)
        elif cut.any() and not has_ended.any():
            fragment.last_rows[row - 1] = map_tree(torch.clone, newest)
        numbers = array_of(self.episode_number + self._ends(slice(fragment.first_row, row)).sum(0))
        columns[Columns.TRUNCATEDS].tree[row - 1] |= cut
        slots = np.flatnonzero(array_of(cut))
        fragment.losses.append(Loss(row, self.everyone, slots, reason))
        fragment.custom_data = {(slot, int(numbers[slot])): {"lost": reason} for slot in slots.tolist()}
        self.episode_start, self.episode_number = torch.full_like(self._start, row), self.episode_number + ~cut
        self._counted, self.is_restored = row, False

    def starts_of(self, slots: Any) -> Any:
        return self.episode_start

    def commit_ended(self) -> None:
        ended, self.ended = self.ended, None
        if ended is not None:
            last = self._column.cast(ended.newest(), self.layout.num_slots)
            self.fragment.last_rows[self.row - 1] = map_tree(torch.clone, last)

    def cut(self) -> Fragment:
        """Return the fragment, and begin the next one with the last H rows as its lookback."""
        old, lookback, rows = self.fragment, self.layout.lookback, self.row
        self.episode_number += self._ends(slice(lookback, rows)).sum(0)
        super().cut()
        self._counted = lookback
        stands_in = old.columns[Columns.TRUNCATEDS].tree.to(torch.uint8)
        stands_in[:lookback] = self._stood_in
        for row in old.last_rows:
            stands_in[row].zero_()
        self._stood_in = stands_in[rows - lookback : rows]
        old.chosen_by, old.spaces = self.shared_data.get(CHOSEN_BY), self._spaces
        old.columns[Columns.BOOTSTRAP_FROM] = DeviceColumn(Columns.BOOTSTRAP_FROM, stands_in)
        return old

    def release(self) -> None:
        self.fragment.drop_finals()
        super().release()

    # Inside

    def _take_observations(self, observations: Tree) -> None:
        if self.observation_space is self.observation_spaces[0]:
            write_tensors(self.fragment.columns, self.row, {Columns.OBS: observations})
            self.episodes.show_row(self._column, self.row)
        else:
            super()._take_observations(observations)

    def _of_each(self, number: int) -> Any:
        return torch.full((self.layout.num_slots,), number, device=self.device)

    def _new_columns(self, layout: FragmentLayout, memory: LaneBlocks | None, *, is_shared: bool) -> LaneColumns:
        return DeviceColumns(layout, self.device)

    def _new_episodes(self, observations: Tree) -> LaneEpisodes:
        return DeviceEpisodes(self, observations)

    def _ends(self, rows: Any) -> Any:
        """bool[N], or bool[K, N]: the slots whose episodes end in a row, or in a slice of rows."""
        columns = self.fragment.columns
        return columns[Columns.TERMINATEDS].tree[rows] | columns[Columns.TRUNCATEDS].tree[rows]

    def record_step(
        self, observations: Tree, rewards: Any, terminateds: Any, truncateds: Any, infos: Any, final: Any = None
    ) -> None:
        answer = {Columns.REWARDS: rewards, Columns.TERMINATEDS: terminateds, Columns.TRUNCATEDS: truncateds}
        write_tensors(self.fragment.columns, self.row, answer)
        self._advance(infos, final)
        self._take_observations(observations)

    def _advance(self, infos: Any, final: tuple[Tree, Any] | None, done: Any = None) -> None:
        self.row = row = self.row + 1
        self.num_steps += self.layout.num_slots
        self.vector_steps += 1
        self.at_start = self._typing = False
        self.is_full = row == self._last_row
        if final is not None:
            self.ended = DeviceEpisodes(self, final[0], self._ends(row - 1))

    def _fragment(self, sequence: int, columns: dict[str, Column], kind: type[F], **more: Any) -> Any:
        begun = self.episode_start.clone(), self.episode_number.clone()
        return DeviceFragment(self.layout, self.index, sequence, columns, *begun, self.device)

    def _hand_on(self, new: Fragment, stops: Any) -> None:
        self.fragment.observation_space = new.observation_space = self.observation_space
        self.fragment = new  # type: ignore[assignment]
        self.fragment.initial_state = self._initial


def _writable(actions: Tree) -> Tree:
    """The actions, none of them an inference tensor, which environments could not write into."""
    return map_tree(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, actions)
