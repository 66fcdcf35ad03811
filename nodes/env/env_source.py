"""Environment sources of a user, as one maker of a vector environment for each lane."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.vector import AutoresetMode, VectorEnv

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.env.async_pool import AsyncPool, is_asynchronous
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.stepping import LaneVectorEnv, SideBySide, autoreset_mode, nothing
from rollflow.stream.data.closing import close_all, closing_on_error
from rollflow.stream.data.errors import ColumnError, EnvError, RollflowError, noted, shown
from rollflow.stream.data.space import check_columnar

EnvMaker = Callable[[], gym.Env[Any, Any] | VectorEnv[Any, Any, Any]]
Autoreset = AutoresetMode | str | None  # as gymnasium takes it: a mode, or its value
EnvSource = (
    str | EnvSpec | EnvMaker | Sequence[EnvMaker] | VectorEnv[Any, Any, Any] | Sequence[VectorEnv[Any, Any, Any]]
)

_MAKE_KEYWORDS = ("max_episode_steps", "disable_env_checker")  # of gymnasium.make, and fields of a specification


@dataclass(frozen=True, slots=True)
class LaneMaker:
    """Makes the vector environment of one lane, here or, if it `can_travel`, in another process.

    An id's own vectorized form is used if it has one; other environments are put side by side. A callable may make a
    vector environment, which is the lane by itself. Of an id's environments only the first has gymnasium's checks of
    how one behaves: each check costs a call in every step.

    num_envs          slots
    spec, makers,     an id's specification; callables, one for each slot; a vector environment that a user has made
    ready
    first_slot        number of the first slot, for errors
    autoreset_mode    expected mode; None: SAME_STEP if they are put side by side, else their own
    is_counted        whether `num_envs` was asked for; else a vector environment has its own number
    vector_lanes      lanes that were asked for, if only vector environments have so many; 0: all may
    """

    num_envs: int
    spec: EnvSpec | None = None
    makers: Sequence[EnvMaker] = ()
    ready: VectorEnv[Any, Any, Any] | None = None
    first_slot: int = 0
    autoreset_mode: AutoresetMode | None = None
    is_counted: bool = True
    vector_lanes: int = 0

    @property
    def can_travel(self) -> bool:
        """True if the environment is yet to be made."""
        return self.ready is None

    def make(self) -> VectorEnv[Any, Any, Any]:
        """Make the vector environment.

        Raises EnvError when it can't be made, has another autoreset mode, or spaces that have no columns.
        """
        if self.ready is not None:
            if getattr(self.ready, "unwrapped", None) is not self.ready:
                _refuse_hidden_tensors(self.ready)
            _check_mode(self.ready, self.autoreset_mode, "this vector environment")
            _check_spaces(self.ready, "the vector environment")
            return self.ready
        made = self._make_new()
        with closing_on_error(made.close):
            name = f"slot {self.first_slot}" if self.spec is None else f"environment '{self.spec.id}'"
            _check_spaces(made, name)
            _refuse_hidden_tensors(made)
        return made

    def lane_env(self, deviations: Deviations, where: str = "", *, may_be_async: bool = False) -> Any:
        """The vector environment as a lane takes it: a `LaneVectorEnv`, or an `AsyncPool` if that may be.

        Raises EnvError as `make`, and for an asynchronous pool if there may be none.
        """
        made = self.make()
        with closing_on_error(made.close if self.can_travel else nothing):
            if not is_asynchronous(made):
                return LaneVectorEnv(made, deviations=deviations, where=where)
            if not may_be_async:
                raise EnvError(
                    f"{where}{type(made).__name__} answers for some of its environments at a time (batch_size), which "
                    "works with where='inline' alone; expected that, or a pool without batch_size"
                ).see("autoreset")
            return AsyncPool(made, deviations=deviations, where=where)

    def _make_new(self) -> VectorEnv[Any, Any, Any]:
        spec = self.spec
        if spec is None or spec.vector_entry_point is None:
            makers = self._slot_makers()
            if spec is None:
                made = given_by(makers[0], f"the callable for slot {self.first_slot}", "a gymnasium.Env")
                if isinstance(made, VectorEnv):
                    return self._checked(made)
                if self.vector_lanes:
                    with closing_on_error(made.close):
                        sizes_of(1, self.vector_lanes)
                makers = [lambda: made, *makers[1:]]
            return _side_by_side(makers, self.first_slot, self.autoreset_mode or AutoresetMode.SAME_STEP)
        with refusing(f"environment '{spec.id}' can't be made:"):
            env = gym.make_vec(spec, num_envs=self.num_envs, vectorization_mode="vector_entry_point")
        with closing_on_error(env.close):
            _check_mode(env, self.autoreset_mode, f"the vectorized form of '{spec.id}'")
        return env

    def _checked(self, made: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
        """The vector environment that a callable has made. Raises EnvError if this lane has no place for it."""
        with closing_on_error(made.close):
            name = f"the vector environment that the callable for slot {self.first_slot} makes"
            _check_mode(made, self.autoreset_mode, name)
            are_one = all(make is self.makers[0] for make in self.makers)
            if self.is_counted and not (are_one and made.num_envs == self.num_envs):
                raise EnvError(
                    f"{name} has {made.num_envs} slots and is a lane by itself, but this lane is to have "
                    f"{self.num_envs}; expected num_envs to be left out, or, of a list of callables, a lane for each "
                    "(lanes=…)"
                ).see("environment")
            return made

    def _slot_makers(self) -> Sequence[EnvMaker]:
        spec = self.spec
        if spec is None:
            return self.makers
        # Without gymnasium's checks, which rollflow's way to step it never fails.
        unchecked = replace(spec, disable_env_checker=True, order_enforce=False)
        return [partial(_made_of, spec), *[partial(_made_of, unchecked)] * (self.num_envs - 1)]


def _refuse_hidden_tensors(env: Any) -> None:
    """Raise EnvError for a TorchEnvs that a callable made, or a wrapper is around, unless it allows host copies."""
    if not getattr(getattr(env, "unwrapped", None), "allow_host_copies", True):
        raise EnvError(
            f"{shown(env)} would have each step copied to the host: a callable made it, or a wrapper is around it; "
            f"expected the {type(env.unwrapped).__name__} itself, or one with allow_host_copies=True"
        ).see("device")


def _space_of(env: Any, attribute: str, name: str) -> gym.Space[Any]:
    space = getattr(env, attribute, None)
    if not isinstance(space, gym.Space):
        raise EnvError(
            f"{name}: its {attribute} is {shown(space)}, expected a gymnasium.Space, which it has from its making on"
        )
    return space


def check_same_space(
    kind: str, space: gym.Space[Any], expected: gym.Space[Any], place: str, number: int, first: int = 0
) -> None:
    """Raise EnvError if the environment of a lane or slot has another space than that of the first one."""
    if space != expected:
        raise EnvError(
            f"environment of {place} {number}: its {kind} space is {space}, expected that of {place} {first}, "
            f"{expected}"
        ).see("spaces")


def _check_spaces(env: VectorEnv[Any, Any, Any], name: str) -> None:
    """Raise EnvError, with the part's keys, for a space of its environments that has a part without columns."""
    for kind in ("observation", "action"):
        try:
            check_columnar(_space_of(env, f"single_{kind}_space", name), f"the {kind} space")
        except ColumnError as error:
            raise EnvError(f"{name}: {error}") from None


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn errors raised while an environment is made into EnvErrors.

    what    begins the text, before the error's own; rollflow's errors go on as they are
    """
    try:
        yield
    except RollflowError:
        raise
    except Exception as error:
        raise EnvError(f"{what} {type(error).__name__}: {error}") from error


def given_by(make: Callable[[], Any], where: str, kind: str) -> Any:
    """Make something of a kind by a user's callable. Raises EnvError if the callable raises."""
    with noted(f"in {where}"), refusing(f"{where}, expected to make {kind}, raised"):
        return make()


