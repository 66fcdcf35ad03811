"""Kinds of environments, with one agent each or several, and those that step in the thread that asks them to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from rollflow.nodes.env.async_pool import AsyncPool
from rollflow.nodes.env.env_source import (
    Autoreset,
    check_same_space,
    count_of,
    lane_makers,
    sizes_of,
)
from rollflow.nodes.env.lane_envs import AgentLaneMaker, LaneEnvs, check_alike, made_by
from rollflow.nodes.env.lane_source import LaneSource, check_apart
from rollflow.nodes.env.multi_agent_env import MultiAgentVectorEnv, agents_of
from rollflow.nodes.env.stepping import LaneVectorEnv, SideBySide, Stepped, autoreset_mode, close_failed
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import EnvError, located, shown
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.fragments.fragment import EpisodeIds, FragmentLayout
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.fragments.ready_lane import ReadyLane, SlotAnswers
from rollflow.stream.multi_agent.agent_part import AgentPart, VectorStep
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

TAKEN_ACTION = "rollflow.taken_action"  # of an info: the action that the environment took, not the one it was given


AgentEnvSource = Callable[[], Any] | Sequence[Callable[[], Any]] | MultiAgentVectorEnv


class OneAgent:
    """Environments with one agent each: those of gymnasium."""

    has_several = False
    noun = "slot"

    def makers(self, env: Any, num_envs: int | None, lanes: int | None, mode: Autoreset) -> Sequence[Any]:
        """Makers of every lane's environments."""
        return lane_makers(env, num_envs, lanes, mode)

    def envs_of(self, here: Sequence[LaneVectorEnv | AsyncPool]) -> Sequence[Any]:
        """The environments of every lane. Raises EnvError if one stands in two places."""
        check_apart("slots", (env for each in here if isinstance(each.env, SideBySide) for env in each.env.envs))
        check_apart("lanes", (each.env for each in here))
        return [each.env for each in here]

    def parts_of(self, envs: Sequence[Any], firsts: Sequence[int], *asked: Any) -> tuple[AgentPart, ...]:
        """The agent and its spaces. Raises EnvError if lanes differ."""
        spaces = envs[0].single_observation_space, envs[0].single_action_space
        for index, vector in enumerate(envs):
            check_same_space("observation", vector.single_observation_space, spaces[0], "lane", index)
            check_same_space("action", vector.single_action_space, spaces[1], "lane", index)
        return (AgentPart(("agent",), *spaces),)

    def lane(self, source: LaneSource, index: int, vector: Any, first_slot: int) -> Lane:
        """The lane of this number."""
        layout = self.layout(source, index, vector, source.seed)
        return Lane(index, layout, source.observation_space, source.memory(index), is_shared=source.is_shared)

    def layout(self, source: LaneSource, index: int, vector: Any, seed: int) -> FragmentLayout:
        """The layout of a lane's fragments, whose environments have this seed."""
        return FragmentLayout(
            num_slots=vector.num_envs,
            num_rows=source.fragment_length,
            lookback=source.lookback,
            action_space=source.chosen_space,
            resets_next_step=autoreset_mode(vector) is AutoresetMode.NEXT_STEP,
            episode_id=EpisodeIds(f"{seed}/rollout/{index}"),
        )

    def record(self, lane: Lane, stepped: Stepped) -> None:
        """Have a lane record what a step gave."""
        if stepped[4] and lane.layout.num_slots == 1:
            record_taken(lane, stepped[4])  # gymnasium's tuple has no names
        lane.record_step(*stepped)


class SeveralAgents:
    """Environments with several agents each."""

    has_several = True
    noun = "environment"

    def makers(self, env: Any, num_envs: int | None, lanes: int | None, mode: Autoreset) -> Sequence[Any]:
        """Makers of every lane's environments, which have no autoreset mode."""
        return agent_makers(env, num_envs, lanes)

    def envs_of(self, here: Sequence[LaneEnvs]) -> Sequence[Any]:
        """The environments of every lane. Raises EnvError if two callables gave the same one."""
        check_apart("callables", (each for envs in here for each in envs.given))
        return here

    def parts_of(self, envs: Sequence[Any], firsts: Sequence[int], *asked: Any) -> tuple[AgentPart, ...]:
        """The agents by their spaces. Raises EnvError if lanes differ, or other numbers were asked for."""
        for first_env, each in zip(firsts[1:], envs[1:], strict=True):
            with located(f"environment {first_env}"):
                check_alike(agents_of(each), agents_of(envs[0]), 0)
        num_envs, lanes = asked
        check_numbers(num_envs, lanes, envs)
        return tuple(envs[0].parts)

    def lane(
        self, source: LaneSource, index: int, envs: Any, first_env: int, mapping: Any, shared_data: Callable[..., Any]
    ) -> MultiAgentLane:
        """The lane of this number.

        mapping, shared_data    as `MultiAgentLane` has them, `shared_data` of a lane's number and a module
        """
        return MultiAgentLane(
            index,
            source.parts,
            envs.num_envs,
            first_env=first_env,
            num_rows=source.fragment_length,
            lookback=source.lookback,
            name=f"{source.seed}/rollout/{index}",
            mapping=mapping,
            shared_data=partial(shared_data, index),
            is_shared=source.is_shared,
        )

    def record(self, lane: MultiAgentLane, stepped: VectorStep) -> None:
        """Have a lane record what a step gave."""
        lane.record_step(stepped)


