"""No fragment is older than the bound, and under pace rounds are of the lanes that there are."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_agents import Drawn, made
from ending_envs import NeverReset, NotMadeAgain
from feeding_rollouts import (
    SHORT,
    failing,
    fed,
    feeding,
    graph_for_two,
    graph_over,
    learner_of,
    rollout_of,
    running,
    sequences_of,
    trainer,
    weights,
    weights_of_agents,
)
from held_envs import Held, await_held, let_go
from hypothesis import Phase, given, settings, strategies as st
from numbered_module import NumberedEnv, NumberedModule
from property_examples import examples, strategies
from remote_hosts import BrokenWire, hosting, listening
from remote_rollouts import await_that, makers, rollout_over, rollouts_on

from rollflow import Columns, Graph, RemoteEnvs, RemoteRollouts, Rollout, TrainerStream
from rollflow.sinks import TrainerSink
from rollflow.sinks.trainer.rollout_peer import PeerLife
from rollflow.stream import LagError, WireError
from rollflow.stream.wire import Limits


def arrived_at(stream: TrainerStream) -> int:
    """Return the number of fragments of the one rollout that have come."""
    [source] = stream._listener.sources.values()
    return source.session.taken


@settings(max_examples=examples(12), phases=[Phase.explicit, Phase.generate])
@given(**strategies(max_lag=(0, 3), lanes=(1, 3), where=["inline", "threads"]))
def test_under_pace_every_action_is_as_new_as_it_must_be_and_nothing_is_lost(
    max_lag: int, lanes: int, where: Any
) -> None:
    with trainer(max_lag=max_lag, on_excess="pace") as stream:
        stream.publish(weights(1.0))
        with feeding(stream.address, (0, 1, 2), lanes=lanes, where=where, num_fragments=8) as feed:
            steps = 0
            for batch in stream:
                assert int(batch[Columns.POLICY_VERSION].min()) >= stream.version - max_lag
                # What acted was what had been published under this version.
                np.testing.assert_array_equal(batch["weight"], batch[Columns.POLICY_VERSION])
                assert all((each.lag or 0) <= max_lag for each in stream.handed)
                assert len(stream.handed) == lanes
                steps += len(batch[Columns.REWARDS])
                stream.publish(weights(stream.version + 1.0))
    assert steps == feed.rollout.num_steps
    assert stream.lost == {}


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_a_lane_that_is_slow_makes_no_other_run_ahead(max_lag: int, tmp_path: Path) -> None:
    envs = [partial(Held, 0, tmp_path, steps=[20], lengths=(100, 100)), partial(NumberedEnv, 1)]
    options: dict[str, Any] = {"module": NumberedModule(), "lanes": 2, "where": "threads", "fragment_length": 8}
    with trainer(max_lag=max_lag, on_excess="pace") as stream:
        with running(*graph_over(Rollout(envs, num_fragments=8, **options), stream.address)) as feed:
            batches = iter(stream)
            for _ in range(2):
                next(batches)
                stream.publish(weights(stream.version + 1.0))
            stream._begin_next()  # the trainer has moved on from the second batch
            await_held(tmp_path, 0)  # in its third fragment, beyond which the other lane may go as far as is allowed
            await_that(lambda: feed.sink._gate.given[1] == 2 + 1 + max_lag)
            let_go(tmp_path, 0)
            for _ in batches:
                assert max(each.lag or 0 for each in stream.handed) <= max_lag
                stream.publish(weights(stream.version + 1.0))
    assert stream.lost == {}


@pytest.mark.parametrize("agents", [0, 2])
def test_where_weights_are_published_too_often_pace_says_so(agents: int) -> None:
    is_old = r"is 2 policy versions old, expected at most max_lag=0: publish at most once per batch, before the next is"
    with trainer(max_lag=0, on_excess="pace") as stream, feeding(stream.address, agents=agents):
        batches = iter(stream)
        next(batches)
        stream._begin_next()
        await_that(lambda: arrived_at(stream) == 2)  # the next has begun
        for version in (1.0, 2.0):
            stream.publish(weights_of_agents(version) if agents else weights(version))
        with pytest.raises(LagError, match=rf"fragment 1 of lane 0 of rollout feed .* {is_old}"):
            next(batches)


def test_what_is_too_old_is_dropped_and_counted() -> None:
    with trainer(yields="fragments", max_lag=1, prefetch=3) as stream:
        with feeding(stream.address, lanes=1, num_fragments=8) as feed:
            fragments = iter(stream)
            taken = [next(fragments)]
            await_that(lambda: arrived_at(stream) == 4)
            for version in range(1, 4):
                stream.publish(weights(version))
            taken += fragments
    assert sequences_of(taken)[0][0] == 0
    assert 1 not in sequences_of(taken)[0]
    assert stream.lost == {"max_lag": feed.rollout.num_steps - sum(fragment.num_steps for fragment in taken)}
    assert stream.lost["max_lag"] >= 3 * 8


@pytest.mark.parametrize("on_excess", ["raise", "pace"])
def test_what_is_too_old_when_it_is_handed_over_is_an_error_and_is_not_forgotten(on_excess: Any) -> None:
    with trainer(yields="fragments", max_lag=0, prefetch=1, on_excess=on_excess) as stream:
        with feeding(stream.address, lanes=2):
            fragments = iter(stream)
            next(fragments)
            stream.publish(weights(1.0))
            for _ in range(2):
                with pytest.raises(LagError, match=r"is 1 policy versions old, expected at most max_lag=0.*\nsee "):
                    next(iter(stream))


def test_older_steps_are_masked() -> None:
    with trainer(max_lag=0, on_excess="mask", prefetch=1) as stream, feeding(stream.address, num_fragments=12) as feed:
        masked = young = 0
        for batch in stream:
            expected = batch[Columns.POLICY_VERSION] >= stream.version
            np.testing.assert_array_equal(batch[Columns.LOSS_MASK], expected)
            masked += int((~expected).sum())
            young += int(expected.sum())
            stream.publish(weights(stream.version + 1.0))
    assert masked
    assert stream.lost == {"masked": masked}
    assert masked + young == feed.rollout.num_steps


@settings(max_examples=examples(8), phases=[Phase.explicit, Phase.generate])
@given(max_lag=st.integers(0, 2), lanes=st.integers(1, 2), at_once=st.booleans(), seed=st.integers(0, 99))
def test_so_it_is_with_agents_but_for_pending_actions(max_lag: int, lanes: int, at_once: bool, seed: int) -> None:
    _, rollout = made(Drawn(3, lanes, 4, 1, 9, at_once, 8, 1, True, seed), num_fragments=8)
    stream = trainer(max_lag=max_lag, on_excess="pace")
    with fed(stream, rollout, sends="fragments"):
        steps = masked = 0
        for batches in stream:
            for batch in batches.values():
                is_young = batch[Columns.POLICY_VERSION] >= stream.version - max_lag
                assert torch.equal(batch[Columns.LOSS_MASK], is_young)
                masked += int((~is_young).sum())
                steps += len(is_young)
            stream.publish({module_id: weights(stream.version + 1.0) for module_id in rollout.module})
    assert steps == rollout.num_steps
    assert stream.lost == ({"masked": masked} if masked else {})
    assert not (at_once and masked)


@pytest.mark.parametrize(
    ("sends", "told"),
    [
        ("fragments", "expected no edge that drops"),
        ("batches", "this one sends train batches: expected sends='fragments', or on_excess='drop', 'mask' or 'raise'"),
    ],
)
def test_a_rollout_that_can_not_be_held_back_is_refused(sends: Any, told: str) -> None:
    """Its fragments may be dropped, or batches are made of them."""
    rollout = rollout_of([0], num_fragments=4)
    with trainer(max_lag=0, on_excess="pace", join_timeout=20.0) as stream:
        sink, graph = TrainerSink(str(stream.address), sends=sends, limits=SHORT), Graph("feed")
        if sends == "batches":
            graph.add(rollout=rollout, learner=learner_of(rollout))
            graph.connect("rollout.fragments", "learner")
            graph.connect("learner", sink)
        else:
            graph.connect(rollout.fragments, sink, capacity=1, overflow="drop_oldest")
        with pytest.raises(WireError, match=told), running(graph, rollout, sink) as feed:
            stream._begin_next()
            feed.ended.result(60)


PACED: dict[str, Any] = {"max_lag": 0, "on_excess": "pace"}


@pytest.mark.parametrize("max_lag", [0, 1])
def test_what_a_rollout_gives_that_comes_while_the_trainer_is_at_a_batch_is_no_older(max_lag: int) -> None:
    options: dict[str, Any] = {"lanes": 2, "num_fragments": 8}
    with trainer(max_lag=max_lag, on_excess="pace") as stream:
        with feeding(stream.address, (0, 1), **options) as one:
            batches = iter(stream)
            stream.publish(weights(1.0))
            next(batches)
            with feeding(stream.address, (2, 3), seed=1, **options) as other:
                await_that(lambda: other.sink._session.order)
                steps = 2 * 8
                stream.publish(weights(stream.version + 1.0))
                for batch in batches:
                    assert int(batch[Columns.POLICY_VERSION].min()) >= stream.version - max_lag
                    steps += len(batch["obs"])
                    stream.publish(weights(stream.version + 1.0))
    assert stream.lost == {}
    assert steps == one.rollout.num_steps + other.rollout.num_steps


def test_a_version_is_seen_once_turns_can_begin_with_it() -> None:
    envs, seen = listening(RemoteRollouts), []
    with rollouts_on(envs.addresses[0], makers(0)), rollout_over(envs) as rollout:
        send = rollout.environments.broadcast

        def sending(published: Any) -> None:
            seen.append(rollout.policy_version)
            send(published)

        rollout.environments.broadcast = sending
        assert rollout.publish_as(3, weights(3.0))
        assert not rollout.publish_as(3, weights(4.0))
        assert seen == [0]
        assert next(iter(rollout.fragments())).policy_version == 3


Make = Callable[[int, Path], Any]


LOST: dict[str, Make] = {"later": NotMadeAgain, "at once": lambda slot, folder: NeverReset(slot)}


def rollout_that_loses_a_lane(where: Any, make: Make, folder: Path, **options: Any) -> Rollout:
    envs = [partial(NumberedEnv, 0), partial(make, 1, folder), partial(NumberedEnv, 2)]
    return Rollout(envs, module=NumberedModule(), lanes=3, where=where, workers=1, fragment_length=8, **options)


def rounds_without_it(stream: TrainerStream, rounds: int, *, publishes: bool = True) -> dict[int, list[int]]:
    """Go on until so many batches were of two fragments, none of lane 1: the numbers of each lane's that came."""
    taken: dict[int, list[int]] = {}
    for number, batch in enumerate(stream):
        assert number < 500
        if stream._rounds.max_lag is not None:
            assert int(batch[Columns.POLICY_VERSION].min()) >= stream.version - stream._rounds.max_lag
        for each in stream.handed:
            taken.setdefault(each.lane, []).append(each.sequence)
        lanes = [each.lane for each in stream.handed]
        rounds -= len(lanes) == 2 and 1 not in lanes
        if not rounds:
            break
        if publishes:
            stream.publish(weights(stream.version + 1.0))
    return taken