def lane_makers(
    env: EnvSource, num_envs: int | None, lanes: int | None, autoreset_mode: Autoreset = None
) -> list[LaneMaker]:
    """One maker per lane; `lanes` None: one lane, or one for each ready vector environment.

    Raises EnvError for anything but a source of environments or a mode, and for numbers that don't go together.
    """
    try:
        mode = None if autoreset_mode is None else AutoresetMode(autoreset_mode)
    except ValueError:
        values = ", ".join(repr(each.value) for each in AutoresetMode)
        raise EnvError(
            f"autoreset_mode is {autoreset_mode!r}, expected a gymnasium.vector.AutoresetMode, or one of {values}"
        ) from None
    return [replace(maker, autoreset_mode=mode) for maker in _makers_of(env, num_envs, lanes)]


def _makers_of(env: EnvSource, num_envs: int | None, lanes: int | None) -> list[LaneMaker]:
    if isinstance(env, str | EnvSpec):
        spec = _spec_of(env) if isinstance(env, str) else env
        return [LaneMaker(size, spec=spec) for size in sizes_of(count_of(env, num_envs), lanes)]
    each: list[Any] = list(env) if isinstance(env, Sequence) else [env]
    if each and all(isinstance(one, VectorEnv) for one in each):
        return _ready(each, num_envs, lanes)
    if not each or not all(callable(one) for one in each):
        raise EnvError(
            f"env is {shown(env)}, expected an environment's id, a callable that makes one, a list of such callables, "
            f"a gymnasium.vector.VectorEnv, or a list of those{_in_tensors(*each)}"
        ).see("environment")
    is_counted = num_envs is not None or isinstance(env, Sequence)
    if not is_counted and lanes is not None and is_whole(lanes) and lanes > 1:
        one = LaneMaker(1, makers=each, is_counted=False, vector_lanes=lanes)
        return [replace(one, first_slot=lane) for lane in range(lanes)]
    if not isinstance(env, Sequence):
        each *= count_of(env, num_envs)
    elif num_envs not in (None, len(each)):
        raise EnvError(f"num_envs is {num_envs}, expected {len(each)}: one for each callable given")
    sizes = sizes_of(len(each), lanes)
    firsts = accumulate(sizes, initial=0)
    return [
        LaneMaker(
            size,
            makers=each[first : first + size],
            first_slot=first,
            is_counted=is_counted and not (isinstance(env, Sequence) and size == 1),
        )
        for size, first in zip(sizes, firsts, strict=False)
    ]


