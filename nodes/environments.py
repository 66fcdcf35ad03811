"""The environments of a rollout, stepped in this process."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import iterate

from rollflow.stream.columns import Columns
from rollflow.stream.errors import EnvError, RunError
from rollflow.stream.fragment import FragmentLayout
from rollflow.stream.infos import SlotInfos, replaced, without
from rollflow.stream.lane import Lane
from rollflow.stream.seeding import seed_for
from rollflow.stream.space import is_columnar
from rollflow.stream.tree import Tree, map_tree, stack_trees

EnvSource = (
    str
    | Callable[[], gym.Env[Any, Any]]
    | Sequence[Callable[[], gym.Env[Any, Any]]]
    | VectorEnv[Any, Any, Any]
    | Sequence[VectorEnv[Any, Any, Any]]
)


class Environments:
    """A node that steps vector environments, one per lane: takes a lane's actions, gives its observations.

        env                an environment's id, a callable or a list of callables that make one each, a
                           `gymnasium.vector.VectorEnv`, or a list of those, one per lane
        num_envs           slots in all; taken from `env` where that is a list or a vector environment
        lanes              groups of slots that step on their own
        fragment_length    vector steps in a fragment (T)
        lookback           steps of the fragment before that each fragment begins with (H)
        seed               of every slot's environment
        name               what the episode ids are derived from, beside the seed

    An id's own vectorized form is used where it has one; other environments are stepped one by one and reset in
    the step that ends their episode. All three of gymnasium's autoreset modes give the same episodes.

    Raises EnvError when an environment can't be made, or its spaces have no columns.
    """

    def __init__(
        self,
        env: EnvSource,
        *,
        num_envs: int | None = None,
        lanes: int = 1,
        fragment_length: int = 128,
        lookback: int = 1,
        seed: int = 0,
        name: str = "rollout",
    ) -> None:
        self._seed = seed
        self.is_started = False
        self.is_closed = False
        self._owned = not isinstance(env, VectorEnv) and not _holds_vector_envs(env)
        self.envs = _vector_envs(env, num_envs, lanes)
        first = self.envs[0]
        self.observation_space: gym.Space[Any] = first.single_observation_space
        self.action_space: gym.Space[Any] = first.single_action_space
        self.num_envs = sum(vector.num_envs for vector in self.envs)
        self._name, self._fragment_length = name, fragment_length
        for index, vector in enumerate(self.envs):
            self._check_spaces(vector, index)
        self._lookback = -1  # not set yet
        self.set_lookback(lookback)

    def set_lookback(self, lookback: int) -> None:
        """Have every fragment begin with so many steps of the one before (H). Before the first step only."""
        if lookback == self._lookback:
            return
        if self.is_started:
            raise RunError("these environments have been started: their lookback stays as it is")
        self._lookback = lookback
        self.lanes: list[Lane] = []
        for index, vector in enumerate(self.envs):
            layout = FragmentLayout(
                num_slots=vector.num_envs,
                num_rows=self._fragment_length,
                lookback=lookback,
                action_space=self.action_space,
                resets_next_step=_autoreset_mode(vector) is AutoresetMode.NEXT_STEP,
                episode_id=_episode_ids(f"{self._seed}/{self._name}/{index}"),
            )
            self.lanes.append(Lane(index, layout, self.observation_space))
        self._step = [
            _one_after_the_other(lane, vector)
            if self._owned and isinstance(vector, SyncVectorEnv)
            else _STEPS[_autoreset_mode(vector)](lane, vector)
            for lane, vector in zip(self.lanes, self.envs, strict=True)
        ]

    def start(self) -> Iterator[Lane]:
        """Reset every environment; each lane sets out with its first observations. Raises RunError a second time."""
        if self.is_started:
            raise RunError("these environments have been run before: a rollout runs once, make another one")
        self.is_started = True
        slot = 0
        for lane, env in zip(self.lanes, self.envs, strict=True):
            seeds: Any = [seed_for(self._seed, "env", slot + i) for i in range(env.num_envs)]
            if not isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
                seeds = seeds[0]  # one generator for all slots
            try:
                observations, infos = env.reset(seed=seeds)
            except Exception as error:
                error.add_note(f"lane {lane.index}, the first reset")
                raise
            lane.reset(observations, infos)
            slot += env.num_envs
            yield lane

    def __call__(self, actions: Lane) -> Lane:
        """Step the lane's environments with the actions that it brings."""
        lane = actions
        try:
            self._step[lane.index]()
        except Exception as error:
            error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}")
            raise
        return lane

    def describe(self) -> str:
        """Lanes and slots, for `explain()`."""
        count = len(self.lanes)
        slots = sorted({lane.layout.num_slots for lane in self.lanes})
        sizes = " or ".join(map(str, slots))
        return f"{count} lane{'s' if count > 1 else ''} × {sizes} slot{'s' if slots != [1] else ''}"

    def close(self) -> None:
        """Close the environments that this node made itself."""
        self.is_closed = True
        if self._owned:
            for env in self.envs:
                env.close()

    def _check_spaces(self, env: VectorEnv[Any, Any, Any], index: int) -> None:
        for kind, space, first in (
            ("observation", env.single_observation_space, self.observation_space),
            ("action", env.single_action_space, self.action_space),
        ):
            if not is_columnar(space):
                raise EnvError(
                    f"environment of lane {index}: the {kind} space {space} has no columns; expected Box, Discrete, "
                    "MultiDiscrete, MultiBinary, or a Dict or Tuple of those"
                )
            if space != first:
                raise EnvError(
                    f"environment of lane {index}: its {kind} space is {space}, expected that of lane 0, {first}"
                )


