"""Environments of a rollout, stepped in this process."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.env.env_source import Autoreset, EnvSource, lane_makers
from rollflow.nodes.env.lane_source import LaneSource, check_apart
from rollflow.nodes.env.stepping import LaneVectorEnv, SideBySide, Stepped, autoreset_mode, takes_one_seed
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import EnvError, RunError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.tree import Tree
from rollflow.stream.fragments.fragment import EpisodeIds, FragmentLayout
from rollflow.stream.fragments.lane import Lane, LaneMemory

TAKEN_ACTION = "rollflow.taken_action"  # of an info: the action that the environment took, not the one it was given


def actions_of(lane: Lane) -> Tree:
    """The actions, `any[N, ...]`, that the lane's environments are stepped with."""
    batch = lane.batch
    actions = batch.get(Columns.ACTIONS_FOR_ENV)
    return batch[Columns.ACTIONS] if actions is None else actions


class Environments(LaneSource):
    """A node that steps vector environments, one per lane: takes a lane's actions, gives its observations.

        env                an environment's id, a callable or a list of callables that make one each, a
                           `gymnasium.vector.VectorEnv`, or a list of those, one per lane
        num_envs           slots in all; taken from `env` where that is a list or a vector environment
        lanes              groups of slots that step on their own; None: one, or one for each vector environment
        fragment_length    vector steps in a fragment (T)
        lookback           steps of the fragment before that each fragment begins with (H)
        seed               of every slot's environment
        name               part of the episode ids, beside the seed
        slot_seeds         one seed for each slot's environment; None: they follow from `seed`
        first_lane,        numbers of the first lane and slot, where other lanes of the rollout are elsewhere
        first_slot
        autoreset_mode     of the vector environments, as gymnasium takes it; None: SAME_STEP for those that are made
                           here of plain environments, and their own for all others

    An id's own vectorized form is used where it has one; other environments are stepped one by one. All three of
    gymnasium's autoreset modes give the same episodes.

    Raises EnvError when an environment can't be made, or its spaces have no columns. Raises ValueError for `slot_seeds`
    that are not one for each slot, and where a vector environment takes one seed for all of its slots.
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
        slot_seeds: Sequence[int] | None = None,
        name: str = "rollout",
        first_lane: int = 0,
        first_slot: int = 0,
        autoreset_mode: Autoreset = None,
    ) -> None:
        super().__init__(seed, fragment_length, slot_seeds, name, first_lane, first_slot)
        self.lookback = -1  # not set yet
        self.lanes: list[Lane] = []
        self.is_shared = False
        self._autoreset_mode = autoreset_mode
        self.envs = self._made(env, num_envs, lanes)
        first = self.envs[0]
        self.observation_space: gym.Space[Any] = first.single_observation_space
        self.action_space: gym.Space[Any] = first.single_action_space
        self.chosen_space = self.action_space  # of the module's choices, which are recorded
        self.num_envs = sum(vector.num_envs for vector in self.envs)
        with closing_on_error(self._close_opened):
            self._check_slot_seeds(self.num_envs)
            for index, vector in enumerate(self.envs):
                self._check_spaces(vector, index)
        self.set_lookback(checked_count("lookback", lookback, 0))

    def set_lookback(self, lookback: int) -> None:
        """Set the steps of the fragment before that each fragment begins with (H). Before the first step only."""
        if lookback == self.lookback:
            return
        self._refuse_if_started("their lookback")
        self.lookback = lookback
        self._make_lanes()

    def set_chosen_space(self, space: gym.Space[Any]) -> None:
        """Set the space of the module's choices, in which `actions` are recorded. Before the first step only."""
        if space == self.chosen_space:
            return
        self._refuse_if_started("the space of recorded actions")
        self.chosen_space = space
        self._make_lanes()

    def share(self) -> None:
        """Put the columns into memory that other processes on this host can map. Before the first step only."""
        self._refuse_if_started("their memory")
        if not self.is_shared:
            self.is_shared = True
            self._make_lanes()

    def __call__(self, actions: Lane) -> Lane | None:
        """Step the lane's environments with the actions that it brings."""
        lane: Lane = self._step_here(actions)
        return lane

    # Overridden by other ways of stepping

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[VectorEnv[Any, Any, Any]]:
        """One vector environment per lane."""
        here: list[LaneVectorEnv] = []
        with closing_on_error(self._close_opened):
            for lane, maker in enumerate(lane_makers(env, num_envs, lanes, self._autoreset_mode)):
                here.append(maker.lane_env(self.deviations, f"lane {self._first_lane + lane}, "))
                if maker.can_travel:
                    self._opened.append((f"the environments of lane {lane}", here[-1]))
            check_apart("slots", (env for each in here if isinstance(each.env, SideBySide) for env in each.env.envs))
            check_apart("lanes", (each.env for each in here))
        self._here = here
        return [each.env for each in here]

    def _memory(self, index: int) -> LaneMemory | None:
        """The memory of a lane's columns where its environments write to it themselves, else None."""
        return None

    # Inside

    def _refuse_if_started(self, what: str) -> None:
        if self.is_started:
            raise RunError(f"these environments have been started: {what} stays as it is")

    def _check_slot_seeds(self, num_envs: int) -> None:
        super()._check_slot_seeds(num_envs)
        if self.slot_seeds is None:
            return
        for lane, env in enumerate(self.envs):
            if env.num_envs > 1 and takes_one_seed(env):
                raise ValueError(
                    f"seed is a list, but the vector environment of lane {lane} takes one seed for its {env.num_envs} "
                    "slots; expected one whole number, one slot in each lane (lanes=num_envs), or environments that "
                    "step one by one (env=lambda: gymnasium.make(…))"
                )

    _actions_of = staticmethod(actions_of)

    def _record(self, lane: Lane, stepped: Stepped) -> None:
        if lane.layout.num_slots == 1:
            record_taken(lane, stepped[4])  # gymnasium's tuple has no names
        lane.record_step(*stepped)

    def _lane(self, index: int, vector: VectorEnv[Any, Any, Any], first_slot: int) -> Lane:
        layout = self._layout(index, vector, self.seed)
        return Lane(index, layout, self.observation_space, self._memory(index), is_shared=self.is_shared)

    def _layout(self, index: int, vector: VectorEnv[Any, Any, Any], seed: int) -> FragmentLayout:
        return FragmentLayout(
            num_slots=vector.num_envs,
            num_rows=self.fragment_length,
            lookback=self.lookback,
            action_space=self.chosen_space,
            resets_next_step=autoreset_mode(vector) is AutoresetMode.NEXT_STEP,
            episode_id=EpisodeIds(f"{seed}/{self._name}/{index}"),
        )

    def _check_spaces(self, env: VectorEnv[Any, Any, Any], index: int) -> None:
        for kind, space, first in (
            ("observation", env.single_observation_space, self.observation_space),
            ("action", env.single_action_space, self.action_space),
        ):
            if space != first:
                raise EnvError(
                    f"environment of lane {index}: its {kind} space is {space}, expected that of lane 0, {first}"
                ).see("spaces")


def record_taken(lane: Lane, infos: Mapping[str, Any]) -> None:
    """Record the action that the environment of a lane with one slot took in the place of the module's.

    infos    of the step; an entry `TAKEN_ACTION` has the action, in the environment's space

    Raises EnvError where the environment's actions are not recorded as they are.
    """
    if not isinstance(infos, SlotInfos) or TAKEN_ACTION not in infos.dicts[0]:
        return
    if Columns.ACTIONS_FOR_ENV in lane.batch:
        raise EnvError(
            "an environment took another action than the module's, but a module-to-env piece changes actions on their "
            "way to it: which one is to be recorded is not known; expected no such piece"
        )
    lane.replace_action(0, infos.dicts[0].pop(TAKEN_ACTION))
