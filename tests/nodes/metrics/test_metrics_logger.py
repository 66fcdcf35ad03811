"""Figures that are logged, reduced and merged, and hooks that are told of batches, episodes and versions."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anyio
import msgpack
import numpy as np
import pytest
import torch
from graph_rows import drawn
from hypothesis import given, strategies as st
from numbered_agents import NumberedAgents
from serial_module import SerialModule

from rollflow import Fragment, MultiAgentRollout, Rollout
from rollflow.nodes import EpisodeReturns, LambdaConnector, MetricsLogger
from rollflow.nodes.metrics.episode_returns import AgentReturns, FinishedEpisode
from rollflow.stream import MetricsError

NUMBERS = st.lists(st.integers(-1000, 1000), max_size=12)


def logged(values: Any, **options: Any) -> MetricsLogger:
    metrics = MetricsLogger()
    for value in values:
        metrics.log_value("x", value, **options)
    return metrics


@given(
    values=NUMBERS.filter(bool), window=st.integers(1, 5), reduce=st.sampled_from(["mean", "min", "max", "sum", None])
)
def test_a_window_has_the_last_values(values: list[int], window: int, reduce: Any) -> None:
    last = values[-window:]
    by = {"mean": lambda x: sum(x) / len(x), "min": min, "max": max, "sum": sum, None: list}
    assert logged(values, reduce=reduce, window=window).peek("x") == pytest.approx(by[reduce](last))


def test_a_mean_without_a_window_is_an_exponential_average() -> None:
    assert logged([1.0, 2.0, 4.0], ema_coeff=0.5).peek("x") == 2.75  # 1, then 1.5, then 2.75
    assert logged([1.0, 2.0]).peek("x") == 1.01


def test_what_is_cleared_begins_anew_and_what_is_not_goes_on() -> None:
    metrics = MetricsLogger()
    for _ in range(2):
        metrics.log_value("once", 2, reduce="sum", clear_on_reduce=True)
        metrics.log_value("ever", 2, reduce="sum")
        reduced = metrics.reduce()
    assert reduced == {"once": 2, "ever": 4}
    assert metrics.peek("once") == 0
    metrics.log_value("mean", 1.0, clear_on_reduce=True)
    metrics.reduce()
    assert math.isnan(metrics.peek("mean"))


def test_names_nest() -> None:
    metrics = MetricsLogger()
    for name, value in ((("loss", "policy"), 1.0), (("loss", "value"), 2.0), (("lr",), 3.0)):
        metrics.log_value(("learner", *name), value, window=1)
    metrics.log_value(("learner", "steps"), 5, reduce="sum")
    assert metrics.reduce() == {"learner": {"loss": {"policy": 1.0, "value": 2.0}, "lr": 3.0, "steps": 5}}
    assert metrics.peek(("learner", "loss")) == {"policy": 1.0, "value": 2.0}
    assert ("learner", "lr") in metrics
    assert ("learner", "rate") not in metrics
    assert metrics.keys()[0] == ("learner", "loss", "policy")


def test_arrays_and_tensors_of_one_number_are_numbers() -> None:
    metrics = logged([np.float32(1.5), np.array(2), torch.tensor([3.0]), True], reduce=None)
    assert metrics.peek("x") == [1.5, 2, 3.0, 1.0]


def test_threads_log_side_by_side() -> None:
    metrics = MetricsLogger()

    def log(value: int) -> None:
        for _ in range(500):
            metrics.log_value("x", value, reduce="sum")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(log, [1] * 4))
    assert metrics.peek("x") == 2000


# Merging


def merged(parts: Any, **options: Any) -> MetricsLogger:
    metrics = MetricsLogger()
    packed = [msgpack.packb(logged(part, **options).get_state()) for part in parts]
    metrics.merge([msgpack.unpackb(each) for each in packed])
    return metrics


@given(parts=st.lists(NUMBERS, min_size=1, max_size=4))
def test_merged_figures_are_those_of_all_values(parts: list[list[int]]) -> None:
    values = [value for part in parts for value in part]
    for reduce, by in (("sum", sum), ("min", min), ("max", max)):
        if values:
            assert merged(parts, reduce=reduce).peek("x") == by(values)
    if values:
        assert merged(parts, clear_on_reduce=True).peek("x") == pytest.approx(sum(values) / len(values))
        assert merged(parts, reduce=None).peek("x") == values


@given(parts=st.lists(NUMBERS.filter(bool), min_size=2, max_size=3), window=st.integers(1, 6))
def test_the_order_of_loggers_makes_no_difference(parts: list[list[int]], window: int) -> None:
    for options in ({"window": window}, {}, {"reduce": "sum", "window": window}):
        results = {merged(order, **options).peek("x") for order in itertools.permutations(parts)}
        assert max(results) == pytest.approx(min(results), abs=1e-9)


def test_a_merged_window_has_the_newest_of_each() -> None:
    assert sorted(merged([[1, 2, 3], [10, 20, 30]], reduce=None, window=4).peek("x")) == [2, 3, 20, 30]


def test_an_exponential_average_weighs_no_more_than_it_remembers() -> None:
    # 1,000 values of 0 with a memory of 10, and one of 11.
    assert merged([[0.0] * 1000, [11.0]], ema_coeff=0.1).peek("x") == pytest.approx(1.0)


def test_merging_adds_to_what_is_there_and_takes_over_new_names() -> None:
    metrics, other = logged([1], reduce="sum"), MetricsLogger()
    other.log_value(("a", "b"), 2, reduce="max")
    metrics.merge([other.get_state(), logged([5], reduce="sum").get_state()])
    assert metrics.reduce() == {"x": 6, "a": {"b": 2}}


@pytest.mark.parametrize("reduce", ["min", "max", "mean", "sum"])
def test_a_value_that_is_nan_shows_wherever_it_comes(reduce: Any) -> None:
    for values in ([math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [1.0, 2.0, math.nan]):
        for window in (None, 5):
            assert math.isnan(logged(values, reduce=reduce, window=window).peek("x"))


def test_a_state_is_a_snapshot() -> None:
    metrics = logged([1, 2], reduce=None)
    state = metrics.get_state()
    metrics.log_value("x", 3, reduce=None)
    other = MetricsLogger()
    other.set_state(state)
    assert (other.peek("x"), metrics.peek("x")) == ([1, 2], [1, 2, 3])


# In a rollout


def test_pieces_log_into_the_rollouts_metrics() -> None:
    def log(episodes: Any, metrics: Any) -> None:
        metrics.log_value(("pieces", "calls"), 1, reduce="sum")
        metrics.log_value("slots", len(episodes), window=10)

    def logs(env: Any) -> LambdaConnector:
        return LambdaConnector(log, changes_episodes=False)

    acts: Any = {"env_to_module_connector": logs, "module_to_env_connector": logs}
    acts["learner_connector"] = lambda obs_space, act_space: LambdaConnector(log)
    with Rollout("CartPole-v1", num_envs=3, fragment_length=5, num_fragments=2, **acts) as rollout:
        batches = list(rollout.batches())
    assert rollout.metrics.peek(("pieces", "calls")) == 11 + 10 + len(batches)  # the last observation is prepared, too


# What is refused


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"reduce": "median"}, "'x': reduce is 'median', expected 'mean', 'min', 'max', 'sum' or None"),
        ({"window": 0}, "'x': window is 0, expected a whole number from 1 on"),
        ({"window": 2.5}, "'x': window is 2.5, expected a whole number from 1 on"),
        ({"ema_coeff": 0.1, "window": 3}, "'x': ema_coeff is for reduce='mean' without window"),
        ({"ema_coeff": 1.5}, "'x': ema_coeff is 1.5, expected more than 0 and at most 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, told: str) -> None:
    with pytest.raises(MetricsError, match=told):
        logged([1], **options)


def test_a_name_has_one_way_to_be_reduced() -> None:
    metrics = logged([1], window=5)
    with pytest.raises(MetricsError, match=r"'x' was logged with reduce='mean', window=5.*now with reduce='sum'"):
        metrics.log_value("x", 1, reduce="sum")
    with pytest.raises(MetricsError, match=r"'x' was logged with reduce='mean', window=5.*now with reduce='max'"):
        metrics.merge([logged([1], reduce="max").get_state()])
    with pytest.raises(MetricsError, match=r"'x/y' can't be logged beside 'x'"):
        metrics.log_value(("x", "y"), 1)


@pytest.mark.parametrize("value", ["three", None, np.arange(2), torch.zeros(2), np.str_("three"), np.array(1 + 2j)])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(MetricsError, match=r"'x' was given .*, expected one number"):
        logged([value])


def test_unknown_names_are_told_with_those_that_there_are() -> None:
    metrics = logged([1])
    with pytest.raises(KeyError, match="'y' was never logged; names: 'x'"):
        metrics.peek("y")
    assert metrics.peek("y", 0) == 0
    with pytest.raises(MetricsError, match=r"a state with \['x'\], expected 'statistics'"):
        metrics.set_state({"x": 1})


def test_a_state_that_is_no_statistics_is_refused() -> None:
    with pytest.raises(MetricsError, match=r"'x': a state without \['clear_on_reduce', .*'window'\]"):
        MetricsLogger().set_state({"statistics": [["x", {"total": 3}]]})


def test_returns_say_how_many_episodes_and_their_mean() -> None:
    returns = EpisodeReturns(window=2)
    assert repr(returns) == "<EpisodeReturns: 0 finished episodes>"
    returns.take(3, [10.0, 20.0, 40.0], [1, 2, 4])
    assert repr(returns) == "<EpisodeReturns: 3 finished episodes, mean return 30 of the last 2>"
    assert repr(AgentReturns()) == "<AgentReturns: 0 finished episodes>"
    assert repr(MetricsLogger()) == "<MetricsLogger: nothing logged>"
    assert repr(logged([3])) == "<MetricsLogger: x>"


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
