"""The environments of a rollout, stepped in this process by whoever asks for the next step."""

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rollflow.nodes.closing import Closing, close_all, closing_on_error
from rollflow.nodes.env_source import EnvSource, is_ready, lane_makers
from rollflow.nodes.lane_source import LaneSource
from rollflow.nodes.stepping import Step, autoreset_mode, reset_first, step_of
from rollflow.stream.columns import Columns
from rollflow.stream.episode_ids import EpisodeIds
from rollflow.stream.errors import EnvError, RunError
from rollflow.stream.fragment import FragmentLayout
from rollflow.stream.lane import Lane
from rollflow.stream.lane_columns import LaneMemory
from rollflow.stream.space import is_columnar
from rollflow.stream.tree import Tree


class Environments(LaneSource):
    """A node that steps vector environments, one per lane: takes a lane's actions, gives its observations.

        env                an environment's id, a callable or a list of callables that make one each, a
                           `gymnasium.vector.VectorEnv`, or a list of those, one per lane
        num_envs           slots in all; taken from `env` where that is a list or a vector environment
        lanes              groups of slots that step on their own; None: one, or one for each vector environment
        fragment_length    vector steps in a fragment (T)
        lookback           steps of the fragment before that each fragment begins with (H)
        seed               of every slot's environment
        name               what the episode ids are derived from, beside the seed
        first_lane,        numbers of the first lane and slot, where other lanes of the rollout are elsewhere
        first_slot

    An id's own vectorized form is used where it has one; other environments are stepped one by one and reset in
    the step that ends their episode. All three of gymnasium's autoreset modes give the same episodes.

    Raises EnvError when an environment can't be made, or its spaces have no columns.
    """

    def __init__(
        self,
        env: EnvSource,
        *,
        num_envs: int | None = None,
        lanes: int | None = None,
        fragment_length: int = 128,
        lookback: int = 1,
        seed: int = 0,
        name: str = "rollout",
        first_lane: int = 0,
        first_slot: int = 0,
    ) -> None:
        super().__init__(seed, fragment_length)
        self.lookback = -1  # not set yet
        self.lanes: list[Lane] = []
        self.is_shared = False
        self._is_ours = not is_ready(env)
        self._name, self._first_lane, self._first_slot = name, first_lane, first_slot
        self._opened: list[VectorEnv[Any, Any, Any]] = []  # made here, and to be closed here
        self.envs = self._made(env, num_envs, lanes)
        first = self.envs[0]
        self.observation_space: gym.Space[Any] = first.single_observation_space
        self.action_space: gym.Space[Any] = first.single_action_space
        self.num_envs = sum(vector.num_envs for vector in self.envs)
        with closing_on_error(self._close_opened):
            for index, vector in enumerate(self.envs):
                self._check_spaces(vector, index)
        self.set_lookback(lookback)

    def set_lookback(self, lookback: int) -> None:
        """Have every fragment begin with so many steps of the one before (H). Before the first step only."""
        if lookback == self.lookback:
            return
        if self.is_started:
            raise RunError("these environments have been started: their lookback stays as it is")
        self.lookback = lookback
        self._make_lanes()

    def share(self) -> None:
        """Have what lies on this host lie where other processes may look at it. Before the first step only."""
        if self.is_started:
            raise RunError("these environments have been started: their memory stays as it is")
        if not self.is_shared:
            self.is_shared = True
            self._make_lanes()

    def start(self) -> Iterator[Lane]:
        """Reset every environment; each lane sets out with its first observations. Raises RunError a second time."""
        self._begin()
        for lane, env, first_slot in zip(self.lanes, self.envs, self.first_slots(), strict=True):
            try:
                first = reset_first(env, self.seed, first_slot)
            except Exception as error:
                error.add_note(f"lane {lane.index}, the first reset")
                raise
            lane.reset(*first)
            yield lane

    def __call__(self, actions: Lane) -> Lane | None:
        """Step the lane's environments with the actions that it brings."""
        lane = actions
        try:
            lane.record_step(*self._steps[lane.index - self._first_lane](actions_of(lane)))
        except Exception as error:
            error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}")
            raise
        return lane

    def describe(self) -> str:
        """Lanes and slots, for `explain()`."""
        count = len(self.envs)
        slots = sorted({env.num_envs for env in self.envs})
        sizes = " or ".join(map(str, slots))
        return f"{count} lane{'s' if count > 1 else ''} × {sizes} slot{'s' if slots != [1] else ''}"

    def close(self) -> None:
        """Close the environments that this node made itself, all of them, also where one raises."""
        self.is_closed = True
        self._close_opened()

    def first_slots(self) -> list[int]:
        """The number of every lane's first slot."""
        firsts = [self._first_slot]
        for env in self.envs[:-1]:
            firsts.append(firsts[-1] + env.num_envs)
        return firsts

    # What other ways of stepping do otherwise

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[VectorEnv[Any, Any, Any]]:
        """One vector environment per lane."""
        envs = []
        with closing_on_error(self._close_opened):
            for maker in lane_makers(env, num_envs, lanes):
                envs.append(maker.make())
                if self._is_ours:
                    self._opened.append(envs[-1])
            _check_apart(self._opened)
        self._steps = [self._step(env) for env in envs]
        return envs

    def _step(self, env: VectorEnv[Any, Any, Any]) -> Step:
        """What steps the environments of a lane; asked for in the lanes' order."""
        return step_of(env, is_ours=self._is_ours)

    def _memory(self, index: int) -> LaneMemory | None:
        """Where the columns of a lane lie that its environments write to by themselves."""
        return None

    # Inside

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, []
        close_all(closing for lane, vector in enumerate(opened) for closing in _closings(vector, lane))

    def _make_lanes(self) -> None:
        self.lanes = [self._lane(index, vector) for index, vector in enumerate(self.envs, self._first_lane)]

    def _lane(self, index: int, vector: VectorEnv[Any, Any, Any]) -> Lane:
        layout = self._layout(index, vector, self.seed)
        return Lane(index, layout, self.observation_space, self._memory(index), is_shared=self.is_shared)

    def _layout(self, index: int, vector: VectorEnv[Any, Any, Any], seed: int) -> FragmentLayout:
        return FragmentLayout(
            num_slots=vector.num_envs,
            num_rows=self.fragment_length,
            lookback=self.lookback,
            action_space=self.action_space,
            resets_next_step=autoreset_mode(vector) is AutoresetMode.NEXT_STEP,
            episode_id=EpisodeIds(f"{seed}/{self._name}/{index}"),
        )

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


def _closings(vector: VectorEnv[Any, Any, Any], lane: int) -> list[Closing]:
    if not isinstance(vector, SyncVectorEnv):
        return [(f"the environments of lane {lane}", vector.close)]
    vector.closed = True  # its own close would stop at the first environment that raises
    return [(f"the environment in slot {slot} of lane {lane}", env.close) for slot, env in enumerate(vector.envs)]


def _check_apart(envs: Sequence[VectorEnv[Any, Any, Any]]) -> None:
    """Raise EnvError where an environment stands in two slots: lanes may step at the same time."""
    slots = [env for vector in envs for env in (vector.envs if isinstance(vector, SyncVectorEnv) else [vector])]
    first: dict[int, int] = {}
    for slot, env in enumerate(slots):
        other = first.setdefault(id(env), slot)
        if other != slot:
            raise EnvError(f"slots {other} and {slot} were given the same environment, expected one for each")


def actions_of(lane: Lane) -> Tree:
    """What the lane's environments are to be stepped with."""
    batch = lane.batch
    actions = batch.get(Columns.ACTIONS_FOR_ENV)
    return batch[Columns.ACTIONS] if actions is None else actions
