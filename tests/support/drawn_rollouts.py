"""Rollouts that are drawn by chance, to be held against each other."""

from functools import partial
from typing import Any, NamedTuple

from fragment_equality import in_time
from hypothesis import strategies as st
from numbered_module import NumberedEnv, NumberedModule
from property_examples import strategies

from rollflow import Fragment, Rollout


class Setting(NamedTuple):
    """Random settings of a rollout."""

    slots: int
    lanes: int
    fragment_length: int
    lookback: int
    nested: bool
    longest: int
    prefetch: int
    seed: int


parts_drawn = strategies(slots=(1, 8), lanes=(1, 4), fragment_length=(1, 12), lookback=(0, 9), nested=bool)
parts_drawn |= strategies(longest=(1, 20), prefetch=(0, 2), seed=(0, 2**32 - 1))
drawn_settings = st.builds(Setting, **parts_drawn).filter(lambda drawn: drawn.lanes <= drawn.slots)


def makers_of(drawn: Setting) -> list[Any]:
    return [partial(NumberedEnv, slot, lengths=(1, drawn.longest), nested=drawn.nested) for slot in range(drawn.slots)]


def rollout_of(drawn: Setting, env: Any = None, **options: Any) -> Rollout:
    """Three fragments of every lane, over environments of its own unless there are others."""
    shape = {"fragment_length": drawn.fragment_length, "lookback": drawn.lookback, "seed": drawn.seed}
    options = {"module": NumberedModule(), "num_fragments": 3, **shape, **options}
    return Rollout(makers_of(drawn) if env is None else env, **options)


def fragments_of(env: Any, drawn: Setting, **options: Any) -> list[Fragment]:
    """Three fragments of every lane, in the lanes' order."""
    with rollout_of(drawn, env, prefetch=drawn.prefetch, **options) as rollout:
        fragments = list(rollout.fragments())
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
    assert rollout.lost == {}
    return in_time(fragments)