@pytest.mark.slow
@pytest.mark.wait_times(first_pause_s=0.0)
@pytest.mark.parametrize(
    ("max_lag", "where", "how"),
    [(0, "processes", "later"), (1, "processes", "at once"), (1, "rollouts", "later"), (0, "rollouts", "at once")],
)
def test_others_go_on_as_fresh_also_at_another_trainer(max_lag: int, where: Any, how: str, tmp_path: Path) -> None:
    rollout = rollout_that_loses_a_lane(where, LOST[how], tmp_path)
    address, settings = f"unix:{tmp_path}/trainer", {"max_lag": max_lag, "on_excess": "pace", "limits": SHORT}
    with running(*graph_over(rollout, address)):
        with failing(address, **settings) as stream:
            rounds_without_it(stream, 5)
            state = stream.state_dict()
        with TrainerStream(address, **settings) as another:
            another.load_state_dict(state)
            another.publish(weights(another.version + 1.0))
            rounds_without_it(another, 5)


@pytest.mark.slow
@pytest.mark.wait_times(first_pause_s=0.0)
@pytest.mark.parametrize("bound", [{}, PACED], ids=["free", "paced"])
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_each_of_two_trainers_is_told(where: Any, bound: dict[str, Any], tmp_path: Path) -> None:
    rollout = rollout_that_loses_a_lane(where, NotMadeAgain, tmp_path, num_fragments=12)

    def other() -> dict[int, list[int]]:
        with TrainerStream(f"unix:{tmp_path}/other", limits=Limits(grace_s=5.0), **bound) as stream:
            return rounds_without_it(stream, 500, publishes=False)

    graph, _, sinks = graph_for_two(rollout, tmp_path)
    with ThreadPoolExecutor() as pool, running(graph, rollout, sinks[1]):
        others = pool.submit(other)
        with TrainerStream(f"unix:{tmp_path}/one", limits=SHORT, **PACED) as stream:
            ours = rounds_without_it(stream, 500)
        for taken in (ours, others.result()):
            assert taken == {lane: list(range(3 if lane == 1 else 12)) for lane in range(3)}


