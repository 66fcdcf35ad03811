"""Environments of our own making, stepped one after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numbered_module import NumberedEnv, NumberedModule, numbered_envs
from sloppy_envs import Zeros, fragments_of
from small_env import SmallEnv

from rollflow import Rollout
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.env.environments import Environments
from rollflow.nodes.modules.policy_weights import PolicyWeights
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.nodes.stages.module_forward import ModuleForward
from rollflow.nodes.stages.module_to_env import ModuleToEnv
from rollflow.nodes.stages.ring import ring_of
from rollflow.stream import EnvError
from rollflow.stream.graph.inline_run import InlineRun
from rollflow.stream.testing import check


class Scripted(SmallEnv):
    """Three steps an episode; always gives the same array and the same info, which it writes over."""

    observation_space: gym.Space[Any] = spaces.Box(-100, 100, (2,), np.float32)
    length = 3

    def __init__(self) -> None:
        self.observation, self.info, self.episode = np.zeros(2, np.float32), {"tags": ["none"]}, 0

    def look(self) -> Any:
        self.episode += self.t == 0
        self.observation[:] = self.episode, self.t
        return self.observation

    def pay(self, action: Any) -> float:
        return 1.0

    def tell(self) -> dict[str, Any]:
        self.info["tags"] = [f"{self.episode}/{self.t}"]
        return self.info


def test_what_an_environment_writes_over_is_kept() -> None:
    fragments = fragments_of(Scripted, fragment_length=5, num_fragments=2)
    chunks = [chunk for fragment in fragments for chunk in fragment.episodes()]
    shown = [[tuple(map(int, row)) for row in chunk.get_observations(slice(None))] for chunk in chunks]
    assert shown == [
        [(1, 0), (1, 1), (1, 2), (1, 3)],
        [(2, 0), (2, 1), (2, 2)],
        [(2, 2), (2, 3)],
        [(3, 0), (3, 1), (3, 2), (3, 3)],
        [(4, 0), (4, 1)],
    ]
    for chunk, rows in zip(chunks, shown, strict=True):
        assert [info["tags"] for info in chunk.get_infos(slice(None))] == [[f"{e}/{t}"] for e, t in rows]


def check_as_by_gymnasium(makers: Callable[[], Any], where: str, **options: Any) -> int:
    """Check that environments give the same chunks as in gymnasium's own vector environment; how many there are."""
    by_gymnasium = SyncVectorEnv(makers(), autoreset_mode=AutoresetMode.SAME_STEP)
    made = [
        [{**chunk.get_state(), "duration_s": 0} for fragment in fragments for chunk in fragment.episodes()]
        for fragments in (fragments_of(makers(), where=where, **options), fragments_of(by_gymnasium, **options))
    ]
    check(*made)
    return len(made[0])


@pytest.mark.parametrize("nested", [False, True])
def test_the_same_comes_out_as_by_gymnasiums_own_stepping(nested: bool) -> None:
    made = lambda: numbered_envs(3, nested=nested)[1]  # noqa: E731
    options: Any = {"module": NumberedModule(), "fragment_length": 5, "num_fragments": 4}
    assert check_as_by_gymnasium(made, "inline", **options) > 12


class Altered(Scripted):
    """One of its methods does something else."""

    def __init__(self, method: str, does: Any) -> None:
        super().__init__()
        setattr(self, method, does)


@pytest.mark.parametrize(("method", "when"), [("step", "vector step 0"), ("reset", "the first reset")])
def test_an_error_in_an_environment_says_where(method: str, when: str) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        fragments_of([Scripted, Scripted, lambda: Altered(method, lambda *args, **options: 1 / 0)])
    assert raised.value.__notes__[:2] == ["slot 2", f"lane 0, {when}"]


def test_an_environment_that_can_not_be_made_says_where() -> None:
    told = r"the callable for slot 1, expected to make a gymnasium\.Env, raised ZeroDivisionError: division by zero"
    with pytest.raises(EnvError, match=told) as raised:
        Rollout([Scripted, lambda: 1 / 0])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