_MARKS = {  # how environments are stepped instead -> pairs of attributes that tell them
    "of tensors: write TorchEnvs(env)": (("num_actions", "get_observations"), ("n_agents", "reset_at")),
    "in JAX: write JaxEnvs(env, num_envs=…)": (("default_params", "step"), ("action_size", "step"), ("init", "step")),
}


def _in_tensors(*envs: Any) -> str:
    """The end of an error about environments: what to write if one is of tensors, or in JAX."""
    for each in envs:
        for instead, marks in _MARKS.items():
            if any(hasattr(each, one) and hasattr(each, other) for one, other in marks):
                return f"; this is an environment {instead}"
    return ""


def with_kwargs(env: Any, env_kwargs: Mapping[str, Any] | None) -> Any:
    """The source of environments, with keywords for `gymnasium.make`. Raises EnvError unless it is an id.

    `max_episode_steps` and `disable_env_checker` are `gymnasium.make`'s own; all others are the environment's.
    """
    if not env_kwargs:
        return env
    if not isinstance(env, str):
        raise EnvError(
            f"env_kwargs are for an environment's id, but env is {shown(env)}; expected a callable that knows its own "
            "arguments, such as functools.partial(MyEnv, size=8)"
        ).see("environment")
    spec = _spec_of(env)
    own = {name: env_kwargs[name] for name in _MAKE_KEYWORDS if name in env_kwargs}
    if own.get("max_episode_steps") == -1:  # gymnasium.make's word for no limit
        own["max_episode_steps"] = None
    rest = {name: value for name, value in env_kwargs.items() if name not in own}
    return replace(spec, kwargs=spec.kwargs | rest, **own)


def count_of(env: EnvSource, num_envs: int | None) -> int:
    """Slots in all, of environments that are yet to be made. Raises EnvError for anything but a number of them."""
    if num_envs is None and isinstance(env, Sequence) and not isinstance(env, str):
        return len(env)
    return sum(sizes_of(1 if num_envs is None else num_envs, None))


