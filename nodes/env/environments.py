"""Environments of a rollout, with one agent or several, stepped in this process by whoever asks for the next step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from rollflow.nodes.env.async_pool import AsyncPool
from rollflow.nodes.env.env_source import (
    Autoreset,
    EnvSource,
    LaneMaker,
    check_same_space,
    count_of,
    lane_makers,
    sizes_of,
)
from rollflow.nodes.env.lane_envs import AgentLaneMaker, LaneEnvs, check_alike
from rollflow.nodes.env.lane_source import LaneSource, check_apart
from rollflow.nodes.env.multi_agent_env import MultiAgentVectorEnv, agents_of
from rollflow.nodes.env.stepping import LaneVectorEnv, SideBySide, Stepped, autoreset_mode, takes_one_seed
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import EnvError, located, shown
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.fragments.fragment import EpisodeIds, FragmentLayout
from rollflow.stream.fragments.lane import Lane, LaneMemory
from rollflow.stream.fragments.ready_lane import ReadyLane
from rollflow.stream.multi_agent.agent_part import AgentPart, VectorStep
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

TAKEN_ACTION = "rollflow.taken_action"  # of an info: the action that the environment took, not the one it was given


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

    def finish(self) -> Iterator[Lane]:
        """The lanes that had steps under way, with these: no more steps are asked for."""
        for lane in self.lanes:
            if isinstance(lane, ReadyLane) and lane.take_rest():
                yield lane

    def close(self) -> None:
        """Close all environments that this node made itself; steps under way are counted as unrecorded."""
        self.unrecorded_steps += sum(lane.in_flight for lane in self.lanes if isinstance(lane, ReadyLane))
        super().close()

    # Overridden by other ways of stepping

    def _makers(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[LaneMaker]:
        return lane_makers(env, num_envs, lanes, self._autoreset_mode)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[VectorEnv[Any, Any, Any]]:
        """One vector environment per lane."""
        here: list[LaneVectorEnv | AsyncPool] = []
        for lane, maker in enumerate(self._makers(env, num_envs, lanes)):
            here.append(
                maker.lane_env(
                    self.deviations, f"lane {self._first_lane + lane}, ", may_be_async=type(self) is Environments
                )
            )
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
            check_same_space("observation", vector.single_observation_space, self.observation_space, "lane", index)
            check_same_space("action", vector.single_action_space, self.action_space, "lane", index)

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

    def _record(self, lane: Lane, stepped: Stepped) -> None:
        if stepped[4] and lane.layout.num_slots == 1:
            record_taken(lane, stepped[4])  # gymnasium's tuple has no names
        lane.record_step(*stepped)

    def _lane(self, index: int, vector: VectorEnv[Any, Any, Any], first_slot: int) -> Lane:
        layout = self._layout(index, vector, self.seed)
        if self._here and isinstance(here := self._here[index - self._first_lane], AsyncPool):
            return ReadyLane(index, layout, self.observation_space, here.receive, is_shared=self.is_shared)
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


AgentEnvSource = Callable[[], Any] | Sequence[Callable[[], Any]] | MultiAgentVectorEnv


class AgentEnvironments(LaneSource):
    """A node that steps environments with several agents: takes a lane's actions, gives its observations.

        env    a callable that makes an environment, or a list of callables that make one each: of a `MultiAgentEnv`,
               or of what PettingZoo has; or that make a `MultiAgentVectorEnv` each, one for each lane; or such a one,
               which is left open

    All else is as for `LaneSource`. Raises EnvError also where an environment breaks the conventions.
    """

    parts: tuple[AgentPart, ...]

    def set_chosen_spaces(self, chosen: Sequence[gym.Space[Any] | None]) -> None:
        """Have `actions` recorded in the space of what modules choose, part by part; None: in the environments' own.

        Before the lanes are made.
        """
        parts = zip(self.parts, chosen, strict=True)
        self.parts = tuple(part._replace(chosen_space=space) for part, space in parts)
        self._lanes_fit = False

    def make_lanes(  # type: ignore[override]  # these take more
        self, lookback: int, mapping: Any, shared_data: Callable[[int, Any], dict[str, Any]]
    ) -> None:
        """Make lanes that look back so many agent steps (H).

        mapping, shared_data    as `MultiAgentLane` has them, `shared_data` of a lane's number and a module
        """
        self._mapping, self._shared_data = mapping, shared_data
        super().make_lanes(lookback)

    def __call__(self, actions: MultiAgentLane) -> MultiAgentLane | None:
        """Step the lane's environments with the actions that it brings."""
        lane: MultiAgentLane | None = self.hand_over(actions)
        return lane

    def describe(self) -> str:
        """Lanes, environments and agents, for `explain()`."""
        return f"{self._lanes_of('environment')} × {sum(len(part.agents) for part in self.parts)} agents"

    # What other ways of stepping do otherwise

    def _makers(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[AgentLaneMaker]:
        return agent_makers(env, num_envs, lanes)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        """The environments of every lane."""
        made = list[LaneEnvs]()
        for lane, maker in enumerate(self._makers(env, num_envs, lanes)):
            number = sum(envs.num_envs for envs in made)
            made.append(replace(maker, first_env=number).lane_env(self.deviations))
            if maker.can_travel:
                self._opened.append((f"the environments of lane {lane}", made[-1]))
        check_apart("callables", (each for envs in made for each in envs.given))
        self._here = made
        return made

    # Inside

    def _record(self, lane: MultiAgentLane, stepped: VectorStep) -> None:
        lane.record_step(stepped)

    def _lane(self, index: int, envs: Any, first_env: int) -> MultiAgentLane:
        return MultiAgentLane(
            index,
            self.parts,
            envs.num_envs,
            first_env=first_env,
            num_rows=self.fragment_length,
            lookback=self.lookback,
            name=f"{self.seed}/rollout/{index}",
            mapping=self._mapping,
            shared_data=partial(self._shared_data, index),
            is_shared=self.is_shared,
        )

    def _look_at_envs(self, num_envs: int | None, lanes: int | None) -> None:
        self.parts = self.envs[0].parts
        for first_env, envs in zip(self.first_slots()[1:], self.envs[1:], strict=True):
            with located(f"environment {first_env}"):
                check_alike(agents_of(envs), agents_of(self.envs[0]), 0)
        check_numbers(num_envs, lanes, self.envs)


def agent_makers(env: Any, num_envs: int | None, lanes: int | None) -> list[AgentLaneMaker]:
    """Makers of every lane's environments. Raises EnvError for what makes none."""
    if isinstance(env, MultiAgentVectorEnv):
        return [AgentLaneMaker(env, 0)]
    if isinstance(env, Sequence) and not isinstance(env, str):
        if num_envs not in (None, len(env)):
            raise EnvError(f"num_envs is {num_envs}, but there are {len(env)} callables; expected it to be left out")
        makers = list(env)
    else:
        makers = [env] * count_of(env, num_envs)
    for each in makers:
        if not callable(each) or (hasattr(each, "step") and not isinstance(each, type)):
            raise EnvError(
                f"env is {shown(each)}, expected a callable that makes an environment, such as lambda: MyEnv(), a "
                "list of those, or a MultiAgentVectorEnv"
            )
    sizes = sizes_of(len(makers), lanes)
    firsts = accumulate(sizes, initial=0)
    return [AgentLaneMaker(makers[first : first + size], first) for size, first in zip(sizes, firsts, strict=False)]


def check_numbers(num_envs: int | None, lanes: int | None, made: Sequence[Any]) -> None:
    """Raise EnvError where other numbers of environments or lanes were asked for than were made."""
    count = sum(envs.num_envs for envs in made)
    if num_envs not in (None, count) or lanes not in (None, len(made)):
        raise EnvError(
            f"num_envs is {num_envs} and lanes is {lanes}, but {count} environments in {len(made)} lanes were made; "
            "expected them to be left out"
        )