FIVE = "expected a tuple of 5: observation, reward, terminated, truncated, info"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((np.zeros(2), 1.0, False, {}), f"step gave a tuple of 4, {FIVE}"),
        (None, f"step gave a NoneType, {FIVE}"),
        ((1,) * 6, f"step gave a tuple of 6, {FIVE}"),
        ((np.zeros(2), 1.0, np.array([True]), False, {}), "terminated has shape [1], expected one bool"),
    ],
)
@pytest.mark.parametrize("others", [True, False])
def test_a_step_that_gives_something_else_is_refused(given: Any, told: str, *, others: bool) -> None:
    gives = partial(Altered, "step", lambda action: given)
    envs = [Scripted if others else gives, gives]
    with pytest.raises(EnvError) as caught:
        fragments_of(envs)
    assert str(caught.value) == f"slot {1 if others else 0}: {told}"


def wrappers_of(env: Any) -> list[str]:
    names = []
    while isinstance(env, gym.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    return names


def test_the_first_environment_of_an_id_is_checked_for_all_of_them() -> None:
    with Rollout("FrozenLake-v1", module=Zeros(), num_envs=3, seed=0) as rollout:
        [vector] = rollout.environments.envs
        wrappers = [["TimeLimit", "OrderEnforcing", "PassiveEnvChecker"], ["TimeLimit"], ["TimeLimit"]]
        assert [wrappers_of(env) for env in vector.envs] == wrappers


class Lists(SmallEnv):
    """Gives lists where its space has arrays, as environments written by hand do."""

    observation_space = spaces.Dict(
        {
            "pair": spaces.Tuple([spaces.Box(-99, 99, (3,), np.float32), spaces.Discrete(9)]),
            "square": spaces.Box(-99, 99, (3, 2), np.float32),
            "kinds": spaces.MultiDiscrete([40, 40, 40]),
        }
    )

    def __init__(self, slot: int) -> None:
        self.slot, self.length = slot, 3 + slot

    def look(self) -> Any:
        row = [self.slot, self.t, 7]
        return {"pair": (row, self.t % 9), "square": [row[:2], (5, 6), np.array(row[1:])], "kinds": tuple(row)}


class Plain(Lists):
    """Environment whose observation is one list alone."""

    observation_space = spaces.Box(-99, 99, (3,), np.float32)  # type: ignore[assignment]

    def look(self) -> Any:
        return [self.slot, self.t, 7]


@pytest.mark.parametrize(
    ("kind", "count", "where"),
    [
        *((kind, count, "inline") for kind in (Lists, Plain) for count in (2, 3)),
        (Lists, 3, "threads"),
        (Lists, 3, "processes"),
    ],
)
def test_lists_are_taken_where_the_space_has_arrays(kind: type[Lists], count: int, where: str) -> None:
    makers = [partial(kind, slot) for slot in range(count)]
    assert check_as_by_gymnasium(lambda: makers, where, fragment_length=5, lanes=1) > 6


@pytest.mark.parametrize(("options", "lookback"), [({}, 1), ({"lookback": 3}, 3)], ids=["usual", "given"])
def test_a_ring_drawn_by_hand_gives_fragments(options: dict[str, int], lookback: int) -> None:
    environments = Environments(Scripted, num_envs=2, lanes=2, fragment_length=5, **options)
    module, spaces_of = Zeros(), (environments.observation_space, environments.action_space)
    prepare = EnvToModule(EnvToModulePipeline.default(*spaces_of), module, num_lanes=2, num_fragments=1)
    act = ModuleToEnv(ModuleToEnvPipeline.default(*spaces_of), module)
    with InlineRun(ring_of(environments, prepare, ModuleForward(module, PolicyWeights(module)), act, None)) as run:
        [(_, first), (_, second)] = [*run.next_outputs(), *run.next_outputs()]
        assert [node.items for node in run.counters.report().nodes if node.name == "env"] == [10]
    assert [(each.lane, each.layout.lookback) for each in (first, second)] == [(0, lookback), (1, lookback)]


@pytest.mark.parametrize("missing", ["observation_space", "action_space"])
@pytest.mark.parametrize("is_vector", [False, True])
def test_an_environment_without_a_space_is_refused_with_what_is_missing(missing: str, *, is_vector: bool) -> None:
    class Bare(NumberedEnv):
        def __init__(self) -> None:
            super().__init__(0)
            self.closed = False
            setattr(self, missing, None)
            made.append(self)

        def close(self) -> None:
            self.closed = True

    made: list[Bare] = []
    env: Any = Bare
    if is_vector:
        env = SyncVectorEnv([lambda: NumberedEnv(0)])
        setattr(env, f"single_{missing}", None)
        missing = f"single_{missing}"
    with pytest.raises(EnvError, match=f"its {missing} is None, expected a gymnasium.Space"):
        Rollout(env, module=NumberedModule)
    assert all(each.closed for each in made)