def test_of_a_rollout_that_is_drained_no_lane_is_set_aside() -> None:
    with trainer(yields="fragments") as stream:
        with feeding(stream.address, range(3), lanes=3, where="processes", workers=1) as feed:
            for number, _ in enumerate(stream):
                if number == 5:
                    feed.drain()
            [source] = stream._listener.sources.values()
            assert source.life is PeerLife.FINISHED
            assert source.aside == {}


@pytest.mark.parametrize("cuts", [(), (4000, 9000, 3000, 15000, 6000, 5000)], ids=["whole", "cut again and again"])
def test_where_lanes_come_and_go_a_batch_is_of_as_many_fragments_as_there_are(cuts: tuple[int, ...]) -> None:
    envs, lengths = listening(), iter(cuts)
    with hosting(envs.addresses[0], [partial(NumberedEnv, 0)]), trainer() as stream:
        rollout = Rollout(envs, module=NumberedModule(), fragment_length=8)
        with closing(BrokenWire(stream.address, lambda: next(lengths, None))) as wire:
            with running(*graph_over(rollout, wire.address)) as feed:
                batches, steps = iter(stream), 0
                for count in (1, 2, 1):
                    with hosting(envs.addresses[0], [partial(NumberedEnv, 1)]) if count == 2 else nullcontext():
                        while not steps or len(stream.handed) != count:
                            steps += len(next(batches)["obs"])
                feed.drain()
                steps += sum(len(batch["obs"]) for batch in batches)
    assert steps == rollout.num_steps


@pytest.mark.parametrize("kind", [RemoteEnvs, RemoteRollouts])
def test_a_rollout_whose_lanes_come_and_go_is_not_held_back_but_refused(kind: Any) -> None:
    envs = listening(kind)
    host = hosting if kind is RemoteEnvs else rollouts_on
    with host(envs.addresses[0], makers(0)), trainer(max_lag=0, on_excess="pace", join_timeout=20.0) as stream:
        refused = r"lanes of this one come and go \(RemoteEnvs, RemoteRollouts\): expected on_excess='drop' or 'mask'"
        with pytest.raises(WireError, match=refused):
            with running(*graph_over(rollout_over(envs), stream.address)) as feed:
                stream._begin_next()
                feed.ended.result(60)
