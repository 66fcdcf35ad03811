"""The laws that hold of every rollout, on environments that number their own steps; `test_values` has others."""

from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fragment_equality import assert_alike, assert_equal_batches
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings, strategies as st
from numbered_module import NumberedEnv, NumberedModule, logits_of, numbered_envs
from property_examples import examples

from rollflow import ConnectorV2, Fragment, GeneralAdvantageEstimation, Rollout


class Setting(NamedTuple):
    """Random settings of a rollout."""

    slots: int
    lanes: int
    fragment_length: int
    lookback: int
    mode: AutoresetMode
    nested: bool
    longest: int
    seed: int


settings_drawn = st.builds(
    Setting,
    slots=st.integers(1, 16),
    lanes=st.integers(1, 4),
    fragment_length=st.integers(1, 12),
    lookback=st.integers(0, 12),
    mode=st.sampled_from(list(AutoresetMode)),
    nested=st.booleans(),
    longest=st.integers(1, 25),
    seed=st.integers(0, 2**32 - 1),
).filter(lambda drawn: drawn.lanes <= drawn.slots)

few = settings(max_examples=examples(40))


def made(drawn: Setting, **kwargs: Any) -> tuple[list[NumberedEnv], Rollout]:
    """The environments, and a rollout over vector environments of them, one per lane."""
    envs, makers = numbered_envs(drawn.slots, lengths=(1, drawn.longest), nested=drawn.nested)
    bounds = np.linspace(0, drawn.slots, drawn.lanes + 1).astype(int)
    vectors = [
        SyncVectorEnv(makers[start:stop], autoreset_mode=drawn.mode, copy=False) for start, stop in pairwise(bounds)
    ]
    rollout = Rollout(
        vectors,
        module=NumberedModule(),
        fragment_length=drawn.fragment_length,
        lookback=drawn.lookback,
        seed=drawn.seed,
        **kwargs,
    )
    return envs, rollout


def run(rollout: Rollout, count: int, *, publish: bool = True) -> list[Fragment]:
    """`count` fragments, then what a drain gives; before each, weights that say which version they are."""
    fragments = []
    with rollout:
        for fragment in rollout.fragments():
            fragments.append(fragment)
            if publish:
                rollout.publish({"weight": torch.tensor(float(rollout.policy_version + 1))})
            if len(fragments) == count:
                rollout.drain()
    return fragments


def at(observations: Any) -> np.ndarray[Any, Any]:
    """The numbers (slot, episode, step) of observations."""
    return np.asarray(observations["at"] if isinstance(observations, dict) else observations)


@few
@given(settings_drawn, st.integers(1, 6))
def test_every_transition_stands_in_exactly_one_chunk(drawn: Setting, count: int) -> None:
    envs, rollout = made(drawn)
    emitted = defaultdict(list)
    for fragment in run(rollout, count):
        for chunk in fragment.episodes():
            where, rewards, actions = at(chunk.get_observations()), chunk.get_rewards(), chunk.get_actions()
            for i in range(len(chunk)):
                slot, episode, step = (int(number) for number in where[i])
                last = i == len(chunk) - 1
                ends = (last and chunk.is_terminated, last and chunk.is_truncated)
                emitted[slot].append((episode, step, int(actions[i]), float(rewards[i]), *ends))
    for env in envs:
        assert emitted[env.slot] == env.log
    assert rollout.num_steps == sum(len(env.log) for env in envs)
    assert rollout.lost == {}


@few
@given(settings_drawn, st.integers(1, 6))
def test_outputs_are_those_of_the_forward_pass_that_made_the_action(drawn: Setting, count: int) -> None:
    _, rollout = made(drawn)
    for fragment in run(rollout, count):
        for chunk in fragment.episodes():
            where = at(chunk.get_observations(slice(0, len(chunk)))).copy()
            np.testing.assert_array_equal(chunk.get_extra_model_outputs("seen"), where)
            expected = logits_of(torch.from_numpy(where).float()).numpy()
            np.testing.assert_allclose(chunk.get_extra_model_outputs("action_dist_inputs"), expected, atol=1e-6)
            logp = torch.log_softmax(torch.from_numpy(expected), -1).numpy()
            chosen = np.take_along_axis(logp, np.asarray(chunk.get_actions())[:, None], 1)[:, 0]
            np.testing.assert_allclose(chunk.get_extra_model_outputs("action_logp"), chosen, atol=1e-5)
            np.testing.assert_array_equal(
                chunk.get_extra_model_outputs("weight"), chunk.get_extra_model_outputs("policy_version")
            )


