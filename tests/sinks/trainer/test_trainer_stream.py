"""A trainer gets what the rollout would have given: as fragments and train batches, in every loop."""

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import anyio
import pytest
import torch
from drawn_rollouts import Setting, drawn_settings, fragments_of, makers_of, rollout_of
from feeding_rollouts import feeding, graph_of, graph_over, in_lanes_order, running, sequences_of, trainer
from fragment_equality import assert_alike
from hypothesis import Phase, given, settings
from memory_lending import file_of, shared_address
from numbered_module import NumberedModule
from property_examples import examples
from remote_rollouts import await_that

from rollflow import Fragment, GeneralAdvantageEstimation, Rollout
from rollflow.stream import RunError
from rollflow.stream.data.tree import leaves_of
from rollflow.stream.testing import check


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
@settings(max_examples=examples(8), phases=[Phase.explicit, Phase.generate])
@given(drawn=drawn_settings)
def test_fragments_are_those_of_the_rollout(scheme: str, drawn: Setting) -> None:
    here = fragments_of(makers_of(drawn), drawn, lanes=drawn.lanes)
    with (
        shared_address() as shared,
        trainer(shared if scheme == "shm" else "tcp://127.0.0.1:0", yields="fragments", prefetch=8) as stream,
    ):
        with running(*graph_over(rollout_of(drawn, lanes=drawn.lanes), stream.address)):
            there = [fragment for fragment in stream if fragment.num_steps]
        leaves = [leaf for each in there for column in each.columns.values() for leaf in leaves_of(column.tree)]
        assert scheme == "tcp" or all(file_of(leaf) is not None for leaf in leaves if leaf.nbytes)
    assert_alike(in_lanes_order(there), [fragment for fragment in here if fragment.num_steps])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "scheme", "sends"),
    [
        ("inline", "tcp", "fragments"),
        ("rollouts", "tcp", "fragments"),
        ("inline", "shm", "fragments"),
        ("inline", "shm", "batches"),
    ],
)
def test_batches_are_those_of_the_rollout_wherever_it_goes(where: Any, scheme: str, sends: str, address: str) -> None:
    options: dict[str, Any] = {"num_envs": 4, "fragment_length": 16, "num_fragments": 3, "seed": 7, "where": where}
    if where == "rollouts":
        options |= {"lanes": 2, "workers": 2}
    with Rollout("CartPole-v1", **options) as rollout:
        here = list(rollout.batches())
    with trainer(address if scheme == "shm" else "tcp://127.0.0.1:0") as stream:
        with running(*graph_over(Rollout("CartPole-v1", **options), stream.address, sends=sends)):
            there = list(stream)
    assert sum(len(batch["obs"]) for batch in here) == sum(len(batch["obs"]) for batch in there)
    for mine, theirs in zip(here, there, strict=True):
        assert {name: (type(column), column.dtype) for name, column in mine.items()} == {
            name: (type(column), column.dtype) for name, column in theirs.items()
        }
    if where == "inline":  # in this order
        check(here, there)


@pytest.mark.slow
def test_a_batch_is_one_fragment_of_every_lane_of_every_rollout_unless_it_is_said_otherwise() -> None:
    with trainer(sources=2) as stream:
        more = {"lanes": 2, "num_fragments": 3}
        with feeding(stream.address, (0, 1), **more), feeding(stream.address, (2, 3), **more, sink={"name": "other"}):
            counts = [len(stream.handed) for _ in stream]
    assert counts[0] == 4
    assert sum(counts) == 12
    with trainer(fragments_per_batch=5) as stream, feeding(stream.address, num_fragments=12):
        assert [len(stream.handed) for _ in stream] == [5, 5, 2]


def test_a_learner_connector_runs_where_the_trainer_is() -> None:
    pieces: Any = lambda *_: [GeneralAdvantageEstimation(gamma=0.9, lambda_=0.8)]  # noqa: E731
    settings: dict[str, Any] = {"fragment_length": 8, "num_fragments": 2, "seed": 0, "module": Critic()}
    with Rollout("CartPole-v1", num_envs=2, learner_connector=pieces, **settings) as rollout:
        here = list(rollout.batches())
    with trainer(learner_connector=pieces, module=Critic()) as stream:
        with running(*graph_over(Rollout("CartPole-v1", num_envs=2, **settings), stream.address)):
            there = list(stream)
    check(here, there)


@pytest.mark.slow
def test_a_learner_connector_that_nothing_would_run_is_refused() -> None:
    pieces: Any = lambda *_: [GeneralAdvantageEstimation()]  # noqa: E731
    with trainer(learner_connector=pieces, module=Critic()) as stream:
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


def test_a_loop_that_is_left_goes_on_with_the_next_one() -> None:
    with trainer(yields="fragments") as stream, feeding(stream.address, num_fragments=6):
        taken = [next(iter(stream)) for _ in range(2)]
        taken += stream
    assert sequences_of(taken) == {0: [0, 1, 2, 3, 4, 5]}


@pytest.mark.slow
def test_a_slow_trainer_holds_the_rollout_back() -> None:
    with trainer(yields="fragments", prefetch=1) as stream, feeding(stream.address, lanes=1) as feed:
        for number, _ in enumerate(stream, start=1):
            # One is at the trainer, one may be sent ahead; one waits in the sink, one before it, one to get there.
            await_that(lambda number=number: feed.sink.given == number + 1)
            assert feed.rollout.num_steps <= (number + 1 + 3) * 8 * 4
            if number == 20:
                break


def test_a_trainer_that_nobody_feeds_says_where_it_waited() -> None:
    with (
        trainer(join_timeout=0.2) as stream,
        pytest.raises(RunError, match=r"0 of 1 rollouts came within 0\.2 s: listening on tcp://127\.0\.0\.1:\d+$"),
    ):
        next(iter(stream))


@pytest.mark.wait_times(first_word_s=0.05)
def test_it_says_meanwhile_whom_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    for timeout, told in ((0.3, "0.3 s"), (None, "any time")):
        with trainer(sources=2, join_timeout=timeout) as stream, ThreadPoolExecutor() as threads:
            loop = threads.submit(list, stream)
            waits = f"0 of 2 rollouts came so far, others have {told} (join_timeout): listening on {stream.address}"
            await_that(lambda waits=waits: waits in caplog.text)
            stream.expect_no_more()
            assert isinstance(loop.exception(), RunError | None)


def test_a_loop_that_ends_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with trainer() as stream, feeding(stream.address, num_fragments=2):
        assert len(list(stream)) == 2
    assert "all rollouts have ended, and all that came of them was handed over: the loop ends" in caplog.text


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
