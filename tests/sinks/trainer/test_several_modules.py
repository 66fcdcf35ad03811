"""Rollouts of several agents that feed a trainer: batches by module there, weights by module back."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_agents import Drawn, made
from feeding import SHORT, trainer
from numbered import NumberedEnv, NumberedModule

from rollflow.nodes import MultiAgentRollout, Rollout
from rollflow.sinks import TrainerProcess, TrainerSink, TrainerStream, feed
from rollflow.stream.errors import ModuleError, WireError
from rollflow.stream.testing import check

DRAWN = Drawn(3, 1, 4, 1, 9, False, 8, 1, True, 11)


def batches_here(drawn: Drawn, count: int) -> list[Any]:
    """What a loop over the same rollout gets."""
    _, rollout = made(drawn, num_fragments=count)
    with rollout:
        return [{each: dict(batch) for each, batch in batches.items()} for batches in rollout.batches()]


@contextmanager
def fed(
    stream: TrainerStream, drawn: Drawn = DRAWN, **options: Any
) -> Iterator[tuple[TrainerStream, MultiAgentRollout, "Future[Any]"]]:
    """The stream, and a rollout that feeds it from another thread."""
    _, rollout = made(drawn, **options)
    failed: BaseException | None = None
    with ThreadPoolExecutor() as threads:
        with stream:
            feeding = threads.submit(feed, rollout, str(stream.address), limits=SHORT)
            try:
                yield stream, rollout, feeding
            except BaseException as error:  # the stream says goodbye all the same, or the rollout would wait for it
                failed = error
        feeding.result()
    if failed is not None:
        raise failed


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_batches_by_module_come_as_they_were_made(scheme: str, tmp_path: Path) -> None:
    expected = batches_here(DRAWN, 12)
    stream = trainer() if scheme == "tcp" else TrainerStream(f"shm:{tmp_path}/t", limits=SHORT, join_timeout=60.0)
    with fed(stream, num_fragments=12) as (stream, _, _):
        came = [{each: dict(batch) for each, batch in batches.items()} for batches in stream]
    check(came, expected)
    assert {each for batches in came for each in batches} == {"nested 0", "nested 1", "plain 0", "plain 1"}


def test_several_lanes_make_one_batch() -> None:
    drawn = DRAWN._replace(lanes=3, at_once=True)
    with fed(trainer(), drawn, num_fragments=4) as (stream, rollout, _):
        rows = [sum(len(batch["rewards"]) for batch in batches.values()) for batches in stream]
    assert sum(rows) == rollout.num_steps
    assert len(rows) == 4


def test_batches_that_go_together_are_joined_module_by_module() -> None:
    expected = batches_here(DRAWN, 6)
    with fed(trainer(fragments_per_batch=2), num_fragments=6) as (stream, _, _):
        came = list(stream)
    for number, batches in enumerate(came):
        pair = expected[2 * number : 2 * number + 2]
        assert set(batches) == {each for part in pair for each in part}
        for each, batch in batches.items():
            parts = [part[each]["rewards"] for part in pair if each in part]
            assert torch.equal(batch["rewards"], torch.cat(parts))


def test_weights_of_all_modules_come_back_under_one_version() -> None:
    with fed(trainer(prefetch=0, max_lag=0, on_excess="mask")) as (stream, rollout, _):
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
    with fed(trainer()) as (stream, _, _):
        next(iter(stream))
        with pytest.raises(ModuleError, match=r"missing \['nested 1/weight', 'plain 0/weight', 'plain 1/weight'\]"):
            stream.publish({"nested 0": {"weight": torch.zeros(())}})


def test_modules_that_are_not_trained_have_no_part_in_it() -> None:
    with fed(trainer(), modules_to_train=["plain 0"]) as (stream, rollout, _):
        batches = next(iter(stream))
        assert list(batches) == ["plain 0"]
        stream.publish({"plain 0": {"weight": torch.ones(())}})
        while rollout.policy_versions["plain 0"] == 0:
            next(iter(stream))
    assert rollout.policy_versions == {"nested 0": 0, "nested 1": 0, "plain 0": 1, "plain 1": 0}


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    _, rollout = made(DRAWN)
    with pytest.raises(ValueError, match="fragments of several agents can't be sent to a trainer, expected sends='b"):
        TrainerSink(f"unix:{tmp_path}/t", rollout)
    rollout.environments.close()


def test_one_agent_s_rollout_is_not_mixed_with_several_agents() -> None:
    one = Rollout([partial(NumberedEnv, 0)], module=NumberedModule(), fragment_length=8, seed=0)
    with fed(trainer()) as (stream, _, _), ThreadPoolExecutor() as threads:
        next(iter(stream))
        with pytest.raises(WireError, match=r"spaces or weights are not those of rollout .* expected the same"):
            threads.submit(feed, one, str(stream.address), limits=SHORT).result()


def train(stream: TrainerStream, modules: Any) -> list[int]:
    """In a process of its own: how many rows each of three rounds had."""
    rows = []
    for batches in stream:
        rows.append(sum(len(batch["rewards"]) for batch in batches.values()))
        stream.publish({each: module.state_dict() for each, module in modules.items()})
        if len(rows) == 3:
            return rows
    return rows


@pytest.mark.slow
def test_a_trainer_may_be_a_child() -> None:
    _, rollout = made(DRAWN)
    with TrainerProcess(train, rollout.module) as child:
        assert feed(rollout, child.address, watch=child.watch) == "the trainer has ended"
    assert len(child.result) == 3
    assert len(set(rollout.policy_versions.values())) == 1
