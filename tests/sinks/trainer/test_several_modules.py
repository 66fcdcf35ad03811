"""Rollouts of several agents that feed a trainer: batches by module there, weights by module back."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import feeding_rollouts
import pytest
import torch
from drawn_agents import Drawn, envs_of, made, modules_of
from feeding_rollouts import SHORT, trainer
from numbered_module import NumberedEnv, NumberedModule
from serial_module import SerialModule

from rollflow import DefaultModelConfig, MultiAgentRollout, Rollout, TrainerStream, feed
from rollflow.nodes import RandomModule
from rollflow.sinks import TrainerSink
from rollflow.sinks.trainer.messages import joined_weights, parted_weights
from rollflow.stream.data.errors import ModuleError, RunError, WireError
from rollflow.stream.testing import check

DRAWN = Drawn(3, 1, 4, 1, 9, False, 8, 1, True, 11)
# Where train batches are made: at the rollout, or at the trainer of fragments.
SENDS = pytest.mark.parametrize("sends", ["batches", "fragments"])


def batches_here(drawn: Drawn, count: int) -> list[Any]:
    """Return the batches of a loop over the same rollout."""
    _, rollout = made(drawn, num_fragments=count)
    with rollout:
        return [{each: dict(batch) for each, batch in batches.items()} for batches in rollout.batches()]


@contextmanager
def fed(
    stream: TrainerStream, drawn: Drawn = DRAWN, sends: str = "batches", **options: Any
) -> Iterator[tuple[TrainerStream, MultiAgentRollout, "Future[Any]"]]:
    """The stream, and a rollout that feeds it from another thread."""
    _, rollout = made(drawn, **options)
    with feeding_rollouts.fed(stream, rollout, sends=sends) as fed:
        yield stream, rollout, fed


@pytest.mark.slow
@SENDS
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_batches_by_module_come_as_they_were_made(scheme: str, sends: str, tmp_path: Path) -> None:
    expected = batches_here(DRAWN, 12)
    stream = trainer() if scheme == "tcp" else TrainerStream(f"shm:{tmp_path}/t", limits=SHORT, join_timeout=60.0)
    with fed(stream, sends=sends, num_fragments=12) as (stream, _, _):
        came = [{each: dict(batch) for each, batch in batches.items()} for batches in stream]
    check(came, expected)
    assert {each for batches in came for each in batches} == {"nested 0", "nested 1", "plain 0", "plain 1"}


@SENDS
def test_several_lanes_make_one_batch(sends: str) -> None:
    drawn = DRAWN._replace(lanes=3, at_once=True)
    with fed(trainer(), drawn, sends, num_fragments=4) as (stream, rollout, _):
        rows = [sum(len(batch["rewards"]) for batch in batches.values()) for batches in stream]
    assert sum(rows) == rollout.num_steps
    assert len(rows) == 4


@SENDS
def test_weights_of_all_modules_come_back_under_one_version(sends: str) -> None:
    with fed(trainer(prefetch=0, max_lag=0, on_excess="mask"), sends=sends) as (stream, rollout, _):
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


@SENDS
def test_modules_that_are_not_trained_have_no_part_in_it(sends: str) -> None:
    with fed(trainer(), sends=sends, modules_to_train=["plain 0"]) as (stream, rollout, _):
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
    with fed(stream, DRAWN._replace(at_once=True), sends, module=modules) as (stream, rollout, _):
        for number, batches in enumerate(stream):
            weights = {each: {"weight": torch.tensor(float(number))} for each in rollout.module if each != "plain 1"}
            stream.publish(weights)
            assert stream.handed[0].num_steps == sum(len(batch["rewards"]) for batch in batches.values())
            if number == 19:
                break
        assert stream.lost == {}
    assert rollout.policy_versions["plain 1"] == 0


@SENDS
def test_weights_that_are_there_before_the_rollout_are_those_that_it_begins_with(sends: str) -> None:
    with trainer() as stream:
        stream.publish({each: {"weight": torch.tensor(1.0)} for each in modules_of(DRAWN)})
        _, rollout = made(DRAWN, num_fragments=3)
        with ThreadPoolExecutor() as threads:
            feeding = threads.submit(feed, rollout, str(stream.address), limits=SHORT, sends=sends)
            versions = {int(v) for batches in stream for batch in batches.values() for v in batch["policy_version"]}
            feeding.result()
    assert versions == {1}


@SENDS
def test_padding_has_no_age(sends: str) -> None:
    config = DefaultModelConfig(use_lstm=True, lstm_cell_size=4, max_seq_len=5)
    _, makers = envs_of(DRAWN._replace(nested=0))
    rollout = MultiAgentRollout(makers, model_config=config, fragment_length=8, seed=0)
    module = rollout.module if sends == "fragments" else None  # whose states the pieces at the trainer ask for
    with ThreadPoolExecutor() as threads, trainer(prefetch=0, module=module) as stream:
        feeding = threads.submit(feed, rollout, str(stream.address), limits=SHORT, sends=sends)
        for number, batches in enumerate(stream):
            batch = batches["default_policy"]
            assert not batch["loss_mask"].all()
            oldest = int(batch["policy_version"][batch["loss_mask"]].min())
            assert stream.handed[0].lag == stream.version - oldest
            assert stream.handed[0].num_steps == int(batch["loss_mask"].sum())
            stream.publish({"default_policy": rollout.module["default_policy"].state_dict()})
            if number == 4:
                break
    feeding.result()


def test_modules_that_are_trained_elsewhere_stay_and_others_may_come_and_go() -> None:
    _, rollout = made(DRAWN, modules_to_train=["plain 0"])
    TrainerSink("unix:/nowhere", rollout, sends="batches").close()
    rollout.add_module("more", SerialModule())
    rollout.remove_module("more")
    with pytest.raises(ModuleError, match=r"a trainer elsewhere publishes the weights of .* expected modules_to_train"):
        rollout.remove_module("plain 0")
    rollout.environments.close()
    _, all_trained = made(DRAWN)
    TrainerSink("unix:/nowhere", all_trained, sends="batches").close()
    with pytest.raises(ModuleError, match=r"a trainer elsewhere publishes the weights of .* expected modules_to_train"):
        all_trained.add_module("more", SerialModule())
    all_trained.environments.close()


def test_module_ids_that_are_no_strings_are_refused() -> None:
    _, makers = envs_of(DRAWN._replace(nested=0))
    agents = {f"agent {number}": 7 for number in range(DRAWN.agents)}
    rollout = MultiAgentRollout(makers, module={7: SerialModule()}, agent_to_module_mapping_fn=agents)
    with pytest.raises(ModuleError, match=r"module ids are \[7\], expected strings"):
        TrainerSink("unix:/nowhere", rollout, sends="batches")
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
    with fed(stream, drawn, "fragments", num_fragments=6) as (stream, rollout, _):
        weights = {each: {"weight": torch.tensor(1.0)} for each in rollout.module}
        steps = []
        for fragment in stream:
            [item] = stream.handed
            assert (item.lane, item.sequence, item.lag) == (fragment.lane, fragment.sequence, 0)
            assert set(fragment.policy_versions().values()) == {stream.version}
            steps.append(item.num_steps)
            stream.publish(weights)
        returns = stream.returns
    assert sum(steps) == rollout.num_steps
    with made(drawn, num_fragments=6)[1] as again:
        for _ in again.batches():
            pass
    assert (returns.count, sorted(returns.returns)) == (again.returns.count, sorted(again.returns.returns))
    assert {each: own.count for each, own in returns.by_module.items()} == {
        each: own.count for each, own in again.returns.by_module.items()
    }


LONELY = Drawn(1, 1, 2, 1, 9, False, 1, 1, True, 3)  # fragments of one step, in some of which both agents wait


@pytest.mark.slow
@pytest.mark.parametrize("pace", [{}, {"max_lag": 0, "on_excess": "pace"}], ids=["any age", "pace"])
def test_fragments_in_which_all_agents_wait_hold_nobody_up(pace: dict[str, Any]) -> None:
    steps = came = 0
    with fed(trainer(prefetch=0, **pace), LONELY, "fragments", num_fragments=120) as (stream, rollout, _):
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
    with trainer(yields="fragments", join_timeout=5.0) as stream, ThreadPoolExecutor() as threads:
        feeding = threads.submit(feed, rollout, str(stream.address), limits=SHORT, sends="fragments")
        with pytest.raises(RunError, match="module ids are"):
            next(iter(stream))
        with pytest.raises(
            ModuleError, match=r"module ids are \[.*\], expected strings where fragments go to another process"
        ):
            feeding.result()


def test_one_agent_s_rollout_is_not_mixed_with_several_agents() -> None:
    one = Rollout([partial(NumberedEnv, 0)], module=NumberedModule(), fragment_length=8, seed=0)
    with fed(trainer()) as (stream, _, _), ThreadPoolExecutor() as threads:
        next(iter(stream))
        with pytest.raises(WireError, match=r"is_by_module is False, expected True, as rollout .* has, which is here"):
            threads.submit(feed, one, str(stream.address), limits=SHORT).result()
