"""The laws that hold of every rollout, on environments that number their own steps; `test_values` has others."""

from collections import defaultdict
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from drawn_rollouts import Setting, drawn_settings, rollout_of
from fragment_equality import assert_alike
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings, strategies as st
from numbered_module import NumberedEnv, logits_of, numbered_envs
from piece_forms import ByEpisodes, Doubled, equal
from property_examples import examples
from stand_in_pool import StandInPool
from ways import WAYS

from rollflow import Forward, Fragment, GeneralAdvantageEstimation, RLModule, Rollout
from rollflow.nodes import LambdaConnector
from rollflow.stream.testing import check

few = settings(max_examples=examples(40))
READY = "ready"  # whichever slots are ready, of a pool that answers for some at a time
AHEAD = "ready, ahead"  # the same with prefetch: fragments end while slots are under way
THREADS, THREADS_AHEAD = "threads", "threads, ahead"  # the same of environments that step in a thread each
Mode = AutoresetMode | str
REPEATED = st.sampled_from([*AutoresetMode, READY])  # steps come in the same order each time
ON_POLICY = REPEATED | st.just(THREADS)
MODES = ON_POLICY | st.sampled_from([AHEAD, THREADS_AHEAD])


def made(drawn: Setting, mode: Mode, **options: Any) -> tuple[list[NumberedEnv], Rollout]:
    """The environments, and a rollout over vector environments of them, one per lane."""
    envs, makers = numbered_envs(drawn.slots, lengths=(1, drawn.longest), nested=drawn.nested)
    if mode in (READY, AHEAD):
        options = {"prefetch": int(mode == AHEAD), **options}
        lanes = np.array_split(np.arange(drawn.slots), drawn.lanes)
        pools = [pool_of([envs[slot] for slot in lane], drawn.seed) for lane in lanes]
        return envs, rollout_of(drawn, pools, **{"num_fragments": None, **options})
    if mode in (THREADS, THREADS_AHEAD):
        apart = {"where": "threads", "forward": Forward(max_batch=64), "prefetch": int(mode == THREADS_AHEAD)}
        return envs, rollout_of(drawn, makers, **{**apart, "num_fragments": None, **options})
    given = {"lanes": drawn.lanes, "autoreset_mode": mode, "num_fragments": None, **options}
    return envs, rollout_of(drawn, makers, **given)


def pool_of(envs: list[NumberedEnv], seed: int) -> Any:
    """A pool that answers for some of the environments at a time; of one alone there is none."""
    if len(envs) == 1:
        return SyncVectorEnv([lambda: envs[0]], autoreset_mode=AutoresetMode.NEXT_STEP)
    sizes = [size for size in range(1, len(envs)) if not len(envs) % size]
    return StandInPool(envs, sizes[seed % len(sizes)], seed, odds=1 + seed % 3)


def run(rollout: Rollout, count: int) -> list[Fragment]:
    """`count` fragments, then what a drain gives; after each, weights that say which version they are."""
    publish = lambda _: rollout.publish({"weight": torch.tensor(float(rollout.policy_version + 1))})  # noqa: E731
    return WAYS["loop"](rollout, count, publish)


def at(observations: Any) -> np.ndarray[Any, Any]:
    """The numbers (slot, episode, step) of observations."""
    return np.asarray(observations["at"] if isinstance(observations, dict) else observations)


@few
@given(drawn_settings, MODES, st.integers(1, 6))
def test_every_transition_stands_in_exactly_one_chunk(drawn: Setting, mode: Mode, count: int) -> None:
    envs, rollout = made(drawn, mode)
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
@given(drawn_settings, MODES, st.integers(1, 6))
def test_what_is_not_handed_out_is_counted_as_lost(drawn: Setting, mode: Mode, count: int) -> None:
    envs, rollout = made(drawn, mode, prefetch=drawn.prefetch)
    with rollout:
        handed = sum(fragment.num_steps for fragment in islice(rollout.fragments(), count))
    steps = sum(len(env.log) for env in envs)
    assert rollout.num_steps == steps
    assert rollout.lost.get("closed", 0) == steps - handed


@few
@given(drawn_settings, MODES, st.integers(1, 6))
def test_outputs_are_those_of_the_forward_pass_that_made_the_action(drawn: Setting, mode: Mode, count: int) -> None:
    _, rollout = made(drawn, mode)
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
@given(drawn_settings, ON_POLICY)
def test_without_prefetch_every_fragment_is_of_one_policy_version(drawn: Setting, mode: Mode) -> None:
    _, rollout = made(drawn, mode, num_fragments=4)
    with rollout:
        for number, batch in enumerate(rollout.batches()):
            assert batch["policy_version"].unique().tolist() == [number]
            rollout.publish({"weight": torch.tensor(float(number + 1))})
    assert number <= 3


