"""Faults of rollouts that flow: the log names them, once, and says nothing of what is in order."""

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doctor_clock import Looking
from numbered_module import NumberedEnv, NumberedModule, WideModule

from rollflow import Rollout, Watch
from rollflow.nodes.rollout.rollout import TrainingCheck
from rollflow.nodes.stages.rounds import LagBound


def batches_while(train: Any) -> list[str]:
    """What is said while twelve batches are trained on."""
    texts: list[str] = []
    options: Any = {"fragment_length": 4, "num_fragments": 12, "seed": 0, "watch": Watch(stall_after=None)}
    with Rollout(lambda: NumberedEnv(0), module=WideModule(2), **options) as rollout:
        looking = Looking(rollout._doctor)
        for _ in rollout.batches():
            train(rollout)
            texts += looking.for_s(1.0)
        assert len(looking.watch.diagnose().notes) == len(texts)
    return texts


def change(rollout: Rollout) -> None:
    with torch.no_grad():
        rollout.module.more += 1.0


def change_and_publish(rollout: Rollout) -> None:
    change(rollout)
    rollout.publish(rollout.module.state_dict())


def test_a_module_that_is_trained_and_never_published_is_named_once() -> None:
    [text] = batches_while(change)
    assert text.startswith("rollout.module was changed while 1")
    assert text.endswith("acts with those it began with; rollout.publish(rollout.module.state_dict())")


@pytest.mark.parametrize("train", [change_and_publish, lambda rollout: None], ids=["published", "not trained"])
def test_a_module_that_is_published_or_not_trained_is_in_order(train: Any) -> None:
    assert batches_while(train) == []


def test_a_module_without_parameters_is_never_named() -> None:
    none: Any = SimpleNamespace(returns=deque(), count=0)
    assert not list(TrainingCheck(object(), none).signs(0, 0, 1000))


@pytest.mark.parametrize(
    ("dropped", "steps", "handed", "is_named"),
    [(10, 900, 100, True), (9, 900, 0, False), (10, 899, 101, False), (0, 0, 0, False)],
)
def test_fragments_that_are_nearly_all_too_old_are_named(dropped: int, steps: int, handed: int, is_named: bool) -> None:
    lag = LagBound(lambda: {}, 1)
    lag.dropped_fragments, lag.dropped_steps = dropped, steps
    signs = lag.signs(handed)
    assert bool(signs) == is_named
    if is_named:
        assert signs[0].text.startswith("90% of 1,000 transitions were left out as too old: max_lag=1 with")


@pytest.mark.parametrize(
    ("first", "later", "named_at"),
    [([7.5], [7.5] * 99, 10), ([7.5, 8.0], [8.0] * 100, None), ([], [], None), ([1.0] * 99, [], None)],
    ids=["one return", "learnt to have one", "none", "too few"],
)
def test_returns_that_never_change_are_named(first: list[float], later: list[float], named_at: int | None) -> None:
    returns: Any = SimpleNamespace(returns=deque(first, maxlen=100), count=len(first))
    check = TrainingCheck(object(), returns)
    assert not list(check.signs(0, 0, 0))
    returns.returns.extend(later)
    returns.count += len(later) and 250
    told = [list(check.signs(version, version, 0)) for version in range(50)]
    assert [bool(signs) for signs in told] == [named_at is not None and version >= named_at for version in range(50)]
    if named_at is not None:
        [sign] = told[named_at]
        assert sign.text.startswith("the returns of all 251 episodes are 7.5, through 10 published versions")
        returns.returns.append(8.0)
        assert not list(check.signs(50, 50, 0))


@pytest.mark.parametrize("where", ["inline", "threads", "processes"])
def test_all_lanes_of_a_run_are_at_work(where: Any) -> None:
    envs = [partial(NumberedEnv, number) for number in range(3)]
    options: Any = {"fragment_length": 4, "num_fragments": 2, "seed": 0, "watch": Watch(stall_after=None)}
    with Rollout(envs, module=NumberedModule(), where=where, lanes=3, **options) as rollout:
        assert len(list(rollout.batches())) == 2
        assert rollout.environments.lanes_at_work == {0, 1, 2}
