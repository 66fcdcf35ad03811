"""The environments of a multi-agent rollout, stepped in this process by whoever asks for the next step."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from rollflow.nodes.closing import close_all, closing_on_error
from rollflow.nodes.env_source import sizes_of
from rollflow.nodes.lane_source import LaneSource
from rollflow.nodes.multi_agent.array_envs import ArrayEnvs
from rollflow.nodes.multi_agent.array_vector import MultiAgentVectorEnv
from rollflow.nodes.multi_agent.dict_vector import check_alike, made_by
from rollflow.nodes.multi_agent.lane_envs import lane_envs
from rollflow.nodes.multi_agent.multi_agent_env import agents_of
from rollflow.nodes.stepping import seeds_for
from rollflow.stream.errors import EnvError, RunError, located
from rollflow.stream.multi_agent.multi_agent_lane import AgentMapping, MultiAgentLane
from rollflow.stream.multi_agent.vector_step import AgentEnvs

AgentEnvSource = Callable[[], Any] | Sequence[Callable[[], Any]] | AgentEnvs


class AgentEnvironments(LaneSource):
    """A node that steps environments with several agents: takes a lane's actions, gives its observations.

        env                a callable that makes an environment, or a list of callables that make one each: of a
                           `MultiAgentEnv`, or of what PettingZoo has; or that make a `MultiAgentVectorEnv` each, which
                           is a lane by itself; or such a one, which is left open
        num_envs           environments in all; taken from `env` where that is a list or has vector environments
        lanes              groups of environments that step on their own; None: one, or one for each vector environment
        fragment_length    vector steps in a fragment (T)
        seed               of every environment
        name               what the episode ids are derived from, beside the seed

    Raises EnvError when an environment can't be made, or breaks the conventions.
    """

    def __init__(
        self,
        env: Any,
        *,
        num_envs: int | None = None,
        lanes: int | None = None,
        fragment_length: int = 128,
        seed: int = 0,
        name: str = "rollout",
    ) -> None:
        super().__init__(seed, fragment_length)
        self.lanes: list[MultiAgentLane] = []
        self._name = name
        self._opened: list[Any] = []  # made here, and to be closed here
        self.envs = self._made(env, num_envs, lanes)
        self.parts = self.envs[0].parts
        self.num_envs = sum(envs.num_envs for envs in self.envs)
        with closing_on_error(self.close):
            self._check_alike()
            if num_envs not in (None, self.num_envs):
                raise EnvError(
                    f"num_envs is {num_envs}, but the callables made {self.num_envs} environments; expected it to be "
                    "left out"
                )

    def make_lanes(
        self, lookback: int, mapping: AgentMapping, shared_data: Callable[[int, Any], dict[str, Any]]
    ) -> None:
        """Have lanes that look back so many agent steps (H). Before the first step only.

        mapping, shared_data    as `MultiAgentLane` has them, `shared_data` of a lane's number and a module
        """
        if self.is_started:
            raise RunError("these environments have been started: their lookback stays as it is")
        self._lookback, self._mapping, self._shared_data = lookback, mapping, shared_data
        self.lanes = [
            self._lane(index, envs, first_env)
            for index, (envs, first_env) in enumerate(zip(self.envs, self.first_slots(), strict=True))
        ]

    def start(self) -> Iterator[MultiAgentLane]:
        """Reset every environment; each lane sets out with its first observations. Raises RunError a second time."""
        self._begin()
        for lane, envs, first_env in zip(self.lanes, self.envs, self.first_slots(), strict=True):
            try:
                lane.reset(*envs.reset(seeds_for(self.seed, first_env, envs.num_envs)))
            except Exception as error:
                error.add_note(f"lane {lane.index}, the first reset")
                raise
            yield lane

    def __call__(self, actions: MultiAgentLane) -> MultiAgentLane | None:
        """Step the lane's environments with the actions that it brings."""
        lane = actions
        try:
            lane.record_step(self.envs[lane.index].step(lane.actions))
        except Exception as error:
            error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}")
            raise
        return lane

    def describe(self) -> str:
        """Lanes, environments and agents, for `explain()`."""
        count, sizes = len(self.envs), sorted({envs.num_envs for envs in self.envs})
        agents = sum(len(part.agents) for part in self.parts)
        told = " or ".join(map(str, sizes))
        names = f"lane{'s' if count > 1 else ''}", f"environment{'s' if sizes != [1] else ''}"
        return f"{count} {names[0]} × {told} {names[1]} × {agents} agents"

    def close(self) -> None:
        """Close the environments that this node made itself, all of them, also where one raises."""
        self.is_closed = True
        opened, self._opened = self._opened, []
        close_all((f"the environments of lane {lane}", envs.close) for lane, envs in enumerate(opened))

    # What other ways of stepping do otherwise

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        """The environments of every lane."""
        if isinstance(env, MultiAgentVectorEnv):
            return _ready(env, num_envs, lanes)
        given = lane_makers(env, num_envs, lanes)
        made = made_by(given[0][0], 0)
        if lanes is None and isinstance(made, MultiAgentVectorEnv):
            given = [[make] for make in given[0]]
        given[0][0], first = lambda: made, 0
        with closing_on_error(self.close):
            for makers in given:
                self._opened.append(lane_envs(makers, first_env=first))
                first += self._opened[-1].num_envs
        return list(self._opened)

    # Inside

    def _lane(self, index: int, envs: AgentEnvs, first_env: int) -> MultiAgentLane:
        return MultiAgentLane(
            index,
            envs.parts,
            envs.num_envs,
            first_env=first_env,
            num_rows=self.fragment_length,
            lookback=self._lookback,
            name=f"{self.seed}/{self._name}/{index}",
            mapping=self._mapping,
            shared_data=partial(self._shared_data, index),
        )

    def _check_alike(self) -> None:
        for first_env, envs in zip(self.first_slots()[1:], self.envs[1:], strict=True):
            with located(f"environment {first_env}"):
                check_alike(agents_of(envs), agents_of(self.envs[0]), 0)


def _ready(env: MultiAgentVectorEnv, num_envs: int | None, lanes: int | None) -> list[ArrayEnvs]:
    if num_envs not in (None, env.num_envs) or lanes not in (None, 1):
        raise EnvError(
            f"the vector environment has {env.num_envs} environments in one lane, but num_envs is {num_envs} and "
            f"lanes is {lanes}; expected them to be left out"
        )
    return [ArrayEnvs(env)]


def lane_makers(env: Any, num_envs: int | None, lanes: int | None) -> list[list[Any]]:
    """The callables of every lane. Raises EnvError for what are none."""
    if isinstance(env, Sequence) and not isinstance(env, str):
        if num_envs not in (None, len(env)):
            raise EnvError(f"num_envs is {num_envs}, but there are {len(env)} callables; expected it to be left out")
        makers = list(env)
    else:
        makers = [env] * (1 if num_envs is None else num_envs)
    for each in makers:
        if not callable(each) or (hasattr(each, "step") and not isinstance(each, type)):
            raise EnvError(
                f"env is {each!r:.200}, expected a callable that makes an environment, such as lambda: MyEnv(), a "
                "list of those, or a MultiAgentVectorEnv"
            )
    left = iter(makers)
    return [list(islice(left, size)) for size in sizes_of(len(makers), lanes)]
