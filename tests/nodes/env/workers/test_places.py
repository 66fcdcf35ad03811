"""One meaning: environments inline, in threads and in worker processes give the same fragments."""

from functools import partial
from typing import Any

import anyio
import gymnasium as gym
import numpy as np
import pytest
from drawn_rollouts import Setting, drawn_settings, fragments_of
from fragment_equality import assert_alike
from hypothesis import given, settings, strategies as st
from numbered_module import NumberedEnv, NumberedModule
from places import rollout_at
from property_examples import examples
from stalled_rollouts import stalling

from rollflow import ConnectorV2, Fragment, Rollout
from rollflow.stream import EnvError


class Sines(ConnectorV2):
    """Rewrites observations into another dtype and shape."""

    def recompute_output_observation_space(self, observation_space: Any, action_space: Any) -> Any:
        return gym.spaces.Box(-1, 1, (2, 3), np.float32)

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in episodes:
            at = episode.get_observations(-1)
            at = at["at"] if isinstance(at, dict) else at
            episode.set_observations(new_data=np.sin([at, 2 * at]).astype(np.float32), at_indices=-1)
        return batch


class Flat(NumberedModule):
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return super()._forward({"obs": batch["obs"].reshape(len(batch["obs"]), -1)[:, :3]})


def check_alike(drawn: Setting, where: Any, *, rewrites: bool, **options: Any) -> None:
    """Check that a place gives the fragments that are given inline."""
    acting = {"module": Flat() if rewrites else NumberedModule(), "lanes": drawn.lanes}
    acting["env_to_module_connector"] = (lambda env: Sines()) if rewrites else None
    there = fragments_of(None, drawn, where=where, **acting, **options)
    assert_alike(there, fragments_of(None, drawn._replace(prefetch=0), **acting))


@given(drawn=drawn_settings, rewrites=st.booleans())
@settings(max_examples=examples(20))
def test_threads_give_the_same_fragments(drawn: Setting, rewrites: bool) -> None:
    check_alike(drawn, "threads", rewrites=rewrites)


@pytest.mark.parametrize(("where", "count"), [("processes", 10), pytest.param("rollouts", 8, marks=pytest.mark.slow)])
def test_workers_give_the_same_fragments(where: str, count: int) -> None:
    @given(drawn=drawn_settings, rewrites=st.booleans(), workers=st.integers(1, 2))
    @settings(max_examples=examples(count))
    def holds(drawn: Setting, rewrites: bool, workers: int) -> None:
        check_alike(drawn, where, rewrites=rewrites, workers=workers)

    holds()


@pytest.mark.parametrize(
    ("place", "backend"),
    [
        ("threads", "asyncio"),
        ("processes", "asyncio"),
        ("rollouts", "trio"),
        ("hosted rollouts", "asyncio"),
        ("hosted rollouts", "trio"),
    ],
)
def test_the_same_comes_out_of_an_event_loop(place: str, backend: str) -> None:
    options: Any = {"fragment_length": 16, "num_fragments": 3, "seed": 5}
    envs = {"lanes": 2, "num_envs": 4}

    async def gathered(made: Rollout) -> list[Fragment]:
        async with made as rollout:
            return [fragment async for fragment in rollout.fragments()]

    def key(fragment: Fragment) -> tuple[int, int]:
        return fragment.lane, fragment.sequence

    with rollout_at(place, "CartPole-v1", envs=envs, **options) as made:
        fragments = anyio.run(gathered, made, backend=backend)
    with Rollout("CartPole-v1", **envs, **options) as inline:
        assert_alike(sorted(fragments, key=key), sorted(inline.fragments(), key=key))
    assert len(fragments) == 6


@pytest.mark.parametrize("where", ["threads", "processes", "rollouts"])
def test_a_reader_that_stalls_stops_the_environments(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    can_not_go_on = stalling(monkeypatch)
    makers = [partial(NumberedEnv, slot) for slot in range(4)]
    options: Any = {"lanes": 2, "fragment_length": 5, "module": NumberedModule(), "seed": 0}
    with Rollout(makers, where=where, prefetch=2, **options) as rollout:
        next(iter(rollout.fragments()))
        assert can_not_go_on.wait(60)
        assert rollout.num_steps == 3 * 4 * 5


class Wide(gym.Env[Any, Any]):
    """Takes actions that are not what the module's are: they are clipped on the way."""

    observation_space = gym.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return action[:1] * 2, float(action[1]), False, False, {}


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
    rollout = Rollout(partial(Expires, 0), where=where, prefetch=prefetch, module=NumberedModule(), step_timeout=20.0)
    with pytest.raises(SystemExit, match="the licence has expired"), rollout:
        next(iter(rollout.fragments()))
