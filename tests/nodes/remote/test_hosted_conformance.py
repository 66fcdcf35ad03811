"""One meaning: whole rollouts on other hosts give the same fragments as those in worker processes."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import gymnasium as gym
import numpy as np
import pytest
from alike import assert_alike
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numbered import NumberedEnv, NumberedModule
from remote_hosts import BrokenWire, dialled_host, hosting, listening

from rollflow.nodes import ConnectorV2, RemoteRollouts, Rollout, RolloutHost
from rollflow.sinks import LearnerPipeline
from rollflow.stream import Fragment, Graph


class Setting(NamedTuple):
    """How a rollout is drawn."""

    slots: int
    lanes: int
    fragment_length: int
    lookback: int
    nested: bool
    longest: int
    prefetch: int
    seed: int


drawn_settings = st.builds(
    Setting,
    slots=st.integers(1, 6),
    lanes=st.integers(1, 4),
    fragment_length=st.integers(1, 12),
    lookback=st.integers(0, 6),
    nested=st.booleans(),
    longest=st.integers(1, 12),
    prefetch=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
).filter(lambda drawn: drawn.lanes <= drawn.slots)


def makers_of(drawn: Setting) -> list[Any]:
    return [partial(NumberedEnv, slot, lengths=(1, drawn.longest), nested=drawn.nested) for slot in range(drawn.slots)]


def fragments_of(env: Any, drawn: Setting, **options: Any) -> list[Fragment]:
    """Three fragments of every lane, in the lanes' order."""
    with Rollout(
        env,
        fragment_length=drawn.fragment_length,
        lookback=drawn.lookback,
        seed=drawn.seed,
        num_fragments=3,
        prefetch=drawn.prefetch,
        **{"module": NumberedModule(), **options},
    ) as rollout:
        fragments = list(rollout.fragments())
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
    assert rollout.lost == {}
    return sorted(fragments, key=lambda fragment: (fragment.lane, fragment.sequence))


def hosted(envs: Any, drawn: Setting, makers: Any = None, **options: Any) -> list[Fragment]:
    """The same by a host that dials in."""
    address = options.pop("address", envs.addresses[0])
    makers, lanes = (makers_of(drawn), drawn.lanes) if makers is None else (makers, None)
    with hosting(address, makers, lanes=lanes, kind=RolloutHost, module=NumberedModule()):
        return fragments_of(envs, drawn, **options)


@given(drawn=drawn_settings)
@settings(max_examples=20, phases=[Phase.explicit, Phase.generate])
def test_a_host_that_dials_in_gives_the_fragments_that_are_made_inline(drawn: Setting) -> None:
    assert_alike(hosted(listening(RemoteRollouts), drawn), fragments_of(makers_of(drawn), drawn, lanes=drawn.lanes))