def is_ready(env: EnvSource) -> bool:
    """True if these are vector environments that their user has made, and will close."""
    each = env if isinstance(env, Sequence) and not isinstance(env, str) else [env]
    return any(isinstance(one, VectorEnv) for one in each)


def sizes_of(num_envs: int, lanes: int | None) -> list[int]:
    """Slots of each lane, as even as possible; None: one lane. Raises EnvError if there are too few."""
    lanes = 1 if lanes is None else lanes
    for name, number in (("num_envs", num_envs), ("lanes", lanes)):
        if not is_whole(number):
            raise EnvError(f"{name} is {number!r}, expected a whole number")
        if number < 1:
            raise EnvError(f"{name} is {number}, expected at least 1")
    if lanes > num_envs:
        raise EnvError(f"lanes is {lanes}, expected at most num_envs, which is {num_envs}")
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
        raise EnvError(f"environment '{env_id}' can't be made: {error}{_versioned(module, name)}").see(
            "environment"
        ) from error


def _versioned(module: str, name: str) -> str:
    """The end of an error about an id without a version: the id of the newest one; empty if there is none."""
    try:
        namespace, name, version = parse_env_id(name)
    except gym.error.Error:
        return ""
    newest = find_highest_version(namespace, name)
    if version is not None or newest is None:
        return ""
    return f"; expected a version, such as '{f'{module}:' if module else ''}{get_env_id(namespace, name, newest)}'"


def side_by_side(env: Any) -> Any:
    """The source of environments, without the vectorized form that an id may have."""
    spec = _spec_of(env) if isinstance(env, str) else env
    return replace(spec, vector_entry_point=None) if isinstance(spec, EnvSpec) else env


def _made_of(spec: EnvSpec) -> gym.Env[Any, Any]:
    with refusing(f"environment '{spec.id}' can't be made:"):
        return gym.make(spec)


def _check_mode(env: VectorEnv[Any, Any, Any], asked: AutoresetMode | None, what: str) -> None:
    if asked is not None and (mode := autoreset_mode(env)) is not asked:
        raise EnvError(
            f"autoreset_mode is {asked}, expected {mode}, which is that of {what}: leave it out, or give callables "
            "that make one environment each"
        )


def _side_by_side(makers: Sequence[EnvMaker], first_slot: int, mode: AutoresetMode) -> VectorEnv[Any, Any, Any]:
    made: list[gym.Env[Any, Any]] = []
    with closing_on_error(lambda: close_all((f"slot {slot}", env.close) for slot, env in enumerate(made, first_slot))):
        for slot, make in enumerate(makers, first_slot):
            made.append(_made(make, slot, made))
            for kind in ("observation", "action"):
                space = _space_of(made[-1], f"{kind}_space", f"slot {slot}")
                check_same_space(kind, space, getattr(made[0], f"{kind}_space"), "slot", slot, first_slot)
        # A lane copies observations before the next step, so the environments may reuse their arrays.
        envs = iter(made)
        return SideBySide([lambda: next(envs)] * len(made), copy=False, autoreset_mode=mode)


def _made(make: EnvMaker, slot: int, before: Sequence[gym.Env[Any, Any]]) -> gym.Env[Any, Any]:
    """Make the environment of a slot. Raises EnvError for anything else, and for one that another slot has."""
    env = given_by(make, f"the callable for slot {slot}", "a gymnasium.Env")
    if hasattr(env, "possible_agents"):
        raise EnvError(
            f"the callable for slot {slot} gave {shown(env)}, which has several agents; expected a gymnasium.Env of "
            "one: for several there is MultiAgentRollout"
        ).see("agents")
    if isinstance(env, VectorEnv):  # which may be a gymnasium.Env as well
        raise EnvError(
            f"the callable for slot {slot} gave a vector environment, which is a lane by itself, and the one for slot "
            f"{slot - len(before)} a single one; expected one kind"
        ).see("environment")
    if not isinstance(env, gym.Env):
        raise EnvError(
            f"the callable for slot {slot} gave {shown(env)}, expected a gymnasium.Env{_in_tensors(env)}"
        ).see("environment")
    if any(env is other for other in before):
        raise EnvError(f"the callable for slot {slot} gave an environment that another slot has already")
    return env
