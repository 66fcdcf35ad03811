"""One checkpoint of a trainer and its rollouts: all of them go on from it as if they had never stopped."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from feeding_rollouts import SHORT, fed, graph_over, rollout_of, running, trainer
from kill_runs import digest, filtered
from killed_feeds import kill_and_go_on

from rollflow import Rollout, TrainerStream, feed
from rollflow.sinks.trainer.pace_gate import PaceGate
from rollflow.sinks.trainer.sink import TrainerSink
from rollflow.stream.data.errors import CheckpointError, WireError

BATCHES, STOP = 7, 3


def cartpole(seed: int, **options: Any) -> Rollout:
    options = {"num_envs": 3, "fragment_length": 8, "env_to_module_connector": filtered, **options}
    return Rollout("CartPole-v1", seed=seed, **options)


def learnt(stream: TrainerStream, policy: Any, folder: Path | None = None) -> Iterator[str]:
    """Digests of the batches, of which the policy learns by a draw of torch's generator; it saves after some."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    stream.attach(policy=policy, optimizer=optimizer)
    stream.publish(policy.state_dict())
    for batch in stream:
        yield digest(batch)
        loss = policy.forward_train(dict(batch))["action_dist_inputs"].square().mean() * (1 + 1e-3 * torch.randn(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if folder is not None and stream.log.counted[1] % STOP == 0:
            stream.save(folder, keep=2)
        stream.publish(policy.state_dict())


@pytest.mark.parametrize("places", [("inline", "threads"), ("processes", "rollouts")], ids="-".join)
def test_a_trainer_and_its_rollouts_go_on_to_the_bit(address: str, tmp_path: Path, places: Any) -> None:
    def run(batches: int, *, resumes: bool) -> list[str]:
        stream = trainer(address, sources=2, max_lag=0, on_excess="pace")
        rollouts = [cartpole(seed, where=where, lanes=1) for seed, where in enumerate(places)]
        policy = cartpole(9).module
        with ThreadPoolExecutor() as threads, ExitStack() as left:
            left.enter_context(stream)
            if resumes:
                stream.resume(tmp_path)
            else:
                torch.manual_seed(0)
            for number, rollout in enumerate(rollouts):
                threads.submit(feed, rollout, address, name=str(number), limits=SHORT)
            told = learnt(stream, policy, None if resumes else tmp_path)
            return [*(next(told) for _ in range(batches)), repr(stream.returns.get_state())]

    whole = run(BATCHES, resumes=False)
    assert len([*tmp_path.iterdir()]) == 2
    assert run(BATCHES - 2 * STOP, resumes=True) == whole[2 * STOP :]


def test_a_rollout_that_is_started_anew_has_what_was_learnt(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer(address, yields="fragments") as stream:
        with running(*graph_over(cartpole(0), address)) as before:
            next(iter(stream))
            stream.save(tmp_path)
            steps = before.rollout.num_steps
        with running(*graph_over(cartpole(0), address)) as after:
            for _ in range(4):  # some may have come before
                next(iter(stream))
        assert after.rollout.num_steps > steps
    assert "goes on from a state before what has come of it: " in caplog.text


def test_no_two_rollouts_go_on_from_one_state(address: str, tmp_path: Path) -> None:
    with trainer(address) as stream, running(*graph_over(cartpole(0), address)):
        next(iter(stream))
        stream.save(tmp_path)
        [token] = stream.state_dict()["sources"]
    with trainer(address) as stream:
        stream.resume(tmp_path)
        with running(*graph_over(cartpole(0), address)):
            next(iter(stream))
            graph, rollout, sink = graph_over(cartpole(0), address)
            sink._session.token = bytes.fromhex(token)  # as that of one which has lived on, and comes late
            told = "another rollout goes on from the state of this one"
            with pytest.raises(WireError, match=told), running(graph, rollout, sink) as late:
                late.ended.result(30.0)
            next(iter(stream))


class Standing:
    """In place of a rollout: its lanes stand still once it has been asked twice."""

    def __init__(self, gate: PaceGate) -> None:
        self.gate, self.asked, self.was_shut = gate, 0, list[bool]()

    def stands_still(self, *of_gate: Any) -> bool:
        self.asked += 1
        return self.asked > 2

    def capture(self, standing_still: Any) -> Any:
        self.was_shut.append(self.gate.is_shut)
        return {"environments": []}, 0


@pytest.mark.anyio
async def test_a_state_for_the_next_trainer_is_read_while_lanes_stand_still(address: str) -> None:
    sink: Any = TrainerSink(address)
    sink._gate = PaceGate(sink._session, "the trainer", None, lambda: None)
    sink._drawn = rollout = Standing(sink._gate)
    async with anyio.create_task_group() as tasks:
        for cut in (1, 2):  # the first one has been asked for by a trainer that was killed
            tasks.start_soon(sink._answer, cut)
    assert rollout.was_shut == [True, True]


def test_what_can_not_be_saved_or_gone_on_from_is_refused(address: str, tmp_path: Path) -> None:
    with fed(trainer(address), rollout_of([0]), sends="batches") as (stream, _):
        next(iter(stream))
        with pytest.raises(CheckpointError, match=r"rollout .*: expected a rollout .* sends='fragments'"):
            stream.save(tmp_path)
    assert not [*tmp_path.iterdir()]
    with cartpole(0) as rollout:
        next(rollout.batches())
        rollout.save(tmp_path / "alone")
    with pytest.raises(CheckpointError, match=r"of kind 'rollflow checkpoint', expected 'rollflow trainer"):
        trainer(address).resume(tmp_path / "alone")
    with trainer(address, sources=None) as stream:
        stream.save(tmp_path / "together")
    with pytest.raises(CheckpointError, match=r"of kind 'rollflow trainer checkpoint', expected"):
        Rollout.resume(tmp_path / "together")


@pytest.mark.parametrize("kind", ["unix", "shm", "tcp"])
@pytest.mark.parametrize("options", [{"ack": "manual"}, {"max_lag": 1, "on_excess": "pace"}], ids=["manual", "pace"])
def test_nothing_is_lost_or_doubled_whoever_is_killed(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    kill_and_go_on(kind, tmp_path, 3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unix", "shm", "tcp"])
def test_nothing_is_lost_or_doubled_by_many_kills(tmp_path: Path, kind: str) -> None:
    kill_and_go_on(kind, tmp_path, 70, ack="manual", seed=7)
