"""Order of fragments, and equality of those from different places, bit for bit."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rollflow import Fragment, SingleAgentEpisode
from rollflow.stream.data.tree import map_tree
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment, MultiAgentFragment
from rollflow.stream.testing import check


def in_time(fragments: Iterable[Any]) -> list[Any]:
    """The fragments lane by lane, in the order of time."""
    return sorted(fragments, key=lambda fragment: (fragment.lane, fragment.sequence))


def chunks_of(fragments: Iterable[AnyFragment]) -> list[SingleAgentEpisode]:
    """Every chunk of every agent, module by module."""
    chunks: list[SingleAgentEpisode] = []
    for fragment in fragments:
        if isinstance(fragment, Fragment):
            chunks += fragment.episodes()
        else:
            chunks += [each for module_id in fragment.module_ids for each in fragment.agent_episodes(module_id)]
    return chunks


def assert_alike(ours: Sequence[AnyFragment], others: Sequence[AnyFragment]) -> None:
    """Assert that fragments of one agent or several are the same, but for the seconds that they took."""
    for mine, other in zip(ours, others, strict=True):
        assert (mine.lane, mine.sequence, mine.num_rows) == (other.lane, other.sequence, other.num_rows)
        if isinstance(mine, Fragment) and isinstance(other, Fragment):
            assert mine.columns.keys() == other.columns.keys()
            # Rows of dead steps have no meaning, but are the same all the same.
            for name in mine.columns:
                map_tree(np.testing.assert_array_equal, mine.column(name), other.column(name))
        elif isinstance(mine, MultiAgentFragment) and isinstance(other, MultiAgentFragment):
            assert mine.module_ids == other.module_ids
            for one, another in zip(mine.episodes(), other.episodes(), strict=True):
                check(_shown(one.get_state()), _shown(another.get_state()), atol=0.0)
        for one, another in zip(chunks_of([mine]), chunks_of([other]), strict=True):
            check(_shown(one.get_state()), _shown(another.get_state()), atol=0.0)


def _shown(state: Any) -> Any:
    """A state without times, and without the numbers of passes: lanes take turns at the modules."""
    if not isinstance(state, dict):
        return list(map(_shown, state)) if isinstance(state, list) else state
    return {key: _shown(part) for key, part in state.items() if key not in ("duration_s", "serial")}
