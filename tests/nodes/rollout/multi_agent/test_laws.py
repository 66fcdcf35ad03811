"""The laws that hold of every rollout of several agents, on environments that number the steps of each."""

from collections import Counter, defaultdict
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from agent_logs import Hanging, steps_of
from drawn_agents import WAYS, Drawn, drawn_settings, made, mapping_of, run
from hypothesis import given, settings, strategies as st
from lost_agents import agent_chunks, check_multi_agent_chunks, emitted_steps, numbers
from numbered_agents import NumberedAgents
from property_examples import examples
from serial_module import SerialModule, at_of, logits_of

from rollflow import MultiAgentRollout
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

few = settings(max_examples=examples(20))
PREFETCH = st.integers(0, 2)
COUNT = st.integers(1, 6)
WAY = st.sampled_from(list(WAYS))


def hanging_actions(fragments: list[MultiAgentFragment]) -> list[Hanging]:
    """Return the actions that wait for an observation, as the lanes' last fragments have them."""
    hanging = []
    for fragment in {fragment.lane: fragment for fragment in fragments}.values():
        for part in fragment.parts:
            for slot in np.flatnonzero(part.waits).tolist():
                row = int(part.stops[slot])
                at = at_of(part.columns["obs"].tree)[row, slot]
                action = int(part.columns["actions"].tree[row, slot])
                hanging.append(Hanging(numbers(at), action, float(part.received[slot])))
    return hanging


@few
@given(drawn_settings, COUNT, PREFETCH, WAY)
def test_every_agent_step_stands_in_exactly_one_chunk(drawn: Drawn, count: int, prefetch: int, way: str) -> None:
    envs, rollout = made(drawn, prefetch=prefetch)
    fragments = WAYS[way](rollout, count)
    told = [steps_of(env.log) for env in envs]
    assert sorted(emitted_steps(fragments)) == sorted(step for steps, _ in told for step in steps)
    assert rollout.num_steps == sum(len(steps) for steps, _ in told)
    assert rollout.lost == {}
    assert sorted(hanging_actions(fragments)) == sorted(each for _, hanging in told for each in hanging)


@few
@given(drawn_settings, st.integers(1, 5), PREFETCH)
def test_what_is_not_handed_out_is_counted_as_lost(drawn: Drawn, count: int, prefetch: int) -> None:
    envs, rollout = made(drawn, prefetch=prefetch)
    with rollout:
        fragments = list(islice(rollout.fragments(), count))
    steps = [step for env in envs for step in steps_of(env.log)[0]]
    emitted = emitted_steps(fragments)
    assert Counter(emitted) <= Counter(steps)
    assert rollout.num_steps == len(steps)
    assert rollout.lost.get("closed", 0) == len(steps) - len(emitted)


@few
@given(drawn_settings, COUNT)
def test_modules_act_for_the_agents_that_are_mapped_to_them(drawn: Drawn, count: int) -> None:
    _, rollout = made(drawn)
    module_of = mapping_of(drawn)
    for fragment in run(rollout, count):
        for episode in fragment.episodes():
            for agent, of_agent in episode.agent_episodes.items():
                assert of_agent.module_id == episode.module_for(agent) == module_of(agent, episode)
                assert (of_agent.agent_id, of_agent.multi_agent_episode_id) == (agent, episode.id_)
        for module_id in fragment.module_ids:
            for chunk in fragment.agent_episodes(module_id):
                agent = int(at_of(chunk.get_observations(0))[1])
                assert (chunk.agent_id, chunk.module_id) == (f"agent {agent}", module_id)
                assert chunk.multi_agent_episode_id in {episode.id_ for episode in fragment.episodes()}


@few
@given(drawn_settings, COUNT, WAY)
def test_an_agents_chunks_join_without_gap_or_repeat(drawn: Drawn, count: int, way: str) -> None:
    _, rollout = made(drawn)
    by_id = defaultdict(list)
    for _, chunk in agent_chunks(WAYS[way](rollout, count)):
        by_id[chunk.id_].append(chunk)
    for chunks in by_id.values():
        t, seen = 0, []
        for chunk in chunks:
            lookback = chunk.rewards.lookback
            assert (chunk.t_started, lookback) == (t, min(drawn.lookback, t))
            indices = range(-lookback, len(chunk) + 1)
            at = np.stack([at_of(chunk.get_observations(i, neg_index_as_lookback=True)) for i in indices])
            assert (at[:, :3] == at[0, :3]).all()
            stays = chunk.is_terminated and at[-1].tolist() == at[-2].tolist()
            expected = list(range(t - lookback, t + len(chunk) + 1))
            assert at[:, 4].tolist() == (expected if not stays else [*expected[:-1], expected[-2]])
            before = [int(chunk.get_actions(i, neg_index_as_lookback=True)) for i in range(-lookback, 0)]
            assert before == (seen[-lookback:] if lookback else [])
            seen += [int(action) for action in chunk.get_actions()]
            t += len(chunk)
            assert chunk.t == t
        assert not any(chunk.is_done for chunk in chunks[:-1])


