"""Episode buffers over columns: one slot's part of some rows, read in place.

A sealed fragment's chunk needs no class of its own for most quantities: its buffer's data are views of the columns.
What is here are the exceptions: an end whose last observation lies beside the column, gymnasium's vector infos,
and the ongoing episode of a live lane, whose rows move on.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from rollflow.stream.buffer import LookbackBuffer
from rollflow.stream.columns import Columns
from rollflow.stream.infos import info_of
from rollflow.stream.tree import Tree, map_tree

if TYPE_CHECKING:
    from rollflow.stream.lane import Lane
