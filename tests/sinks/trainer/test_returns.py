"""A trainer that gets train batches has the returns that the rollouts have, and knows which weights they use."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from drawn_agents import Drawn, made
from feeding_rollouts import HASTY, fed, feeding, graph_over, running, trainer
from hypothesis import Phase, given, settings, strategies as st
from property_examples import examples
from remote_hosts import BrokenWire
from wire_messages import TOKEN

from rollflow import Graph, MultiAgentRollout, Rollout
from rollflow.nodes import EpisodeReturns, LambdaConnector
from rollflow.sinks import Batches, TrainerSink
from rollflow.sinks.trainer.item_maker import StreamReturns
from rollflow.sinks.trainer.messages import MOST_KEPT, MOST_MODULES, UNKNOWN, FinishedEpisodes, message_of_batch
from rollflow.sinks.trainer.rollout_peer import RolloutPeer
from rollflow.sinks.trainer.sink import BatchObserver
from rollflow.stream.data.errors import GraphError, WireError
from rollflow.stream.wire import Fragment, TrainerSession, decode, encode

DRAWN = Drawn(3, 1, 4, 1, 9, False, 8, 1, True, 11)
Made = Callable[..., Any]


def told_of(returns: Any) -> Any:
    """All that returns say."""
    by_module = {each: told_of(own) for each, own in sorted(getattr(returns, "by_module", {}).items()) if own.count}
    return returns.count, list(returns.returns), list(returns.lengths), by_module


@cache
def returns_here(made: Made, **options: Any) -> Any:
    """Return the episodes' returns in a loop over the same rollout."""
    with made(**options) as rollout:
        for _ in rollout.batches():
            pass
    assert rollout.returns.count
    return told_of(rollout.returns)


def cartpoles(**options: Any) -> Rollout:
    return Rollout("CartPole-v1", **{"num_envs": 4, "fragment_length": 32, "num_fragments": 6, "seed": 3, **options})


def agents(**options: Any) -> MultiAgentRollout:
    return made(DRAWN, **{"num_fragments": 20, **options})[1]


