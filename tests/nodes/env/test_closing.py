"""Environments are closed when a rollout can't be made, and all of them, also where one raises in doing so."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import SyncVectorEnv
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv

from rollflow import MultiAgentRollout, Rollout
from rollflow.nodes import EnvHost, PrevActionsPrevRewards, RandomModule, RolloutHost
from rollflow.nodes.env.environments import kind_of
from rollflow.stream.data.errors import EnvError


class Stuck:
    """Mixed into an environment: can't be closed."""

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        raise OSError(f"environment {self.slot} is stuck")  # type: ignore[attr-defined]


class StuckEnv(Stuck, NumberedEnv):
    pass


class StuckAgents(Stuck, NumberedAgents):
    pass


def of_one(*stuck: int, count: int = 4) -> tuple[list[Any], list[Any]]:
    return handed_out([(StuckEnv if slot in stuck else NumberedEnv)(slot) for slot in range(count)])


def of_several(*stuck: int, count: int = 4) -> tuple[list[Any], list[Any]]:
    return handed_out([(StuckAgents if slot in stuck else NumberedAgents)(slot, nested=0) for slot in range(count)])


def handed_out(envs: list[Any]) -> tuple[list[Any], list[Any]]:
    return envs, [lambda env=env: env for env in envs]  # type: ignore[misc]


ROLLOUTS: Any = [(Rollout, of_one), (MultiAgentRollout, of_several)]
HOSTS: Any = [(EnvHost, of_one), (EnvHost, of_several), (RolloutHost, of_one)]
KINDS = pytest.mark.parametrize(("kind", "made"), ROLLOUTS)


def failing(*args: Any) -> Any:
    raise ZeroDivisionError("on purpose")


@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {"module": object()},
        {"module": failing},
        {"env_to_module_connector": PrevActionsPrevRewards()},
        {"env_to_module_connector": failing},
        {"lanes": 2, "module_to_env_connector": failing},
    ],
)
def test_a_rollout_that_can_not_be_made_closes_its_environments(kind: Any, made: Any, options: Any) -> None:
    """What closing raises does not hide why it could not be made."""
    envs, makers = made(1)
    with pytest.raises((ValueError, ZeroDivisionError)) as caught:
        kind(makers, **{"module": RandomModule, "seed": 0, **options})
    assert any("OSError: environment 1 is stuck" in note for note in caught.value.__notes__)
    assert all(env.closed for env in envs)


@KINDS
def test_an_argument_that_is_refused_makes_no_environment(kind: Any, made: Any) -> None:
    envs: list[Any] = []
    with pytest.raises(ValueError, match="on_excess is 'wait'"):
        kind([lambda: envs.append(made()[1][0]())], module=RandomModule, seed=0, on_excess="wait")
    assert envs == []


@pytest.mark.parametrize(("kind", "made"), [*ROLLOUTS, *HOSTS])
def test_environments_made_before_one_that_can_not_be_made_are_closed(kind: Any, made: Any) -> None:
    for lanes in (1, 2, 4):
        envs, makers = made()
        with pytest.raises(EnvError, match=r"expected to make a .*Env, raised ZeroDivisionError"):
            kind([*makers[:3], failing], lanes=lanes)
        assert [env.closed for env in envs] == [True, True, True, False]


@pytest.mark.parametrize("made", [of_one, of_several])
@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("is_used", [False, True])
def test_the_first_environment_which_tells_the_kind_is_closed_unless_it_is_used(
    made: Any, is_listed: bool, is_used: bool
) -> None:
    envs, makers = made(count=1)
    with kind_of(makers if is_listed else makers[0]) as (kind, given):
        assert kind.has_several is (made is of_several)
        if is_used:
            assert (given[0] if is_listed else given)() is envs[0]
        assert not envs[0].closed
    assert envs[0].closed is not is_used