@few
@given(drawn_settings, COUNT, WAY)
def test_an_environments_chunks_join_without_gap_or_repeat(drawn: Drawn, count: int, way: str) -> None:
    envs, rollout = made(drawn)
    fragments = WAYS[way](rollout, count)
    check_multi_agent_chunks(fragments)
    steps = sum(told.env_step > 0 for env in envs for told in env.log)
    assert sum(len(chunk) for fragment in fragments for chunk in fragment.episodes()) == steps


@few
@given(drawn_settings, COUNT, PREFETCH, WAY)
def test_outputs_are_those_of_the_pass_that_made_the_action(drawn: Drawn, count: int, prefetch: int, way: str) -> None:
    _, rollout = made(drawn, prefetch=prefetch)
    for _, chunk in agent_chunks(WAYS[way](rollout, count)):
        module: SerialModule = rollout.module[chunk.module_id]
        at = at_of(chunk.get_observations(slice(0, len(chunk))))
        outputs = {name: chunk.get_extra_model_outputs(name) for name in chunk.extra_model_outputs}
        np.testing.assert_array_equal(outputs["seen"], at)
        np.testing.assert_array_equal(outputs["weight"], outputs["policy_version"])
        logits = logits_of(torch.from_numpy(np.array(at)), module.shift)
        np.testing.assert_allclose(outputs["action_dist_inputs"], logits.numpy(), atol=1e-6)
        logp = torch.log_softmax(logits, -1).numpy()[np.arange(len(chunk)), np.asarray(chunk.get_actions())]
        np.testing.assert_allclose(outputs["action_logp"], logp, atol=1e-5)
        for place, serial in enumerate(outputs["serial"].tolist()):
            done = module.passes.done[serial]
            assert at[place].tolist() in done.at
            assert done.weight == outputs["policy_version"][place]


@few
@given(drawn_settings)
def test_a_module_does_at_most_one_pass_in_a_vector_step_of_a_lane(drawn: Drawn) -> None:
    envs, rollout = made(drawn, num_fragments=2)
    run(rollout, 10**6)
    steps = 2 * drawn.fragment_length * drawn.lanes
    for module in rollout.module.values():
        assert len(module.passes.done) <= steps
    acted = Counter(tuple(at) for module in rollout.module.values() for done in module.passes for at in done.at)
    assert set(acted.values()) == {1}
    assert len(acted) == sum(len(told.actions) for env in envs for told in env.log)


@few
@given(drawn_settings)
def test_without_prefetch_no_action_is_older_than_its_observation(drawn: Drawn) -> None:
    _, rollout = made(drawn, num_fragments=4)
    with rollout:
        for number, fragment in enumerate(rollout.fragments()):
            sequence = number // drawn.lanes
            for part in fragment.parts:
                versions, clock = (
                    part.gather("policy_version"),
                    part.in_chunk_order(part.clock[part.first_row : part.last_row]),
                )
                # Of the fragment in which the agent acted, be it one before.
                assert versions.tolist() == (clock // drawn.fragment_length).tolist()
            if (number + 1) % drawn.lanes == 0:
                weights = {"weight": torch.tensor(float(sequence + 1))}
                rollout.publish(dict.fromkeys(rollout.module, weights))


@pytest.mark.parametrize("way", ["loop", "asyncio", "trio", "graph"])
def test_publishing_for_one_module_leaves_the_others(way: str) -> None:
    drawn = Drawn(2, 2, 4, 2, 8, False, 3, 1, False, 5)
    _, rollout = made(drawn)
    fragments = WAYS[way](rollout, 9)
    versions: dict[str, set[int]] = defaultdict(set)
    for fragment in fragments:
        for module_id in fragment.module_ids:
            versions[module_id] |= set(fragment.of_module(module_id).gather("policy_version").tolist())
    assert {name: max(seen) for name, seen in versions.items()} != dict.fromkeys(versions, 0)
    assert all(max(versions[name]) <= rollout.policy_versions[name] for name in versions)
    assert sum(rollout.policy_versions.values()) == len(fragments)


def test_modules_draw_different_numbers() -> None:
    class Even(SerialModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"action_dist_inputs": torch.zeros(len(at_of(batch["obs"])), 7)}

    rollout = MultiAgentRollout(
        lambda: NumberedAgents(0, agents=2, nested=0, at_once=True, length=100),
        module={"agent 0": Even(), "agent 1": Even()},
        fragment_length=64,
        num_fragments=1,
        seed=0,
    )
    with rollout:
        [fragment] = rollout.fragments()
    one, other = (fragment.of_module(f"agent {number}").gather("actions").tolist() for number in range(2))
    assert one != other