@few
@given(settings_drawn)
def test_without_prefetch_every_fragment_is_of_one_policy_version(drawn: Setting) -> None:
    _, rollout = made(drawn, num_fragments=4)
    with rollout:
        for number, batch in enumerate(rollout.batches()):
            assert batch["policy_version"].unique().tolist() == [number]
            rollout.publish({"weight": torch.tensor(float(number + 1))})
    assert number <= 3


@pytest.mark.slow
@few
@given(settings_drawn)
def test_the_autoreset_modes_give_the_same_transitions(drawn: Setting) -> None:
    logs = []
    for mode in AutoresetMode:
        envs, rollout = made(drawn._replace(mode=mode), explore=False)
        run(rollout, 4 * drawn.lanes)
        logs.append([env.log for env in envs])
    for others in logs[1:]:
        for first, other in zip(logs[0], others, strict=True):
            shared = min(len(first), len(other))
            assert shared > 0
            assert first[:shared] == other[:shared]


class Loop(ConnectorV2):
    """Makes the pipeline take the way by episodes, and changes nothing."""

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            episode.set_observations(new_data=episode.get_observations(-1), at_indices=-1)
        return batch


@few
@given(settings_drawn, st.integers(1, 4))
def test_columns_and_episodes_give_the_same_train_batch(drawn: Setting, count: int) -> None:
    _, rollout = made(drawn, learner_connector=lambda obs, act: GeneralAdvantageEstimation(gamma=0.9, lambda_=0.8))
    fragments = run(rollout, count)
    pipeline = rollout.learner_pipeline
    for fragment in fragments:
        columnar = pipeline(rl_module=rollout.module, episodes=fragment.episodes())
        by_episode = pipeline(rl_module=rollout.module, episodes=list(fragment.episodes()))
        assert_equal_batches(columnar, by_episode)
    together = pipeline.of_fragments(fragments, rollout.module)
    episodes = [chunk for fragment in fragments for chunk in fragment.episodes()]
    assert_equal_batches(together, pipeline(rl_module=rollout.module, episodes=episodes))
    assert len(together["rewards"]) == rollout.num_steps


@few
@given(settings_drawn, st.integers(1, 4))
def test_columns_and_episodes_give_the_same_rollout(drawn: Setting, count: int) -> None:
    fragments = []
    for connectors in (
        {},
        {"env_to_module_connector": lambda env: Loop()},
        {"module_to_env_connector": lambda env: Loop()},
    ):
        _, rollout = made(drawn, **connectors)
        fragments.append(run(rollout, count))
    for others in fragments[1:]:
        assert_alike(fragments[0], others)


@few
@given(settings_drawn, st.integers(1, 4))
def test_the_same_seed_gives_the_same_fragments(drawn: Setting, count: int) -> None:
    first, second = (run(made(drawn)[1], count) for _ in range(2))
    assert_alike(first, second)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_piece_sees_every_observation_once(mode: AutoresetMode) -> None:
    class Count(ConnectorV2):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[int, ...]] = []

        def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
            self.seen += [tuple(at(episode.get_observations(-1)).tolist()) for episode in episodes]
            return batch

    count = Count()
    drawn = Setting(3, 1, 10, 1, mode, False, 4, 7)
    envs, rollout = made(drawn, env_to_module_connector=lambda env: count)
    fragments = run(rollout, 3)
    assert len(set(count.seen)) == len(count.seen)
    expected = {(env.slot, entry[0], entry[1]) for env in envs for entry in env.log}
    ends = {
        tuple(at(chunk.get_observations(-1)).tolist())
        for fragment in fragments
        for chunk in fragment.episodes()
        if chunk.is_done or fragment is fragments[-1]
    }
    assert expected | ends <= set(count.seen)
