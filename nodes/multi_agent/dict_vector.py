"""Dict environments side by side."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.closing import Closing, close_all, closing_on_error
from rollflow.nodes.env_source import given_by
from rollflow.nodes.multi_agent.agent_slots import AgentSlots
from rollflow.nodes.multi_agent.agent_states import AgentStates
from rollflow.nodes.multi_agent.array_vector import MultiAgentVectorEnv
from rollflow.nodes.multi_agent.given_actions import given_actions
from rollflow.nodes.multi_agent.multi_agent_env import AgentSpaces, agent_spaces
from rollflow.nodes.multi_agent.observation_rows import ObservationRows
from rollflow.nodes.multi_agent.petting_zoo import adapted
from rollflow.nodes.multi_agent.places import Places
from rollflow.nodes.multi_agent.told import Told, told_by_resets, told_by_steps
from rollflow.nodes.stepping import Turn, nothing
from rollflow.stream.errors import EnvError, located, noted
from rollflow.stream.infos import copied
from rollflow.stream.multi_agent.agent_part import parts_of
from rollflow.stream.multi_agent.vector_step import Actions, Observed, PartStep, VectorStep

Infos = Sequence[Mapping[Any, Mapping[str, Any]]]


class MultiAgentEnvs:
    """N dict environments that step one after the other, and are reset where their episode ends.

        makers       one callable for each, which makes a `MultiAgentEnv`, one of RLlib's, or one of PettingZoo's
        first_env    the number of the first of them, in errors

        turn    called when resets within a step begin, and when they have ended

    Observations and rewards are copies; infos are the environments' own. Raises EnvError for environments that can't be
    stepped together, and, with environment, env step and agent, for whatever breaks the conventions of `MultiAgentEnv`.
    """

    def __init__(self, makers: Sequence[Callable[[], Any]], *, first_env: int = 0) -> None:
        self.envs: list[Any] = []
        self.turn: Turn = nothing
        self._opened: list[Closing] = []
        self._first_env = first_env
        with closing_on_error(self.close):
            self._make(makers)
            with located(f"environment {first_env}"):
                spaces = agent_spaces(self.envs[0])
                self.parts = parts_of(*spaces)
            for env, each in enumerate(self.envs[1:], first_env + 1):
                with located(f"environment {env}"):
                    check_alike(agent_spaces(each), spaces, first_env)
        self.num_envs = len(self.envs)
        self.possible_agents, self.observation_spaces, self.action_spaces = spaces
        self._slots = AgentSlots(self.parts, self.num_envs)
        self._places = Places(self._slots, first_env)
        self._states = AgentStates(self._slots, self._places)
        self._rows = [ObservationRows(part.observation_space) for part in self.parts]
        self._acting: list[NDArray[np.int64] | None] = [np.zeros(0, np.int64) for _ in self.parts]

    def reset(self, seeds: Sequence[int] | None = None) -> tuple[Sequence[Observed], Infos]:
        """Begin an episode in every environment, each with a seed of its own, or with the generators that there are.

        Returns the first observations per part, and per environment agent -> info; () where all are empty.
        """
        if seeds is not None and len(seeds) != self.num_envs:
            raise EnvError(f"got {len(seeds)} seeds, expected one for each of {self.num_envs} environments")
        first, infos = self._reset(np.arange(self.num_envs), seeds)
        self._set_acting()
        return first, infos

    def step(self, actions: Actions) -> VectorStep:
        """Step every environment with the actions of all agents that must act, and reset those whose episode ends."""
        if self._places.steps[0] < 0:
            raise EnvError("step before the first reset")
        given = given_actions(actions, self._acting, self._slots, self._places)
        steps = []
        env = 0
        try:
            for each, env_actions in zip(self.envs, given, strict=True):
                steps.append(each.step(env_actions))
                env += 1
        except Exception as error:
            error.add_note(self._places.at(env))
            raise
        told = told_by_steps(steps, self._slots, self._places)
        ended = self._states.step(told)
        rewards = np.zeros(self._slots.count, np.float32)
        rewards[told.rewarded] = told.rewards
        parts = [
            PartStep(observed, rewards[first:stop], ended.terminateds[first:stop], ended.truncateds[first:stop])
            for (first, stop), observed in zip(pairwise(self._slots.bounds), self._observed(told), strict=True)
        ]
        infos = told.infos
        self._places.steps += 1
        first_observed: Sequence[Observed] = ()
        first_infos: Infos = ()
        if len(ended.envs):
            infos = copied(infos)  # the reset may write over them
            first_observed, first_infos = self._reset_ended(ended.envs)
        self._set_acting()
        return VectorStep(parts, ended.envs, ended.truncated, first_observed, infos, first_infos)

    def close(self) -> None:
        """Close the environments, all of them, also where one raises."""
        opened, self._opened = self._opened, []
        close_all(opened)

    # Inside

    def _make(self, makers: Sequence[Callable[[], Any]]) -> None:
        if not len(makers):
            raise EnvError("there are no makers of environments, expected at least one")
        for env, make in enumerate(makers, self._first_env):
            given = made_by(make, env)
            with noted(f"in the callable for environment {env}"):
                each = adapted(_apart(given))
            if each is None:
                raise EnvError(f"the callable for environment {env} gave None, expected a MultiAgentEnv")
            if any(each is other for other in self.envs):
                raise EnvError(f"the callable for environment {env} gave one that another has already given")
            self.envs.append(each)
            close = getattr(each, "close", None)
            if callable(close):
                self._opened.append((f"environment {env}", close))

    def _reset_ended(self, envs: NDArray[np.int64]) -> tuple[list[Observed], Infos]:
        self.turn()
        try:
            return self._reset(envs, None)
        finally:
            self.turn()

    def _reset(self, envs: NDArray[np.int64], seeds: Sequence[int] | None) -> tuple[list[Observed], Infos]:
        numbers = envs.tolist()
        self._places.steps[envs] = -1
        resets = []
        for place, env in enumerate(numbers):
            try:
                resets.append(self.envs[env].reset(seed=None if seeds is None else seeds[place], options=None))
            except Exception as error:
                error.add_note(self._places.at(env))
                raise
        told = told_by_resets(numbers, resets, self._slots, self._places)
        self._states.reset(envs, told)
        first = self._observed(told)
        self._places.steps[envs] = 0
        return first, told.infos

    def _observed(self, told: Told) -> list[Observed]:
        observed = []
        for part, (rows, share) in enumerate(zip(self._rows, self._slots.split(told.numbers), strict=True)):
            numbers = told.numbers[share]
            items = told.items[share] if len(self.parts) > 1 else told.items
            observations = rows(items, partial(self._whose, numbers))
            observed.append(Observed(self._slots.slots_of(part, numbers), observations))
        return observed

    def _whose(self, numbers: NDArray[np.int64], place: int) -> str:
        return self._places.of(int(numbers[place]))

    def _set_acting(self) -> None:
        acting = self._states.acting
        shares = enumerate(self._slots.split(acting))
        self._acting = [self._slots.slots_of(part, acting[share]) for part, share in shares]


def made_by(make: Callable[[], Any], env: int) -> Any:
    """What a callable makes; `env` is the number of the environment, in errors. Raises EnvError where it raises."""
    return given_by(make, f"the callable for environment {env}", "a MultiAgentEnv")


def _apart(env: Any) -> Any:
    """The environment. Raises EnvError where it is many already."""
    if isinstance(env, MultiAgentVectorEnv):
        with closing_on_error(env.close):
            raise EnvError(
                f"the callable made a {type(env).__name__}, a MultiAgentVectorEnv of {env.num_envs} environments, "
                "which is a lane by itself; expected num_envs to be left out, and as many lanes as there are callables"
            )
    return env


def check_alike(spaces: AgentSpaces, first: AgentSpaces, first_env: int) -> None:
    """Raise EnvError where an environment's agents or spaces are not those of the one with the number `first_env`."""
    if spaces.agents != first.agents:
        raise EnvError(
            f"its agents are {list(spaces.agents)}, expected those of environment {first_env}, {list(first.agents)}"
        )
    for kind, own, expected in zip(("observation", "action"), spaces[1:], first[1:], strict=True):
        for agent, space in own.items():
            if space != expected[agent]:
                raise EnvError(
                    f"agent {agent!r}: its {kind} space is {space}, expected that of environment {first_env}, "
                    f"{expected[agent]}"
                )
