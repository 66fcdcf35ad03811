"""Where the slots of a lane stand in the fragment that they are filling, and how one fragment follows the other."""

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.column import Column
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ColumnError
from rollflow.stream.fragment import Fragment, FragmentLayout
from rollflow.stream.lane_columns import LaneColumns, LaneMemory, SharedRows
from rollflow.stream.tree import Tree


class LaneRows:
    """The rows of a lane's slots, N in all, in one fragment after the other.

    index        number of the lane
    layout       of its fragments
    memory       where columns lie that somebody else writes to; None: this lane alone does
    is_shared    whether other processes may look at the columns, from the first step on: see `Lane.share`

    row               of the current observation, H … H+T
    policy_version    of the weights that the last forward pass used
    episode_start     i64[N] row of the first observation of the slot's episode
    episode_number    i64[N] how many episodes the slot had before
    custom_data       (slot, number of its episode) -> what pieces keep with it
    fragment          in the making
    """

    def __init__(
        self,
        index: int,
        layout: FragmentLayout,
        observation_space: gym.Space[Any],
        memory: LaneMemory | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.index = index
        self.layout = layout
        self.memory = memory
        self.policy_version = self._version_written = 0
        self.row = self._first_row = layout.lookback
        self._last_row = layout.lookback + layout.num_rows  # after which the fragment is cut
        self.episode_start = np.full(layout.num_slots, self.row)
        self.episode_number = np.zeros(layout.num_slots, np.int64)
        self.custom_data: dict[tuple[int, int], dict[Any, Any]] = {}
        self._dead: NDArray[np.bool_] | None = None  # slots whose next step only resets them
        self._extra: tuple[str, ...] | None = None
        self._columns = LaneColumns(layout, memory, is_shared=is_shared)
        self._is_unseen = is_shared  # the fragment in the making is the first, and lies where others don't see it
        self._space = observation_space
        self.fragment = self._fragment(0, self._columns.first(observation_space))

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The space of the `obs` column."""
        return self._space

    @property
    def is_full(self) -> bool:
        """Whether the fragment has its T vector steps."""
        return self.row == self._last_row

    @property
    def at_start(self) -> bool:
        """Whether the next step is the first of a fragment."""
        return self.row == self._first_row

    @property
    def sequence(self) -> int:
        """Number of the fragment in the making."""
        return self.fragment.sequence

    @property
    def uncut_steps(self) -> int:
        """Transitions in the fragment in the making: they are lost when the lane is closed before a cut."""
        lookback = self.layout.lookback
        steps = (self.row - lookback) * self.layout.num_slots
        if self.layout.resets_next_step and steps:
            steps = self._live_rows()
        return steps

    @property
    def shared(self) -> SharedRows | None:
        """Where the fragment in the making lies for other processes; None: they can't see it."""
        return self._columns.shared

    # Outputs

    def _add_extra_columns(self, outputs: Mapping[str, Tree]) -> None:
        self._extra = tuple(name for name in outputs if name != Columns.ACTIONS)
        for name in self._extra:
            try:
                self.fragment.columns[name] = self._columns.extra(name, outputs[name])
            except ColumnError as error:
                raise ColumnError(f"lane {self.index}: {error}") from None

    def _refuse_outputs(self, outputs: Mapping[str, Tree]) -> None:
        expected = {Columns.ACTIONS, *(self._extra or ())}
        missing, new = sorted(expected - set(outputs)), sorted(set(outputs) - expected)
        raise ColumnError(
            f"lane {self.index}: the outputs changed between steps: missing {missing}, new {new}; "
            f"every step must give {sorted(expected)}"
        )

    # From fragment to fragment

    def _turn_over(self, *, are_written: bool) -> Fragment:
        """Begin the next fragment, with the last H rows as its lookback; the one before, sealed.

        are_written    whether observations stand in their column as the environments write them
        """
        old, lookback = self.fragment, self.layout.lookback
        # The last H rows begin as many rows down as there were steps.
        rows = self.row - lookback
        columns = self._columns.like(old.columns, are_written=are_written)
        for name, column in columns.items():
            column.copy_rows(old.columns[name], rows, self.row + (name == Columns.OBS))
        self.episode_start -= rows
        new = self._fragment(old.sequence + 1, columns)
        if self._dead is not None:
            new.episode_start[self._dead] = lookback + 1
            new.episode_number[self._dead] += 1
        new.observation_space = old.observation_space
        new.infos[: lookback + 1] = old.infos[rows : self.row + 1]
        old.custom_data = copy.deepcopy(self.custom_data)
        old.seal(rows)
        number = self.episode_number.tolist()
        self.custom_data = {key: data for key, data in self.custom_data.items() if key[1] == number[key[0]]}
        self.fragment = new
        self.row = lookback
        return old

    def _lay_open(self) -> None:
        """Put the columns of the fragment in the making where other processes see them."""
        old = self.fragment
        columns = self._columns.like(old.columns, are_written=True)
        for name, column in columns.items():
            column.copy_rows(old.columns[name], 0, self.row + (name == Columns.OBS))
        columns[Columns.POLICY_VERSION].tree[self.row :] = self._version_written
        old.columns = columns
        self._is_unseen = False

    def _fragment(self, sequence: int, columns: dict[str, Column]) -> Fragment:
        return Fragment(
            self.layout,
            self.index,
            sequence,
            columns,
            episode_start=self.episode_start.copy(),
            episode_number=self.episode_number.copy(),
        )

    def _live_rows(self) -> int:
        """Transitions of the fragment in the making where dead rows stand between."""
        lookback = self.layout.lookback
        columns = self.fragment.columns
        done = columns[Columns.TERMINATEDS].tree | columns[Columns.TRUNCATEDS].tree
        # A dead row follows each end, one may be the fragment's first, and none follows a loss.
        dead = np.zeros((self.row - lookback, self.layout.num_slots), np.bool_)
        dead[1:] = done[lookback : self.row - 1]
        dead[0] = self.fragment.episode_start == lookback + 1
        for loss in self.fragment.losses:
            if loss.row < self.row:
                dead[loss.row - lookback, loss.slots] = False
        return dead.size - int(np.count_nonzero(dead))
