"""The environments of a multi-agent rollout, stepped in this process by whoever asks for the next step."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import gymnasium as gym

from rollflow.nodes.env.env_source import count_of, sizes_of
from rollflow.nodes.env.lane_source import LaneSource, check_apart
from rollflow.nodes.env.multi_agent.lane_envs import AgentLaneMaker, EnvMaker, LaneEnvs, check_alike, first_made
from rollflow.nodes.env.multi_agent.multi_agent_env import MultiAgentVectorEnv, agents_of
from rollflow.stream.data.errors import EnvError, located, shown
from rollflow.stream.multi_agent.agent_part import Actions, AgentPart, VectorStep
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

AgentEnvSource = Callable[[], Any] | Sequence[Callable[[], Any]] | MultiAgentVectorEnv


class AgentEnvironments(LaneSource):
    """A node that steps environments with several agents: takes a lane's actions, gives its observations.

        env    a callable that makes an environment, or a list of callables that make one each: of a `MultiAgentEnv`,
               or of what PettingZoo has; or that make a `MultiAgentVectorEnv` each, which is a lane by itself; or such
               a one, which is left open

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
        first, made = first_made(env), list[LaneEnvs]()
        with nullcontext() if first is None else first:
            for lane, maker in enumerate(agent_makers(env, num_envs, lanes, first)):
                number = sum(envs.num_envs for envs in made)
                made.append(replace(maker, first_env=number).lane_env(self.deviations))
                if maker.can_travel:
                    self._opened.append((f"the environments of lane {lane}", made[-1]))
            check_apart("callables", (each for envs in made for each in envs.given))
        self._here = made
        return made

    # Inside

    def _actions_of(self, lane: MultiAgentLane) -> Actions:
        return lane.actions

    def _record(self, lane: MultiAgentLane, stepped: VectorStep) -> None:
        lane.record_step(stepped)

    def _lane(self, index: int, envs: Any, first_env: int) -> MultiAgentLane:
        lane = MultiAgentLane(
            index,
            self.parts,
            envs.num_envs,
            first_env=first_env,
            num_rows=self.fragment_length,
            lookback=self.lookback,
            name=f"{self.seed}/rollout/{index}",
            mapping=self._mapping,
            shared_data=partial(self._shared_data, index),
        )
        if self.is_shared:
            lane.share()
        return lane

    def _look_at_envs(self, num_envs: int | None, lanes: int | None) -> None:
        self.parts = self.envs[0].parts
        for first_env, envs in zip(self.first_slots()[1:], self.envs[1:], strict=True):
            with located(f"environment {first_env}"):
                check_alike(agents_of(envs), agents_of(self.envs[0]), 0)
        check_numbers(num_envs, lanes, self.envs)


def agent_makers(
    env: Any, num_envs: int | None, lanes: int | None, first: EnvMaker | None = None
) -> list[AgentLaneMaker]:
    """Makers of every lane's environments. Raises EnvError for what makes none.

    first    made by the first callable; where that is a vector environment, each callable's is a lane by itself
    """
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
    is_split = first is not None and first.is_vector and lanes is None
    left = iter(makers if first is None else [first, *makers[1:]])
    sizes = [1] * len(makers) if is_split else sizes_of(len(makers), lanes)
    firsts = accumulate(sizes, initial=0)
    return [AgentLaneMaker(list(islice(left, size)), number) for size, number in zip(sizes, firsts, strict=False)]


def check_numbers(num_envs: int | None, lanes: int | None, made: Sequence[Any]) -> None:
    """Raise EnvError where other numbers of environments or lanes were asked for than were made."""
    count = sum(envs.num_envs for envs in made)
    if num_envs not in (None, count) or lanes not in (None, len(made)):
        raise EnvError(
            f"num_envs is {num_envs} and lanes is {lanes}, but {count} environments in {len(made)} lanes were made; "
            "expected them to be left out"
        )
