"""A trainer gets what the rollout would have given, of one agent or several, as fragments and as train batches."""

import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import anyio
import drawn_agents
import feeding_rollouts
import pytest
import torch
from drawn_agents import Drawn, envs_of, made, modules_of
from drawn_rollouts import Setting, drawn_settings, fragments_of, makers_of, rollout_of
from feeding_rollouts import feeding, graph_of, graph_over, running, sequences_of, trainer
from fragment_equality import assert_alike, in_time
from hypothesis import Phase, given, settings, strategies as st
from memory_lending import arrays_of, file_of, shared_address
from numbered_module import NumberedModule
from property_examples import examples
from remote_rollouts import await_that
from serial_module import SerialModule

from rollflow import (
    DefaultModelConfig,
    Fragment,
    GeneralAdvantageEstimation,
    Graph,
    MultiAgentRollout,
    Rollout,
    TrainerStream,
)
from rollflow.nodes import RandomModule
from rollflow.sinks import Batches, TrainerSink
from rollflow.sinks.trainer.messages import joined_weights, parted_weights
from rollflow.stream import MultiAgentFragment
from rollflow.stream.data.errors import ModuleError, RunError
from rollflow.stream.testing import check


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
@settings(max_examples=examples(12), phases=[Phase.explicit, Phase.generate])
@given(drawn=st.one_of(drawn_settings, drawn_agents.drawn_settings))
def test_fragments_are_those_of_the_rollout(scheme: str, drawn: Setting | drawn_agents.Drawn) -> None:
    here: list[Any]
    if isinstance(drawn, drawn_agents.Drawn):
        here = drawn_agents.fragments_of(drawn)
        rollout: Any = drawn_agents.made(drawn, env=drawn_agents.makers_of(drawn), num_fragments=3)[1]
    else:
        here = fragments_of(makers_of(drawn), drawn, lanes=drawn.lanes)
        rollout = rollout_of(drawn, lanes=drawn.lanes)
    with shared_address() as shared:
        address = shared if scheme == "shm" else "tcp://127.0.0.1:0"
        with trainer(address, yields="fragments", prefetch=8) as stream:
            with running(*graph_over(rollout, stream.address)):
                there = list(stream)
        assert scheme == "tcp" or all(file_of(leaf) is not None for each in there for leaf in arrays_of(each))
    assert_alike(in_time(with_steps(there)), with_steps(here))


def with_steps(fragments: list[Any]) -> list[Any]:
    return [fragment for fragment in fragments if fragment.num_steps or isinstance(fragment, MultiAgentFragment)]


def cartpoles(where: Any = "inline", **options: Any) -> Rollout:
    return Rollout("CartPole-v1", num_envs=4, fragment_length=16, num_fragments=3, seed=7, where=where, **options)


def numbered_agents() -> MultiAgentRollout:
    return made(DRAWN, num_fragments=12)[1]


def kinds_in(batch: Any) -> Any:
    """Types and dtypes in a batch, which may be by module."""
    return {name: kinds_in(part) for name, part in batch.items()} if hasattr(batch, "items") else str(batch.dtype)


def steps_in(batch: Any) -> int:
    return len(batch["rewards"]) if "rewards" in batch else sum(map(steps_in, batch.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "schemes", "sends"),
    [
        (cartpoles, ["tcp", "shm"], "fragments"),
        (partial(cartpoles, "rollouts", lanes=2, workers=2), ["tcp"], "fragments"),
        (cartpoles, ["shm"], "batches"),
        (numbered_agents, ["tcp", "shm"], "fragments"),
        (numbered_agents, ["tcp", "shm"], "batches"),
    ],
)
def test_batches_are_those_of_the_rollout_wherever_it_goes(make: Any, schemes: list[str], sends: str) -> None:
    with make() as rollout:
        here = list(rollout.batches())
    for scheme in schemes:
        with shared_address() as shared, trainer(shared if scheme == "shm" else "tcp://127.0.0.1:0") as stream:
            with running(*graph_over(make(), stream.address, sends=sends)):
                there = list(stream)
        assert list(map(kinds_in, there)) == list(map(kinds_in, here))
        assert sum(map(steps_in, there)) == sum(map(steps_in, here))
        if rollout.environments.num_lanes == 1:  # in this order
            check(here, there)


