"""Environments with several agents in threads and in worker processes: what is shown, what raises, what is refused."""

import threading
from functools import partial
from typing import Any

import pytest
from counted_agents import Counted
from drawn_agents import Drawn, made, makers_of
from leftovers import processes_of
from numbered_agents import NumberedAgents
from serial_module import SerialModule

from rollflow import MultiAgentRollout
from rollflow.nodes import RandomModule
from rollflow.stream import EnvError

PLACES: list[Any] = ["threads", *(pytest.param(each, marks=pytest.mark.slow) for each in ("processes", "rollouts"))]


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"where": "threads"}, "a thread each"),
        ({"where": "processes", "workers": 1}, "in 1 worker process"),
        ({"where": "rollouts", "workers": 1}, "each with connectors and a copy of the module, in 1 worker process"),
    ],
)
def test_explain_says_what_is_where(options: Any, place: str) -> None:
    drawn = Drawn(3, 2, 4, 0, 6, False, 7, 2, True, 5)
    _, rollout = made(drawn, env=makers_of(drawn), **options)
    with rollout:
        assert f"2 lanes × 1 or 2 environments × 4 agents, {place}," in rollout.explain()


def test_threads_have_a_lane_for_every_environment_unless_it_is_said() -> None:
    drawn = Drawn(3, 1, 2, 0, 6, False, 7, 2, True, 5)
    for lanes, made_lanes in ((None, 3), (2, 2)):
        rollout = made(drawn, env=makers_of(drawn), where="threads", lanes=lanes)[1]
        assert rollout.environments.num_lanes == made_lanes
        rollout.close()
    rollout = MultiAgentRollout(Counted(0), where="threads", module=RandomModule)
    assert rollout.environments.num_lanes == 1
    rollout.close()


class Breaks(NumberedAgents):
    """Breaks in its third step, or in its second reset."""

    def __init__(self, slot: int, at: str, **options: Any) -> None:
        super().__init__(slot, **options)
        self.at, self.steps = at, 0

    def step(self, actions: Any) -> Any:
        self.steps += 1
        if self.at == "step" and self.slot == 1 and self.steps == 3:
            raise ZeroDivisionError("it broke")
        return super().step(actions)

    def reset(self, **options: Any) -> Any:
        if (self.at == "reset" and self.slot == 1 and self.episode == 0) or (
            self.at == "first reset" and self.slot == 0
        ):
            raise ZeroDivisionError("it broke")
        return super().reset(**options)


@pytest.mark.parametrize(
    ("at", "notes"),
    [
        ("step", ["environment 1, env step 2", "lane 1, vector step 2"]),
        ("reset", ["environment 1, reset", "lane 1, vector step 2"]),
        ("first reset", ["environment 0, reset", "lane 0, the first reset"]),
    ],
)
@pytest.mark.parametrize("where", ["inline", "threads"])
def test_an_environment_that_raises_says_where(where: Any, at: str, notes: list[str]) -> None:
    before = set(threading.enumerate())
    makers = [partial(Breaks, slot, at, nested=0, length=3, at_once=True) for slot in range(2)]
    rollout = MultiAgentRollout(makers, lanes=2, where=where, module=SerialModule(), fragment_length=8, seed=0)
    with pytest.raises(ZeroDivisionError, match="it broke") as caught, rollout:
        list(rollout.fragments())
    assert caught.value.__notes__[:2] == notes
    assert rollout.lost.get("failed", 0) == rollout.num_steps + rollout.environments.unrecorded_steps
    assert set(threading.enumerate()) <= before


def test_what_can_not_be_worked_with_is_refused() -> None:
    lock, told = threading.Lock(), "the environments of lane 0 can't be handed to a worker process: cannot pickle"
    for where in ("processes", "rollouts"):
        options: dict[str, Any] = {"where": where}
        with pytest.raises(EnvError, match="worker processes make the environments themselves"):
            MultiAgentRollout(Counted(0), **options)
        with pytest.raises(EnvError, match="expected a callable that makes an environment"):
            MultiAgentRollout(NumberedAgents(0), **options)
        with pytest.raises(EnvError, match=told):
            MultiAgentRollout(lambda: (lock, NumberedAgents(0))[1], **options)


@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
def test_environments_of_different_lanes_have_the_same_agents(where: Any) -> None:
    before = processes_of()
    makers = [partial(NumberedAgents, slot, agents=2 + slot) for slot in range(2)]
    with pytest.raises(EnvError, match=r"environment 1: its agents are .*, expected those of environment 0"):
        MultiAgentRollout(makers, where=where, lanes=2)
    assert processes_of() <= before