EnvKind = OneAgent | SeveralAgents
ONE_AGENT, SEVERAL_AGENTS = OneAgent(), SeveralAgents()


@contextmanager
def kind_of(env: Any) -> Iterator[tuple[EnvKind, Any]]:
    """The kind of the environments that a user gives, and what they are made of, in which the block makes them.

    For callables the first one is called, and has made its environment then; one that the block does not ask for is
    closed.
    """
    makers = list(env) if isinstance(env, Sequence) and not isinstance(env, str) else [env]
    is_made = isinstance(env, MultiAgentVectorEnv) or any(isinstance(each, VectorEnv) for each in makers)
    if is_made or not makers or not all(callable(each) and not isinstance(each, str) for each in makers):
        yield SEVERAL_AGENTS if isinstance(env, MultiAgentVectorEnv) else ONE_AGENT, env
        return
    first = [made_by(makers[0], 0)]
    has_agents = hasattr(first[0], "agents") and not isinstance(first[0], gym.Env)

    def make() -> Any:
        return first.pop() if first else makers[0]()

    try:
        kind = SEVERAL_AGENTS if has_agents or hasattr(first[0], "possible_agents") else ONE_AGENT
        yield kind, [make, *makers[1:]] if isinstance(env, Sequence) else make
    finally:
        for each in first:
            close_failed(each)


class Environments(LaneSource):
    """A node that steps vector environments, one per lane: takes a lane's actions, gives its observations.

        env     an environment's id, a callable or a list of callables that make one each, a
                `gymnasium.vector.VectorEnv`, or a list of those, one per lane; of several agents a callable that makes
                an environment, or a list of callables that make one each: of a `MultiAgentEnv`, or of what PettingZoo
                has; or that make a `MultiAgentVectorEnv` each, one for each lane; or such a one, which is left open
        kind    of environments: with one agent each, or several

    All else is as for `LaneSource`. An id's own vectorized form is used if it has one; other environments are
    stepped one by one. All three of gymnasium's autoreset modes give the same episodes.

    Raises EnvError also if spaces have no columns, or an environment breaks the conventions.
    """

    may_be_async = True

    def __init__(self, env: Any, *, kind: EnvKind = ONE_AGENT, **options: Any) -> None:
        super().__init__(env, kind=kind, **options)

    def finish(self) -> Iterator[Lane]:
        """The lanes that had steps under way, with these: no more steps are asked for."""
        for lane in self.lanes:
            if isinstance(lane, ReadyLane) and lane.take_rest():
                yield lane

    def close(self) -> None:
        """Close all environments that this node made itself; steps under way are counted as made."""
        for lane in self.lanes:
            if isinstance(lane, ReadyLane):
                lane.stop(is_sent=False)
        super().close()

    def _lane(self, index: int, envs: Any, first_slot: int) -> Any:
        if not isinstance(here := self._here[index - self._first_lane], AsyncPool):
            return super()._lane(index, envs, first_slot)
        layout = ONE_AGENT.layout(self, index, envs, self.seed)
        receive = partial(self._receive, index, here)
        return ReadyLane(index, layout, self.observation_space, receive, is_shared=self.is_shared)

    def _receive(self, index: int, pool: AsyncPool) -> SlotAnswers:
        """Receive answers that a lane waits for while it records, or at the end: the stall doctor names it."""
        self._steps_lane = index
        answers = pool.receive()
        self._steps_lane = -1
        return answers


def record_taken(lane: Lane, infos: Mapping[str, Any]) -> None:
    """Record the action that the environment of a lane with one slot took in the place of the module's.

    infos    of the step; an entry `TAKEN_ACTION` has the action, in the environment's space

    Raises EnvError if the environment's actions are not recorded as they are.
    """
    if not isinstance(infos, SlotInfos) or TAKEN_ACTION not in infos.of_slots.get(0, ()):
        return
    if Columns.ACTIONS_FOR_ENV in lane.batch:
        raise EnvError(
            "an environment took another action than the module's, but a module-to-env piece changes actions on their "
            "way to it: which one is to be recorded is not known; expected no such piece"
        )
    lane.replace_action(0, infos.of_slots[0].pop(TAKEN_ACTION))


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
    """Raise EnvError if other numbers of environments or lanes were asked for than were made."""
    count = sum(envs.num_envs for envs in made)
    if num_envs not in (None, count) or lanes not in (None, len(made)):
        raise EnvError(
            f"num_envs is {num_envs} and lanes is {lanes}, but {count} environments in {len(made)} lanes were made; "
            "expected them to be left out"
        )