class Sums(RLModule):
    """Its state adds up what it has seen in the episode."""

    def get_initial_state(self) -> Any:
        return {"sum": torch.zeros(3)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        sums = batch["state_in"]["sum"][:, None] + batch["obs"].float().cumsum(1)
        return {"action_dist_inputs": logits_of(sums), "sums": sums, "state_out": {"sum": sums[:, -1]}}


def whole_episodes(rollout: Rollout) -> dict[int, list[Any]]:
    """The states of whole episodes by their environment, without ids."""
    found: dict[int, list[Any]] = defaultdict(list)
    with rollout:
        for fragment in rollout.fragments(complete_episodes=True):
            for episode in fragment.episodes():
                state = {key: part for key, part in episode.get_state().items() if key != "id_"}
                found[episode.lane + episode.slot].append(state | {"initial_state": episode.initial_state})
    return found


@few
@given(drawn_settings, MODES, st.booleans())
def test_episodes_are_those_of_lanes_of_one_slot_each(drawn: Setting, mode: Mode, is_doubled: bool) -> None:
    drawn, seeds = drawn._replace(nested=False, lanes=1, lookback=1 + drawn.lookback), list(range(drawn.slots))
    options: Any = {"env_to_module_connector": lambda env: Doubled()} if is_doubled else {}
    options |= {"module": Sums(), "explore": False, "num_fragments": 6}
    _, rollout = made(drawn, mode, **options, **({} if mode in (READY, AHEAD) else {"seed": seeds}))
    ours = whole_episodes(rollout)
    _, alone = made(drawn._replace(lanes=drawn.slots), AutoresetMode.NEXT_STEP, **options, seed=seeds)
    for slot, others in whole_episodes(alone).items():
        for mine, other in zip(ours[slot], others, strict=False):
            check(mine, other, atol=0.0)


@few
@given(drawn_settings, MODES, st.integers(1, 4))
def test_columns_and_episodes_give_the_same_train_batch(drawn: Setting, mode: Mode, count: int) -> None:
    _, rollout = made(
        drawn, mode, learner_connector=lambda obs, act: GeneralAdvantageEstimation(gamma=0.9, lambda_=0.8)
    )
    fragments = run(rollout, count)
    pipeline = rollout.learner_pipeline
    for fragment in fragments:
        columnar = pipeline(rl_module=rollout.module, episodes=fragment.episodes())
        by_episode = pipeline(rl_module=rollout.module, episodes=list(fragment.episodes()))
        equal(columnar, by_episode)
    together = pipeline.of_fragments(fragments, rollout.module)
    episodes = [chunk for fragment in fragments for chunk in fragment.episodes()]
    equal(together, pipeline(rl_module=rollout.module, episodes=episodes))
    assert len(together["rewards"]) == rollout.num_steps


@few
@given(drawn_settings, REPEATED, st.integers(1, 4))
def test_columns_and_episodes_give_the_same_rollout(drawn: Setting, mode: Mode, count: int) -> None:
    fragments = []
    names = "env_to_module_connector", "module_to_env_connector"
    for connectors in ({}, *({name: lambda env: ByEpisodes()} for name in names)):
        _, rollout = made(drawn, mode, **connectors)
        fragments.append(run(rollout, count))
    for others in fragments[1:]:
        assert_alike(fragments[0], others)


@pytest.mark.parametrize("mode", [*AutoresetMode, READY, AHEAD])
def test_a_piece_sees_every_observation_once(mode: Mode) -> None:
    seen: list[tuple[int, ...]] = []

    def look(episodes: Any) -> None:
        seen.extend(tuple(at(episode.get_observations(-1)).tolist()) for episode in episodes)

    drawn = Setting(3, 1, 10, 1, False, 4, 0, 7)
    envs, rollout = made(drawn, mode, env_to_module_connector=lambda env: LambdaConnector(look))
    fragments = run(rollout, 3)
    assert len(set(seen)) == len(seen)
    expected = {(env.slot, entry[0], entry[1]) for env in envs for entry in env.log}
    ends = {
        tuple(at(chunk.get_observations(-1)).tolist())
        for fragment in fragments
        for chunk in fragment.episodes()
        if chunk.is_done or fragment is fragments[-1]
    }
    assert expected | ends <= set(seen)
