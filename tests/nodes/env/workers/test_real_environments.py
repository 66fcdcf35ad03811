"""One meaning, on gymnasium's own environments: with one seed every place gives the same fragments."""

from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import pytest
import torch
from fragment_equality import assert_alike
from hypothesis import Phase, given, settings, strategies as st
from property_examples import examples

from rollflow import Fragment, RLModule, Rollout


class Setting(NamedTuple):
    """Random settings of a rollout.

    longest    steps in an episode at most; None: the environment by its id, in its own vectorized form where it has one
    """

    env_id: str
    longest: int | None
    slots: int
    lanes: int
    workers: int
    fragment_length: int
    prefetch: int
    seed: int


# Discrete observations and boxes, Discrete actions and boxes; the first has a vectorized form of their own.
ENV_IDS = ["CartPole-v1", "FrozenLake-v1", "Acrobot-v1", "Pendulum-v1", "MountainCarContinuous-v0"]

drawn_settings = st.builds(
    Setting,
    env_id=st.sampled_from(ENV_IDS),
    longest=st.none() | st.integers(1, 12),
    slots=st.integers(1, 5),
    lanes=st.integers(1, 3),
    workers=st.integers(1, 2),
    fragment_length=st.integers(1, 12),
    prefetch=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
).filter(lambda drawn: drawn.lanes <= drawn.slots)

without_shrinking: Any = {"phases": [Phase.explicit, Phase.generate]}


class Sines(RLModule):
    """Takes whatever is observed, and gives what is needed for whatever actions there are."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        width = self.get_exploration_action_dist_cls().required_input_dim
        seen = batch["obs"].reshape(len(batch["obs"]), -1).double().sum(-1, keepdim=True)
        logits = torch.sin(seen + torch.arange(width)).float()
        return {"action_dist_inputs": logits, "vf_preds": logits[:, 0]}


def fragments_of(drawn: Setting, where: Any) -> list[Fragment]:
    """Three fragments of every lane, in the lanes' order."""
    env: Any = drawn.env_id
    if drawn.longest is not None:
        env = partial(gym.make, drawn.env_id, max_episode_steps=drawn.longest)
    options: Any = {"workers": drawn.workers} if where in ("processes", "rollouts") else {}
    with Rollout(
        env,
        where=where,
        module=Sines(),
        num_envs=drawn.slots,
        lanes=drawn.lanes,
        fragment_length=drawn.fragment_length,
        prefetch=0 if where == "inline" else drawn.prefetch,
        num_fragments=3,
        seed=drawn.seed,
        **options,
    ) as rollout:
        fragments = list(rollout.fragments())
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
    assert rollout.lost == {}
    return sorted(fragments, key=lambda fragment: (fragment.lane, fragment.sequence))


@given(drawn=drawn_settings)
@settings(max_examples=examples(12))
def test_threads_give_what_is_given_inline(drawn: Setting) -> None:
    assert_alike(fragments_of(drawn, "threads"), fragments_of(drawn, "inline"))


@pytest.mark.slow
@pytest.mark.parametrize(("where", "examples"), [("processes", 8), ("rollouts", 3), ("auto", 3)])
def test_every_other_place_does_as_well(where: str, examples: int) -> None:
    @given(drawn=drawn_settings)
    @settings(max_examples=examples, **without_shrinking)
    def holds(drawn: Setting) -> None:
        assert_alike(fragments_of(drawn, where), fragments_of(drawn, "inline"))

    holds()