@pytest.mark.slow
def test_a_batch_is_one_fragment_of_every_lane_of_every_rollout_unless_it_is_said_otherwise() -> None:
    with trainer(sources=2) as stream:
        more = {"lanes": 2, "num_fragments": 3}
        with feeding(stream.address, (0, 1), **more), feeding(stream.address, (2, 3), **more, sink={"name": "other"}):
            counts = [len(stream.handed) for _ in stream]
    assert counts[0] == 4
    assert sum(counts) == 12
    with trainer(yields=Batches(fragments=5)) as stream, feeding(stream.address, num_fragments=12):
        assert [len(stream.handed) for _ in stream] == [5, 5, 2]


def test_a_learner_connector_runs_where_the_trainer_is() -> None:
    pieces: Any = lambda *_: [GeneralAdvantageEstimation(gamma=0.9, lambda_=0.8)]  # noqa: E731
    settings: dict[str, Any] = {"fragment_length": 8, "num_fragments": 2, "seed": 0, "module": Critic()}
    with Rollout("CartPole-v1", num_envs=2, learner_connector=pieces, **settings) as rollout:
        here = list(rollout.batches())
    with trainer(yields=Batches(learner_connector=pieces), module=Critic()) as stream:
        with running(*graph_over(Rollout("CartPole-v1", num_envs=2, **settings), stream.address)):
            there = list(stream)
    check(here, there)


@pytest.mark.slow
def test_a_learner_connector_that_nothing_would_run_is_refused() -> None:
    pieces: Any = lambda *_: [GeneralAdvantageEstimation()]  # noqa: E731
    with trainer(yields=Batches(learner_connector=pieces), module=Critic()) as stream:
        other = Rollout("CartPole-v1", num_envs=2, fragment_length=8, num_fragments=2, seed=0)
        match = "sends train batches already made, so learner_connector would be passed over"
        with pytest.raises(RunError, match=match), running(*graph_over(other, stream.address, sends="batches")):
            next(iter(stream))


@pytest.mark.anyio
async def test_it_is_an_async_iterator_as_well() -> None:
    with trainer(yields="fragments") as stream:
        graph, rollout, _ = graph_of(stream.address, (0, 1), num_fragments=4, lanes=2)
        taken: list[Fragment] = []

        async def take() -> None:
            taken.extend([fragment async for fragment in stream])

        async with anyio.create_task_group() as tasks, graph.run() as run:
            tasks.start_soon(take)
            await run.wait()
    assert sequences_of(taken) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert rollout.num_steps == sum(fragment.num_steps for fragment in taken)


@pytest.mark.anyio
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_its_block_may_be_asynchronous(is_cancelled: bool) -> None:
    with anyio.CancelScope() as scope:
        async with trainer(yields="fragments") as stream:
            graph, _, _ = graph_of(stream.address, (0, 1))
            async with graph.run() as run, aclosing(aiter(stream)) as fragments:
                await anext(fragments)
                if is_cancelled:
                    scope.cancel()
                    await anyio.sleep_forever()
                run.stop()
    assert scope.cancelled_caught == is_cancelled
    with pytest.raises(RunError, match="the stream is closed"):
        next(iter(stream))
    with pytest.raises(ConnectionRefusedError), socket.socket() as sock:
        sock.connect((stream.address.host, stream.address.port))


def test_a_loop_that_is_left_goes_on_with_the_next_one_and_says_why_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with trainer(yields="fragments") as stream, feeding(stream.address, num_fragments=6):
        taken = [next(iter(stream)) for _ in range(2)]
        taken += stream
    assert sequences_of(taken) == {0: [0, 1, 2, 3, 4, 5]}
    assert "all rollouts have ended, and all that came of them was handed over: the loop ends" in caplog.text


@pytest.mark.slow
def test_a_slow_trainer_holds_the_rollout_back() -> None:
    with trainer(yields="fragments", prefetch=1) as stream, feeding(stream.address, lanes=1) as feed:
        for number, _ in enumerate(stream, start=1):
            # One is at the trainer, one may be sent ahead; one waits in the sink, one before it, one to get there.
            await_that(lambda number=number: feed.sink._session.given == number + 1)
            assert feed.rollout.num_steps <= (number + 1 + 3) * 8 * 4
            if number == 20:
                break


@pytest.mark.wait_times(first_word_s=0.05)
def test_it_says_meanwhile_whom_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    for timeout, told in ((0.3, "0.3 s"), (None, "any time")):
        with trainer(sources=2, join_timeout=timeout) as stream, ThreadPoolExecutor() as threads:
            loop, where = threads.submit(list, stream), f"listening on {stream.address}"
            waits = f"0 of 2 rollouts came so far, others have {told} (join_timeout): {where}"
            await_that(lambda waits=waits: waits in caplog.text)
            if timeout is None:
                stream.expect_no_more()
            error = loop.exception()
            assert (error is None) if timeout is None else str(error).endswith(f"rollouts came within 0.3 s: {where}")