def _one_after_the_other(lane: Lane, env: SyncVectorEnv) -> Callable[[], None]:
    """The environments of a `SyncVectorEnv` of our own, without what its `step` spends on copies and infos."""
    envs, space = env.envs, env.action_space

    def step() -> None:
        observations, rewards, terminateds, truncateds, infos = [], [], [], [], []
        last, last_infos = [], {}
        slot = 0
        try:
            for action in iterate(space, _actions_of(lane)):
                observation, reward, terminated, truncated, info = envs[slot].step(action)
                if terminated or truncated:
                    # The reset may write over both.
                    last.append(map_tree(np.array, observation))
                    last_infos[slot] = dict(info)
                    observation, info = envs[slot].reset()
                observations.append(observation)
                rewards.append(reward)
                terminateds.append(terminated)
                truncateds.append(truncated)
                infos.append(info)
                slot += 1
        except Exception as error:
            error.add_note(f"slot {slot} of lane {lane.index}")
            raise
        lane.record_step(
            _stacked(observations, lane),
            np.array(rewards),
            np.array(terminateds, np.bool_),
            np.array(truncateds, np.bool_),
            SlotInfos(infos) if any(infos) else {},
            (last, SlotInfos([last_infos.get(i, {}) for i in range(slot)])) if last else None,
        )

    return step


def _stacked(observations: list[Tree], lane: Lane) -> Tree:
    try:
        return np.array(observations) if isinstance(observations[0], np.ndarray) else stack_trees(observations)
    except ValueError as error:
        shapes = ", ".join(f"{map_tree(np.shape, each)} (slot {slot})" for slot, each in enumerate(observations))
        raise EnvError(
            f"lane {lane.index}: the environments gave observations of different shapes: {shapes}"
        ) from error


def _next_step(lane: Lane, env: VectorEnv[Any, Any, Any]) -> Callable[[], None]:
    """NEXT_STEP: the step after an end only resets, which is what the lane assumes when told of no `final`."""

    def step() -> None:
        lane.record_step(*env.step(_actions_of(lane)))

    return step


def _same_step(lane: Lane, env: VectorEnv[Any, Any, Any]) -> Callable[[], None]:
    """SAME_STEP: an ended episode's last observation is in `infos["final_obs"]`."""

    def step() -> None:
        observations, rewards, terminateds, truncateds, infos = env.step(_actions_of(lane))
        final = None
        if np.count_nonzero(terminateds) or np.count_nonzero(truncateds):
            slots = np.flatnonzero(np.logical_or(terminateds, truncateds)).tolist()
            final = _final_items(infos, slots), infos.get("final_info", {})
        lane.record_step(
            observations, rewards, terminateds, truncateds, without(infos, "final_obs", "final_info"), final
        )

    return step


def _disabled(lane: Lane, env: VectorEnv[Any, Any, Any]) -> Callable[[], None]:
    """DISABLED: nothing resets by itself; the ended episodes' slots are reset right here."""

    def step() -> None:
        observations, rewards, terminateds, truncateds, infos = env.step(_actions_of(lane))
        done = np.logical_or(terminateds, truncateds)
        if not np.count_nonzero(done):
            lane.record_step(observations, rewards, terminateds, truncateds, infos)
            return
        rewards, terminateds, truncateds = rewards.copy(), terminateds.copy(), truncateds.copy()
        last = [map_tree(lambda leaf, i=i: leaf[i].copy(), observations) for i in np.flatnonzero(done).tolist()]
        observations, reset_infos = env.reset(options={"reset_mask": done})
        lane.record_step(
            observations, rewards, terminateds, truncateds, replaced(infos, reset_infos, done), (last, infos)
        )

    return step


_STEPS: Mapping[AutoresetMode, Callable[[Lane, VectorEnv[Any, Any, Any]], Callable[[], None]]] = {
    AutoresetMode.NEXT_STEP: _next_step,
    AutoresetMode.SAME_STEP: _same_step,
    AutoresetMode.DISABLED: _disabled,
}


