"""Environments in threads and in worker processes: what they are given, how they end, and what is refused."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from fragment_equality import assert_alike
from numbered_module import NumberedEnv, NumberedModule
from small_env import SmallEnv
from stalled_rollouts import stalling

from rollflow import ConnectorV2, Rollout, Timeouts
from rollflow.stream import EnvError


@pytest.mark.parametrize("where", ["threads", "processes", "rollouts"])
def test_a_reader_that_stalls_stops_the_environments(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    can_not_go_on = stalling(monkeypatch)
    makers = [partial(NumberedEnv, slot) for slot in range(4)]
    options: Any = {"lanes": 2, "fragment_length": 5, "module": NumberedModule(), "seed": 0}
    with Rollout(makers, where=where, prefetch=2, **options) as rollout:
        next(iter(rollout.fragments()))
        assert can_not_go_on.wait(60)
        assert rollout.num_steps == 3 * 4 * 5


class Wide(SmallEnv):
    """Takes actions that are not what the module's are: they are clipped on the way."""

    observation_space = gym.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def look(self) -> Any:
        return self.action[:1] * 2 if self.t else super().look()

    def pay(self, action: Any) -> float:
        assert self.action_space.contains(action), action
        return float(action[1])


@pytest.mark.parametrize("where", ["threads", "processes", "rollouts"])
def test_environments_get_the_actions_that_are_for_them(where: Any) -> None:
    options: Any = {"num_envs": 2, "lanes": 1, "seed": 1, "num_fragments": 2, "fragment_length": 10}
    made = []
    for place in ("inline", where):
        with Rollout(Wide, where=place, **options) as rollout:
            made.append(list(rollout.fragments()))
    assert_alike(*made)
    assert np.abs(made[0][0].column("actions")).max() > 1


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="where is 'here', expected 'inline', 'threads'"):
        Rollout("CartPole-v1", where="here")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers is 2, but where='threads' has none"):
        Rollout("CartPole-v1", where="threads", workers=2)
    with pytest.raises(ValueError, match="workers is 0, expected a whole number from 1 on"):
        Rollout("CartPole-v1", where="processes", workers=0)


@pytest.mark.parametrize(
    ("num_envs", "workers", "advice"), [(2, 2, "1 run; lanes=2 would use 2"), (3, 64, "1 run; lanes=3 would use 3")]
)
def test_too_many_workers_are_told(num_envs: int, workers: int, advice: str, caplog: pytest.LogCaptureFixture) -> None:
    with Rollout("CartPole-v1", num_envs=num_envs, lanes=1, where="processes", workers=workers):
        assert f"workers={workers}, but each of 1 lanes is in one worker: {advice} (" in f"{caplog.messages[0]} ("


def test_vector_environments_that_are_there_already_are_refused() -> None:
    with pytest.raises(EnvError, match="worker processes make the environments themselves"):
        Rollout(gym.make_vec("CartPole-v1", num_envs=2), where="processes")


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_what_is_not_known_of_environments_elsewhere_is_refused_with_the_reason(where: Any) -> None:
    def connector(env: Any) -> list[ConnectorV2]:
        assert env.num_envs == 1
        assert env.unwrapped.single_observation_space.shape == (4,)
        assert not hasattr(env, "render_mode")
        return env.get_attr("spec")  # type: ignore[no-any-return]

    with pytest.raises(AttributeError, match="are elsewhere, where 'get_attr' can't be asked for; known here: num"):
        Rollout("CartPole-v1", where=where, workers=1, env_to_module_connector=connector)


class Expires(NumberedEnv):
    def step(self, action: Any) -> Any:
        raise SystemExit("the licence has expired")


@pytest.mark.parametrize("where", ["inline", "threads"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_environment_that_ends_the_program_does_so(where: Any, prefetch: int) -> None:
    rollout = Rollout(
        partial(Expires, 0), where=where, prefetch=prefetch, module=NumberedModule(), timeouts=Timeouts(step=20.0)
    )
    with pytest.raises(SystemExit, match="the licence has expired"), rollout:
        next(iter(rollout.fragments()))