def test_a_stream_runs_once_and_inside_its_block() -> None:
    stream = trainer()
    with pytest.raises(RunError, match="the stream is new; this loop expects: with TrainerStream"):
        next(iter(stream))
    with stream:
        pass
    with pytest.raises(RunError, match="the stream is closed; this loop expects"):
        next(iter(stream))
    with pytest.raises(RunError, match="the stream is closed: it runs once, make another one"), stream:
        pass


def test_what_comes_is_read_only_as_everywhere() -> None:
    with trainer(yields="fragments") as stream, feeding(stream.address, num_fragments=1):
        [fragment] = stream
        assert isinstance(fragment, Fragment)
        with pytest.raises(ValueError, match="read-only"):
            fragment.column("rewards")[0] = 1.0


class Critic(NumberedModule):
    """Has values, for any observation."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs = batch["obs"]
        return {"action_dist_inputs": torch.zeros(len(obs), 2), "vf_preds": obs.sum(-1)}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        """f32[B]"""
        values: torch.Tensor = batch["obs"].sum(-1)
        return values


DRAWN = Drawn(3, 1, 4, 1, 9, False, 8, 1, True, 11)


# Where train batches are made: at the rollout, or at the trainer of fragments.
SENDS = pytest.mark.parametrize("sends", ["batches", "fragments"])


@contextmanager
def fed(
    stream: TrainerStream, drawn: Drawn = DRAWN, sends: str = "batches", **options: Any
) -> Iterator[tuple[TrainerStream, MultiAgentRollout]]:
    """The stream, and a rollout that feeds it from another thread."""
    _, rollout = made(drawn, **options)
    with feeding_rollouts.fed(stream, rollout, sends=sends):
        yield stream, rollout


@SENDS
def test_several_lanes_make_one_batch(sends: str) -> None:
    drawn = DRAWN._replace(lanes=3, at_once=True)
    with fed(trainer(), drawn, sends, num_fragments=4) as (stream, rollout):
        rows = [sum(len(batch["rewards"]) for batch in batches.values()) for batches in stream]
    assert sum(rows) == rollout.num_steps
    assert len(rows) == 4


@SENDS
def test_weights_of_all_modules_come_back_under_one_version(sends: str) -> None:
    with fed(trainer(prefetch=0, max_lag=0, on_excess="mask"), sends=sends) as (stream, rollout):
        versions: list[int] = []
        for batches in stream:
            for batch in batches.values():
                # A module's weight is set to the version that it is published as.
                assert torch.equal(batch["weight"], batch["policy_version"].float())
                versions += batch["policy_version"].tolist()
                is_new = batch["policy_version"] >= stream.version
                assert torch.equal(batch["loss_mask"], is_new)
            weights = {each: {"weight": torch.tensor(float(stream.version + 1))} for each in rollout.module}
            assert stream.publish(weights) == stream.version
            if len(set(versions)) > 4:
                break
    assert len(set(rollout.policy_versions.values())) == 1


def test_weights_of_some_modules_alone_are_refused() -> None:
    with fed(trainer()) as (stream, _):
        next(iter(stream))
        with pytest.raises(ModuleError, match=r"missing \['nested 1/weight', 'plain 0/weight', 'plain 1/weight'\]"):
            stream.publish({"nested 0": {"weight": torch.zeros(())}})


@SENDS
def test_modules_that_are_not_trained_have_no_part_in_it(sends: str) -> None:
    with fed(trainer(), sends=sends, modules_to_train=["plain 0"]) as (stream, rollout):
        batches = next(iter(stream))
        assert list(batches) == ["plain 0"]
        stream.publish({"plain 0": {"weight": torch.ones(())}})
        while rollout.policy_versions["plain 0"] == 0:
            next(iter(stream))
    assert rollout.policy_versions == {"nested 0": 0, "nested 1": 0, "plain 0": 1, "plain 1": 0}


@pytest.mark.slow
@SENDS
def test_a_module_without_weights_is_waited_for_by_nobody(sends: str) -> None:
    """The module never gets a version: neither the rollout's pace nor a batch's age goes by it."""
    modules = modules_of(DRAWN) | {"plain 1": RandomModule}
    stream = trainer(prefetch=0, max_lag=8, on_excess="drop")  # more than there may be on their way
    with fed(stream, DRAWN._replace(at_once=True), sends, module=modules) as (stream, rollout):
        for batches in islice(stream, 20):
            number = float(stream.version)
            stream.publish({each: {"weight": torch.tensor(number)} for each in rollout.module if each != "plain 1"})
            assert stream.handed[0].num_steps == sum(len(batch["rewards"]) for batch in batches.values())
        assert stream.lost == {}
    assert rollout.policy_versions["plain 1"] == 0


@SENDS
def test_padding_has_no_age(sends: str) -> None:
    config = DefaultModelConfig(use_lstm=True, lstm_cell_size=4, max_seq_len=5)
    rollout = MultiAgentRollout(envs_of(DRAWN._replace(nested=0))[1], model_config=config, fragment_length=8, seed=0)
    module = rollout.module if sends == "fragments" else None  # whose states the pieces at the trainer ask for
    with feeding_rollouts.fed(trainer(prefetch=0, module=module), rollout, sends=sends) as (stream, _):
        for batches in islice(stream, 5):
            batch = batches["default_policy"]
            assert not batch["loss_mask"].all()
            oldest = int(batch["policy_version"][batch["loss_mask"]].min())
            assert stream.handed[0].lag == stream.version - oldest
            assert stream.handed[0].num_steps == int(batch["loss_mask"].sum())
            stream.publish({"default_policy": rollout.module["default_policy"].state_dict()})


def connect(rollout: MultiAgentRollout) -> None:
    Graph("feed").connect(rollout.fragments, TrainerSink("unix:/nowhere"))


def test_module_ids_that_are_no_strings_are_refused() -> None:
    _, makers = envs_of(DRAWN._replace(nested=0))
    agents = {f"agent {number}": 7 for number in range(DRAWN.agents)}
    rollout = MultiAgentRollout(makers, module={7: SerialModule()}, agent_to_module_mapping_fn=agents)
    with pytest.raises(ModuleError, match=r"module ids are \[7\], expected strings"):
        connect(rollout)
    rollout.environments.close()


def test_weights_are_parted_by_the_ids_that_there_are() -> None:
    weights = {"a": {"heads.left/right.w": 1}, "a/b": {"w": 2}}
    assert parted_weights(joined_weights(weights), ["a", "a/b"]) == weights
    assert parted_weights({"b/c/d.w": 3, "b/v": 4}, ["b", "b/c"]) == {"b/c": {"d.w": 3}, "b": {"v": 4}}
    with pytest.raises(ModuleError, match="weights have 'c/w'"):
        parted_weights({"c/w": 1}, ["b"])


def test_of_fragments_the_trainer_knows_what_it_knows_of_batches() -> None:
    drawn = DRAWN._replace(at_once=True)
    stream = trainer(yields="fragments", max_lag=0, on_excess="pace")
    with fed(stream, drawn, "fragments", num_fragments=6) as (stream, rollout):
        weights = {each: {"weight": torch.tensor(1.0)} for each in rollout.module}
        steps = []
        for fragment in stream:
            [item] = stream.handed
            assert (item.lane, item.sequence, item.lag) == (fragment.lane, fragment.sequence, 0)
            assert set(fragment.policy_versions().values()) == {stream.version}
            steps.append(item.num_steps)
            stream.publish(weights)
    assert sum(steps) == rollout.num_steps


LONELY = Drawn(1, 1, 2, 1, 9, False, 1, 1, True, 3)  # fragments of one step, in some of which both agents wait


@pytest.mark.slow
@pytest.mark.parametrize("pace", [{}, {"max_lag": 0, "on_excess": "pace"}], ids=["any age", "pace"])
def test_fragments_in_which_all_agents_wait_hold_nobody_up(pace: dict[str, Any]) -> None:
    steps = came = 0
    with fed(trainer(prefetch=0, **pace), LONELY, "fragments", num_fragments=120) as (stream, rollout):
        for batches in stream:
            came += 1
            steps += sum(len(each["rewards"]) for each in batches.values())
    assert steps == rollout.num_steps
    assert came < 120


@pytest.mark.slow
def test_fragments_of_modules_whose_ids_are_no_strings_are_refused() -> None:
    modules = dict(enumerate(modules_of(DRAWN).values()))
    options: dict[str, Any] = {"agent_to_module_mapping_fn": lambda agent, episode: 2 * (agent != "agent 0")}
    rollout = MultiAgentRollout(envs_of(DRAWN)[1], module=modules, modules_to_train=[], **options)
    told = r"module ids are \[.*\], expected strings where fragments go to another process"
    with pytest.raises(ModuleError, match=told):
        with feeding_rollouts.fed(trainer(join_timeout=5.0), rollout, sends="fragments") as (stream, _):
            with pytest.raises(RunError, match="module ids are"):
                next(iter(stream))
