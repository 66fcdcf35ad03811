"""What a user gives as environments, as one maker of a vector environment for each lane."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rollflow.nodes.closing import close_all, closing_on_error
from rollflow.stream.errors import EnvError, RollflowError, noted

EnvMaker = Callable[[], gym.Env[Any, Any]]
EnvSource = str | EnvMaker | Sequence[EnvMaker] | VectorEnv[Any, Any, Any] | Sequence[VectorEnv[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class LaneMaker:
    """Makes the vector environment of one lane, here or, where it `can_travel`, in another process.

    An id's own vectorized form is used where it has one; other environments are put side by side. The first of an id's
    is made with gymnasium's checks of how an environment behaves, for all of them: each costs a call in every step.

    first_slot    the number of the first of them, in errors
    """

    num_envs: int
    spec: EnvSpec | None = None
    makers: Sequence[EnvMaker] = ()
    ready: VectorEnv[Any, Any, Any] | None = None
    first_slot: int = 0

    @property
    def can_travel(self) -> bool:
        """Whether the environment is yet to be made."""
        return self.ready is None

    def make(self) -> VectorEnv[Any, Any, Any]:
        """The vector environment. Raises EnvError when it can't be made."""
        if self.ready is not None:
            return self.ready
        spec = self.spec
        if spec is None:
            return _side_by_side(self.makers, self.first_slot)
        if spec.vector_entry_point is None:
            others = [partial(_made_of, _unchecked(spec))] * (self.num_envs - 1)
            return _side_by_side([partial(_made_of, spec), *others], self.first_slot)
        with _making(spec):
            return gym.make_vec(spec, num_envs=self.num_envs, vectorization_mode="vector_entry_point")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Have whatever is raised while an environment is made be an EnvError: what it is, and what was raised.

    What is one of ours goes on as it is.
    """
    try:
        yield
    except RollflowError:
        raise
    except Exception as error:
        raise EnvError(f"{what} {type(error).__name__}: {error}") from error


def given_by(make: Callable[[], Any], where: str, kind: str) -> Any:
    """What a callable makes, which is to be of a kind. Raises EnvError where it raises."""
    with noted(f"in {where}"), refusing(f"{where}, expected to make {kind}, raised"):
        return make()


def lane_makers(env: EnvSource, num_envs: int | None, lanes: int | None) -> list[LaneMaker]:
    """One maker per lane; `lanes` None: one lane, or one for each ready vector environment.

    Raises EnvError for what is no source of environments, and for numbers that don't go together.
    """
    if isinstance(env, VectorEnv):
        return _ready([env], num_envs, lanes)
    if isinstance(env, str):
        spec = _spec_of(env)
        return [LaneMaker(size, spec=spec) for size in sizes_of(1 if num_envs is None else num_envs, lanes)]
    if callable(env):
        sizes = sizes_of(1 if num_envs is None else num_envs, lanes)
        return _of_makers([env] * sum(sizes), sizes)
    if isinstance(env, Sequence) and len(env) and all(isinstance(each, VectorEnv) for each in env):
        return _ready(list(env), num_envs, lanes)  # type: ignore[arg-type]
    if isinstance(env, Sequence) and len(env) and all(callable(each) for each in env):
        if num_envs not in (None, len(env)):
            raise EnvError(f"num_envs is {num_envs}, expected {len(env)}: one for each callable given")
        return _of_makers(list(env), sizes_of(len(env), lanes))  # type: ignore[arg-type]
    raise EnvError(
        f"env is {env!r}, expected an environment's id, a callable that makes one, a list of such callables, "
        "a gymnasium.vector.VectorEnv, or a list of those"
    )


def count_of(env: EnvSource, num_envs: int | None) -> int:
    """Slots in all, of environments that are yet to be made."""
    if num_envs is None and isinstance(env, Sequence) and not isinstance(env, str):
        return len(env)
    return 1 if num_envs is None else num_envs


def is_ready(env: EnvSource) -> bool:
    """Whether these are vector environments that somebody else has made, and will close."""
    each = env if isinstance(env, Sequence) and not isinstance(env, str) else [env]
    return any(isinstance(one, VectorEnv) for one in each)


def is_whole(number: Any) -> bool:
    """Whether this is a whole number, Python's or numpy's; True is none."""
    return type(number) is int or (isinstance(number, int | np.integer) and not isinstance(number, bool))


def sizes_of(num_envs: int, lanes: int | None) -> list[int]:
    """How many slots each lane has: as even as it goes; None: there is one. Raises EnvError where there are too few."""
    lanes = 1 if lanes is None else lanes
    for name, number in (("num_envs", num_envs), ("lanes", lanes)):
        if not is_whole(number):
            raise EnvError(f"{name} is {number!r}, expected a whole number")
    if num_envs < 1 or not 1 <= lanes <= num_envs:
        raise EnvError(f"num_envs is {num_envs} and lanes is {lanes}, expected 1 <= lanes <= num_envs")
    return [num_envs // lanes + (index < num_envs % lanes) for index in range(lanes)]


def _ready(envs: list[VectorEnv[Any, Any, Any]], num_envs: int | None, lanes: int | None) -> list[LaneMaker]:
    total = sum(env.num_envs for env in envs)
    if num_envs not in (None, total):
        raise EnvError(f"num_envs is {num_envs}, but the vector environments given have {total}; leave it out")
    if lanes not in (None, len(envs)):
        raise EnvError(f"lanes is {lanes}, but {len(envs)} vector environments were given, one lane each")
    return [LaneMaker(env.num_envs, ready=env) for env in envs]


def _spec_of(env_id: str) -> EnvSpec:
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gym.spec(name)
    except (gym.error.Error, ModuleNotFoundError) as error:
        raise EnvError(f"environment '{env_id}' can't be made: {error}") from error


def _of_makers(makers: Sequence[EnvMaker], sizes: Sequence[int]) -> list[LaneMaker]:
    ends = accumulate(sizes)
    return [
        LaneMaker(size, makers=makers[end - size : end], first_slot=end - size)
        for size, end in zip(sizes, ends, strict=True)
    ]


def _making(spec: EnvSpec) -> AbstractContextManager[None]:
    return refusing(f"environment '{spec.id}' can't be made:")


def _made_of(spec: EnvSpec) -> gym.Env[Any, Any]:
    with _making(spec):
        return gym.make(spec)


def _unchecked(spec: EnvSpec) -> EnvSpec:
    """The same environment without gymnasium's checks, which rollflow's own way to step it never fails."""
    return replace(spec, disable_env_checker=True, order_enforce=False)


def _side_by_side(makers: Sequence[EnvMaker], first_slot: int) -> VectorEnv[Any, Any, Any]:
    made: list[gym.Env[Any, Any]] = []
    with closing_on_error(lambda: close_all((f"slot {slot}", env.close) for slot, env in enumerate(made, first_slot))):
        for slot, make in enumerate(makers, first_slot):
            made.append(_made(make, slot, made))
        # A lane copies what it is given before the next step, so the environments may reuse their arrays.
        envs = iter(made)
        return SyncVectorEnv([lambda: next(envs)] * len(made), copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def _made(make: EnvMaker, slot: int, before: Sequence[gym.Env[Any, Any]]) -> gym.Env[Any, Any]:
    """The environment of a slot, after those of the lane's slots before. Raises EnvError for none, or what raises."""
    env = given_by(make, f"the callable for slot {slot}", "a gymnasium.Env")
    if hasattr(env, "possible_agents"):
        raise EnvError(
            f"the callable for slot {slot} gave {env!r}, which has several agents; expected a gymnasium.Env of one: "
            "for several there is MultiAgentRollout"
        )
    if not isinstance(env, gym.Env):
        raise EnvError(f"the callable for slot {slot} gave {env!r}, expected a gymnasium.Env")
    if any(env is other for other in before):
        raise EnvError(f"the callable for slot {slot} gave an environment that another slot has already")
    return env
