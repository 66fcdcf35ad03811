"""Hooks: functions that a rollout calls with batches, finished episodes and published versions."""

from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from graph_rows import drawn
from numbered_agents import NumberedAgents
from serial_module import SerialModule

from rollflow import Fragment, MultiAgentRollout, Rollout
from rollflow.nodes import LambdaConnector
from rollflow.nodes.metrics.episode_returns import FinishedEpisode

OPTIONS: Any = {"num_envs": 4, "fragment_length": 32, "num_fragments": 6, "seed": 0}
PLACES = ["inline", "ahead", "threads", "graph"]


def keep_notes(episodes: Any) -> None:
    for episode in episodes:
        episode.custom_data["note"] = episode.id_


def ended_in(fragments: list[Fragment]) -> dict[str, tuple[float, int, bool]]:
    """Id -> return, length and whether it was terminated, of each episode that ends, from its chunks."""
    sums: dict[str, tuple[float, int, bool]] = {}
    ended = set()
    for fragment in fragments:
        for chunk in fragment.episodes():
            total, length, _ = sums.get(chunk.id_, (0.0, 0, False))
            sums[chunk.id_] = total + float(sum(chunk.get_rewards())), length + len(chunk), chunk.is_terminated
            ended |= {chunk.id_} if chunk.is_done else set()
    return {id_: told for id_, told in sums.items() if id_ in ended}


@pytest.mark.parametrize("options", [{}, {"prefetch": 1}, {"where": "threads"}, None], ids=PLACES)
def test_each_finished_episode_is_told_once_before_the_fragment_that_ends_it(options: dict[str, Any] | None) -> None:
    """Also in a graph, where there are no options."""
    told: list[FinishedEpisode] = []
    fragments: list[Fragment] = []
    rollout = Rollout(
        "CartPole-v1", env_to_module_connector=lambda env: LambdaConnector(keep_notes), **OPTIONS, **(options or {})
    )
    with pytest.raises(TypeError, match=r"on_episode got 3, expected a function that takes one argument"):
        rollout.on_episode(3)  # type: ignore[type-var]
    assert rollout.on_episode(told.append) is not None

    def keep(fragment: Fragment) -> None:
        assert {chunk.id_ for chunk in fragment.episodes() if chunk.is_done} <= {each.id_ for each in told}
        fragments.append(fragment)

    async def main() -> None:
        async with drawn("rollout > keep", rollout=rollout, keep=keep).run() as run:
            await run.wait()

    if options is None:
        anyio.run(main)
    else:
        with rollout:
            for fragment in rollout.fragments():
                keep(fragment)
    assert len(told) == rollout.returns.count > 10
    assert {each.id_: (each.episode_return, each.length, each.is_terminated) for each in told} == ended_in(fragments)
    assert [each.episode_return for each in told][-100:] == list(rollout.returns.returns)
    slots = {chunk.id_: (chunk.lane, chunk.slot) for fragment in fragments for chunk in fragment.episodes()}
    assert all((each.lane, each.slot) == slots[each.id_] for each in told)
    assert all(each.custom_data == {"note": each.id_} for each in told)


def test_batches_and_versions_are_told_and_a_hook_may_be_a_decorator() -> None:
    rollout, batches, versions = Rollout("CartPole-v1", **OPTIONS), [], []

    @rollout.on_batch
    def keep(batch: Any) -> None:
        batches.append(batch)

    rollout.on_publish(versions.append)
    with rollout:
        for batch in rollout.batches():
            assert batches[-1] is batch
            rollout.publish(rollout.module.state_dict())
        assert not rollout.publish_as(2, rollout.module.state_dict())
        assert rollout.publish_as(9, rollout.module.state_dict())
    assert len(batches) == 6
    assert versions == [1, 2, 3, 4, 5, 6, 9]


def test_what_a_hook_raises_the_loop_raises_and_another_loop_goes_on() -> None:
    with Rollout("CartPole-v1", **OPTIONS) as rollout:
        sequences, told = [], []

        @rollout.on_episode
        def fail_once(episode: FinishedEpisode) -> None:
            told.append(episode)
            if len(told) == 1:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            sequences.extend(fragment.sequence for fragment in rollout.fragments())
        sequences += [fragment.sequence for fragment in rollout.fragments()]
    assert sequences == list(range(6))
    assert len(told) == rollout.returns.count


def test_episodes_of_several_agents_are_told_with_all_their_rewards() -> None:
    told: list[FinishedEpisode] = []
    versions: list[Any] = []
    makers = [partial(NumberedAgents, slot, nested=0, length=5) for slot in range(2)]
    with MultiAgentRollout(makers, module=SerialModule(), fragment_length=8, num_fragments=4, seed=0) as rollout:
        rollout.on_episode(told.append)
        rollout.on_publish(versions.append)
        for fragment in rollout.fragments():
            for episode in fragment.episodes():
                if episode.is_done:
                    [each] = [each for each in told if each.id_ == episode.id_]
                    assert each.is_terminated == episode.is_terminated
                    assert each.length == episode.env_t
        weights = {"default_policy": rollout.module["default_policy"].state_dict()}
        assert rollout.publish(weights) is not versions[-1]  # which is the hook's
    assert len(told) == rollout.returns.count > 4
    np.testing.assert_array_equal([each.episode_return for each in told], rollout.returns.returns)
    assert versions == [{"default_policy": 1}]
