"""A module's slots are a block of each row where it serves the same agents, evenly spaced, in every environment."""

import numpy as np
from hypothesis import given, strategies as st

from rollflow.stream.multi_agent.agent_lane import places_of


@given(st.integers(1, 7), st.integers(1, 4), st.data())
def test_places_are_told_of_evenly_spaced_agents_and_of_no_others(agents: int, envs: int, data: st.DataObject) -> None:
    own = sorted(data.draw(st.sets(st.integers(0, agents - 1), min_size=1)))
    slots = np.arange(envs * agents).reshape(envs, agents)[:, own].reshape(-1)
    places = places_of(slots, agents, envs * agents)
    if len(set(np.diff(own).tolist())) > 1:
        assert places is None
    else:
        assert places is not None
        assert list(range(agents))[places] == own
    left_out = data.draw(st.integers(0, len(slots) - 1))
    if envs > 1:
        assert places_of(np.delete(slots, left_out), agents, envs * agents) is None