def test_what_a_batch_could_not_be_made_of_is_counted_once_it_is() -> None:
    errors = [KeyError("once")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    with trainer(yields=Batches(learner_connector=lambda obs_space, act_space: LambdaConnector(fail_once))) as stream:
        with feeding(stream.address, num_fragments=8):
            with pytest.raises(KeyError, match="once"):
                next(iter(stream))
            assert stream.returns.count == 0
            ended = sum(int((batch["terminateds"] | batch["truncateds"]).sum()) for batch in stream)
    assert stream.returns.count == ended > 0


@pytest.mark.parametrize(
    ("made", "sends", "per_batch"),
    [
        pytest.param(cartpoles, "batches", 3, marks=pytest.mark.slow),
        pytest.param(agents, "batches", 1, marks=pytest.mark.slow),
        pytest.param(agents, "batches", 3, marks=pytest.mark.slow),
        (agents, "fragments", 1),
    ],
)
def test_returns_are_those_of_the_rollout(made: Made, sends: str, per_batch: int) -> None:
    stream = trainer(yields=Batches(fragments=per_batch))
    returns = stream.returns
    assert told_of(returns) == (0, [], [], {})
    with fed(stream, made(), sends=sends):
        for _ in stream:
            pass
    here = returns_here(made)
    assert told_of(returns) == here
    assert here[3].keys() == (set() if made is cartpoles else {"nested 0", "nested 1", "plain 0", "plain 1"})
    for module_id, (_, values, _, _) in here[3].items():
        assert returns.by_module[module_id].mean == np.mean(values)


@settings(max_examples=examples(3), phases=[Phase.explicit, Phase.generate])
@given(cuts=st.lists(st.integers(0, 40_000), max_size=4), made=st.sampled_from([cartpoles, agents]))
def test_connections_that_are_cut_lose_none_and_double_none(cuts: list[int], made: Made) -> None:
    """After so many bytes."""
    with (
        trainer(limits=HASTY, prefetch=8) as stream,
        closing(BrokenWire(stream.address, lambda: cuts.pop() if cuts else None)) as wire,
        running(*graph_over(made(), wire.address, sends="batches")),
    ):
        for _ in stream:
            pass
    assert told_of(stream.returns) == returns_here(made)


def test_what_is_left_out_is_not_counted() -> None:
    """A batch that is too old, and with it the episodes that it tells of."""
    rollout, stream, steps = agents(), trainer(max_lag=0, on_excess="drop"), 0
    with fed(stream, rollout, sends="batches"):
        for batches in stream:
            steps += sum(len(batch["rewards"]) for batch in batches.values())
            stream.publish({each: {"weight": torch.tensor(0.0)} for each in rollout.module})
    assert steps + stream.lost["max_lag"] == rollout.num_steps
    assert 0 < stream.returns.count < returns_here(agents)[0]


def test_who_watches_comes_before_the_rollout_is_in_a_graph() -> None:
    with agents() as rollout:
        Graph("g").add(rollout=rollout)
        with pytest.raises(GraphError, match="in a graph already, expected what watches it to come before that"):
            rollout.watch(rollout.returns)


# What goes over the wire


def told(count: int, first: int = 0, **by_module: Any) -> dict[str, Any]:
    kept = min(count, MOST_KEPT)
    entry = {"count": count, "returns": [float(first + i) for i in range(kept)], "lengths": list(range(kept))}
    return entry | ({"by_module": by_module} if by_module else {})


def source(**known: Any) -> RolloutPeer:
    return RolloutPeer(TrainerSession(TOKEN), rollout=replace(UNKNOWN, sends="batches", **known))


def message(number: int, **options: Any) -> Fragment:
    return message_of_batch(number, {"a": {"rewards": np.full(3, number)}}, modules=["a"], **options)


@pytest.mark.parametrize(
    ("episodes", "expected"),
    [
        (7, "episodes is 7, expected a map"),
        ({}, "episodes has no field 'count', expected count, returns, lengths"),
        (told(2) | {"count": 3}, "expected 3 returns and lengths"),
        (told(1) | {"returns": [float("nan")]}, r"episodes.returns\[0\] is nan, expected a number"),
        (told(1) | {"lengths": []}, "expected 1 returns and lengths"),
        (told(1) | {"by_module": {str(i): told(0) for i in range(257)}}, "expected at most 256 module ids"),
        (told(1, a={"count": "x"}), r"episodes.by_module\['a'\].count is 'x'"),
    ],
)
def test_what_is_malformed_is_refused(episodes: Any, expected: str) -> None:
    with pytest.raises(WireError, match=expected):
        source(is_by_module=True).read(message(1, episodes=episodes))


def test_as_much_as_may_be_told_goes_into_one_message() -> None:
    parts = {f"module {number}": told(MOST_KEPT) for number in range(MOST_MODULES)}
    came = decode(bytearray(b"".join(encode(message(1, episodes=told(MOST_KEPT, **parts))))))
    assert isinstance(came, Fragment)
    assert len(source(is_by_module=True).read(came).finished.by_module) == MOST_MODULES


def test_returns_by_module_of_one_module_are_refused() -> None:
    batch = message_of_batch(1, {"rewards": np.zeros(3)}, episodes=told(1, a=told(1)))
    with pytest.raises(WireError, match=r"episodes.by_module of a rollout with one module, expected none"):
        source().read(batch)
    with pytest.raises(WireError, match="episodes is 7, expected a map"):
        source().read(message_of_batch(1, {"rewards": np.zeros(3)}, episodes=7))  # type: ignore[arg-type]


def test_more_episodes_than_are_told_one_by_one_are_counted() -> None:
    returns = StreamReturns()
    returns.take_finished(FinishedEpisodes.of(told(250, 5), is_by_module=False))
    assert (returns.count, len(returns.returns), returns.returns[-1]) == (250, 100, 104.0)


# What the sink sees


def test_modules_that_go_have_theirs_told_and_others_of_their_id_are_counted_anew() -> None:
    rollout = agents()
    seen = BatchObserver(rollout, see=lambda fragment: None)
    returns: Any = seen._returns

    def finish(count: int, *ids: Any) -> None:
        for each in ids:
            returns.by_module.setdefault(each, EpisodeReturns()).take(count, [1.0] * count, [1] * count)

    finish(3, "a", 7)
    assert returns._is_present("a")  # though there is none, until it is told
    assert not returns._is_present(7)
    finish(2, "a")
    assert seen.take_episodes() == told(0, a={"count": 5, "returns": [1.0] * 5, "lengths": [1] * 5})
    assert seen.take_episodes() is None
    assert not returns._is_present("a")
    del returns.by_module["a"]
    finish(1, "a")
    assert seen.take_episodes() == told(0, a={"count": 1, "returns": [1.0], "lengths": [1]})
    finish(1, *map(str, range(MOST_MODULES + 2)))  # more than one batch tells of
    assert [len((seen.take_episodes() or {})["by_module"]) for _ in range(2)] == [MOST_MODULES, 2]
    rollout.environments.close()


def test_a_trainer_keeps_the_modules_that_it_heard_of_last() -> None:
    returns = StreamReturns()
    for number in range(1500):
        parts = {"stays": told(1), f"version {number}": told(1)}
        returns.take_finished(FinishedEpisodes.of(told(1, **parts), is_by_module=True))
    assert len(returns.by_module) == 1024
    assert returns.by_module["stays"].count == returns.count == 1500
    assert "version 1499" in returns.by_module


def test_a_sink_that_sends_fragments_watches_nothing() -> None:
    rollout, graph = cartpoles(), Graph("feed")
    graph.connect(rollout.fragments, TrainerSink("unix:/nowhere"))
    assert "seen" not in "".join(graph.nodes)
    rollout.environments.close()