@KINDS
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_all_environments_are_closed_where_some_raise(kind: Any, made: Any, lanes: int) -> None:
    envs, makers = made(1, 2)
    with pytest.raises(OSError, match="environment 1 is stuck") as caught:
        with kind(makers, lanes=lanes, module=RandomModule, fragment_length=2, seed=0) as rollout:
            next(iter(rollout.fragments()))
    assert all(env.closed for env in envs)
    assert any("environment 2 is stuck" in note for note in caught.value.__notes__)
    rollout.environments.close()  # nothing is closed twice


class Leaves(NumberedEnv):
    """Leaves a file when it is closed; that of slot 0 can't be closed."""

    def __init__(self, slot: int, folder: Path) -> None:
        super().__init__(slot)
        self.folder = folder

    def close(self) -> None:
        (self.folder / str(self.slot)).touch()
        if self.slot == 0:
            raise OSError("no space left for the recording")


class LeavingAgents(NumberedAgents):
    def __init__(self, slot: int, folder: Path) -> None:
        super().__init__(slot, nested=0)
        self.folder = folder

    close = Leaves.close


@pytest.mark.parametrize(("kind", "env"), [(Rollout, Leaves), (MultiAgentRollout, LeavingAgents)])
@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
def test_an_environment_that_can_not_be_closed_is_told_of_in_every_place(
    kind: Any, env: Any, where: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    makers = [partial(env, slot, tmp_path) for slot in range(4)]
    options: Any = {"lanes": 2, "where": where, "module": RandomModule, "fragment_length": 2, "seed": 0}
    is_in_workers = where in ("processes", "rollouts")
    if is_in_workers:
        options["workers"] = 1
    with nullcontext() if is_in_workers else pytest.raises(OSError, match="no space left") as caught:
        with kind(makers, **options) as rollout:
            next(iter(rollout.fragments()))
    if is_in_workers:  # which log it
        assert "environments can't be closed: OSError: no space left for the recording" in capfd.readouterr().err
    else:
        assert any("lane 0" in note for note in caught.value.__notes__)
    assert {each.name for each in tmp_path.iterdir()} == {"0", "1", "2", "3"}


HOSTED = [(host, env) for host in (EnvHost, RolloutHost) for env in (Leaves, LeavingAgents)]


@pytest.mark.parametrize(("kind", "env"), [(Rollout, Leaves), (MultiAgentRollout, LeavingAgents), *HOSTED])
def test_what_closing_raises_is_raised_or_noted_on_what_ended_the_block(kind: Any, env: Any, tmp_path: Path) -> None:
    makers = [partial(env, slot, tmp_path) for slot in range(4)]
    with pytest.raises(OSError, match="no space left for the recording"), kind(makers, lanes=2):
        pass
    assert {each.name for each in tmp_path.iterdir()} == {"0", "1", "2", "3"}
    with pytest.raises(ZeroDivisionError) as caught, kind(makers, lanes=2):
        failing()
    assert any("no space left for the recording" in note for note in caught.value.__notes__)


@KINDS
def test_environments_are_closed_where_the_rollout_can_not_be_entered(kind: Any, made: Any) -> None:
    envs, makers = made()
    rollout = kind(makers, module=RandomModule, lookback=0, seed=0)
    (rollout.env_to_module if kind is Rollout else rollout.env_to_module[0]).prepend(PrevActionsPrevRewards())
    with pytest.raises(ValueError, match="lookback is 0, expected at least 1"), rollout:
        pass
    assert all(env.closed for env in envs)


def test_environments_of_spaces_without_columns_are_closed() -> None:
    class Told(NumberedEnv):
        observation_space = gym.spaces.Text(3)  # type: ignore[assignment]

    envs, makers = handed_out([Told(0), Told(1)])
    for env in envs:
        env.observation_space = Told.observation_space
    with pytest.raises(ValueError, match="has no columns"):
        Rollout(makers, module=RandomModule)
    assert all(env.closed for env in envs)


def test_vector_environments_that_are_given_are_left_open() -> None:
    envs, makers = of_one(count=2)
    given = SyncVectorEnv(makers)  # would close them when it is collected
    with pytest.raises(ZeroDivisionError):
        Rollout(given, module=failing)
    assert not any(env.closed for env in envs)
