"""Environments of a rollout, stepped in this process."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from rollflow.nodes.env.env_source import Autoreset, EnvSource, LaneMaker, check_same_space, lane_makers
from rollflow.nodes.env.lane_source import LaneSource, check_apart
from rollflow.nodes.env.stepping import LaneVectorEnv, SideBySide, Stepped, autoreset_mode, takes_one_seed
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import EnvError
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

        env               an environment's id, a callable or a list of callables that make one each, a
                          `gymnasium.vector.VectorEnv`, or a list of those, one per lane
        autoreset_mode    of the vector environments, as gymnasium takes it; None: SAME_STEP for those that are made
                          here of plain environments, and their own for all others

    All else is as for `LaneSource`. An id's own vectorized form is used where it has one; other environments are
    stepped one by one. All three of gymnasium's autoreset modes give the same episodes.

    Raises EnvError also where spaces have no columns, and ValueError where a vector environment takes one seed for all
    of its slots, and there are `slot_seeds`.
    """

    def __init__(self, env: EnvSource, *, autoreset_mode: Autoreset = None, **options: Any) -> None:
        self._autoreset_mode = autoreset_mode
        super().__init__(env, **options)

    def set_chosen_space(self, space: gym.Space[Any]) -> None:
        """Set the space of the module's choices, in which `actions` are recorded. Before the lanes are made."""
        self.chosen_space, self._lanes_fit = space, False

    def __call__(self, actions: Lane) -> Lane | None:
        """Step the lane's environments with the actions that it brings."""
        lane: Lane | None = self.hand_over(actions)
        return lane

    # Overridden by other ways of stepping

    def _makers(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[LaneMaker]:
        return lane_makers(env, num_envs, lanes, self._autoreset_mode)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[VectorEnv[Any, Any, Any]]:
        """One vector environment per lane."""
        here: list[LaneVectorEnv] = []
        for lane, maker in enumerate(self._makers(env, num_envs, lanes)):
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

    def _look_at_envs(self, num_envs: int | None, lanes: int | None) -> None:
        first = self.envs[0]
        self.observation_space: gym.Space[Any] = first.single_observation_space
        self.action_space: gym.Space[Any] = first.single_action_space
        self.chosen_space = self.action_space  # of the module's choices, which are recorded
        for index, vector in enumerate(self.envs):
            self._check_spaces(vector, index)

    def _check_slot_seeds(self) -> None:
        super()._check_slot_seeds()
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
            episode_id=EpisodeIds(f"{seed}/rollout/{index}"),
        )

    def _check_spaces(self, env: VectorEnv[Any, Any, Any], index: int) -> None:
        for kind, space, first in (
            ("observation", env.single_observation_space, self.observation_space),
            ("action", env.single_action_space, self.action_space),
        ):
            check_same_space(kind, space, first, "lane", index)


def record_taken(lane: Lane, infos: Mapping[str, Any]) -> None:
    """Record the action that the environment of a lane with one slot took in the place of the module's.

    infos    of the step; an entry `TAKEN_ACTION` has the action, in the environment's space

    Raises EnvError where the environment's actions are not recorded as they are.
    """
    if not isinstance(infos, SlotInfos) or TAKEN_ACTION not in infos.of_slots.get(0, ()):
        return
    if Columns.ACTIONS_FOR_ENV in lane.batch:
        raise EnvError(
            "an environment took another action than the module's, but a module-to-env piece changes actions on their "
            "way to it: which one is to be recorded is not known; expected no such piece"
        )
    lane.replace_action(0, infos.of_slots[0].pop(TAKEN_ACTION))