def _actions_of(lane: Lane) -> Tree:
    batch = lane.batch
    actions = batch.get(Columns.ACTIONS_FOR_ENV)
    return batch[Columns.ACTIONS] if actions is None else actions


def _final_items(infos: Mapping[str, Any], slots: Sequence[int]) -> list[Tree]:
    try:
        final = infos["final_obs"]
    except KeyError:
        raise EnvError(
            f"slots {list(slots)} ended under SAME_STEP autoreset, but infos has no 'final_obs': the last "
            "observations are lost; use another autoreset mode"
        ) from None
    return [map_tree(lambda leaf, i=i: leaf[i], final) for i in slots]


def _autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise EnvError(
            f"{env}: metadata['autoreset_mode'] is {mode!r}, expected a gymnasium.vector.AutoresetMode: "
            "without it the end of an episode can't be told from the start of the next"
        )
    return mode


def _vector_envs(env: EnvSource, num_envs: int | None, lanes: int) -> list[VectorEnv[Any, Any, Any]]:
    """One vector environment per lane."""
    if isinstance(env, VectorEnv):
        return _ready([env], num_envs, lanes)
    if isinstance(env, str) or callable(env):
        sizes = _sizes(1 if num_envs is None else num_envs, lanes)
        made = [_from_id(env, size) if isinstance(env, str) else _one_by_one([env] * size) for size in sizes]
        return made
    if isinstance(env, Sequence) and len(env) and all(isinstance(each, VectorEnv) for each in env):
        return _ready(list(env), num_envs, lanes if lanes != 1 else len(env))  # type: ignore[arg-type]
    if isinstance(env, Sequence) and len(env) and all(callable(each) for each in env):
        if num_envs not in (None, len(env)):
            raise EnvError(f"num_envs is {num_envs}, expected {len(env)}: one for each callable given")
        makers = iter(env)
        return [_one_by_one([next(makers) for _ in range(size)]) for size in _sizes(len(env), lanes)]  # type: ignore[misc]
    raise EnvError(
        f"env is {env!r}, expected an environment's id, a callable that makes one, a list of such callables, "
        "a gymnasium.vector.VectorEnv, or a list of those"
    )


def _ready(envs: list[VectorEnv[Any, Any, Any]], num_envs: int | None, lanes: int) -> list[VectorEnv[Any, Any, Any]]:
    total = sum(env.num_envs for env in envs)
    if num_envs not in (None, total):
        raise EnvError(f"num_envs is {num_envs}, but the vector environments given have {total}; leave it out")
    if lanes != len(envs):
        raise EnvError(f"lanes is {lanes}, but {len(envs)} vector environments were given, one lane each")
    return envs


def _sizes(num_envs: int, lanes: int) -> list[int]:
    """How many slots each lane has: as even as it goes."""
    if num_envs < 1 or not 1 <= lanes <= num_envs:
        raise EnvError(f"num_envs is {num_envs} and lanes is {lanes}, expected 1 <= lanes <= num_envs")
    return [num_envs // lanes + (index < num_envs % lanes) for index in range(lanes)]


def _from_id(env_id: str, num_envs: int) -> VectorEnv[Any, Any, Any]:
    try:
        if gym.spec(env_id).vector_entry_point is not None:
            return gym.make_vec(env_id, num_envs=num_envs, vectorization_mode="vector_entry_point")
        return _one_by_one([lambda: gym.make(env_id)] * num_envs)
    except gym.error.Error as error:
        raise EnvError(f"environment '{env_id}' can't be made: {error}") from error


def _one_by_one(makers: Sequence[Callable[[], gym.Env[Any, Any]]]) -> VectorEnv[Any, Any, Any]:
    made: list[gym.Env[Any, Any]] = []
    for make in makers:
        try:
            env = make()
        except Exception as error:
            error.add_note(f"in the callable for slot {len(made)}")
            raise
        if not isinstance(env, gym.Env):
            raise EnvError(f"the callable for slot {len(made)} gave {env!r}, expected a gymnasium.Env")
        if any(env is other for other in made):
            raise EnvError(f"the callable for slot {len(made)} gave an environment that another slot has already")
        made.append(env)
    # A lane copies what it is given before the next step, so the environments may reuse their arrays.
    envs = iter(made)
    return SyncVectorEnv([lambda: next(envs)] * len(made), copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def _holds_vector_envs(env: EnvSource) -> bool:
    return isinstance(env, Sequence) and not isinstance(env, str) and any(isinstance(e, VectorEnv) for e in env)


def _episode_ids(prefix: str) -> Callable[[int, int], str]:
    """Ids that are unique to the run and the same in every run of one seed."""

    def episode_id(slot: int, number: int) -> str:
        return hashlib.blake2b(f"{prefix}/{slot}/{number}".encode(), digest_size=16).hexdigest()

    return episode_id
