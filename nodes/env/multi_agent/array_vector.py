"""Environments with several agents that are vectorized already: arrays in, arrays out, no agent by itself."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.env.multi_agent.multi_agent_env import agents_of
from rollflow.nodes.env.multi_agent.step_validation import check_infos
from rollflow.nodes.env.observation_check import CHECKED_STEPS, Deviations, checks_of
from rollflow.nodes.env.stepping import Turn
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.data.space import item_of
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.multi_agent.agent_part import Actions, AgentPart, Observed, PartStep, Spaces, VectorStep, parts_of
from rollflow.stream.multi_agent.agent_states import AgentNumbers

AgentInfos = Sequence[Mapping[Any, Mapping[str, Any]]]


class ArrayStep(NamedTuple):
    """Arrays that one step of N environments gave, per part of A agents; E of their episodes ended with it."""

    observations: Sequence[Tree]  # any[N, A, ...]: after the step; of an episode that ended, the last
    rewards: Sequence[NDArray[Any]]  # number[N, A]
    terminateds: NDArray[np.bool_]  # bool[N]
    truncateds: NDArray[np.bool_]  # bool[N]
    first: Sequence[Tree] = ()  # any[E, A, ...]: where episodes ended, the next ones' first observations; () if E is 0
    infos: AgentInfos = ()  # per environment: agent -> info; () where there are none
    first_infos: AgentInfos = ()  # per environment whose episode ended; () likewise


class MultiAgentVectorEnv(ABC):
    """N environments whose agents all act in every step, and whose episodes end for all agents at once.

        num_envs              N
        possible_agents       the agents of each environment
        observation_spaces    agent -> space of its observations
        action_spaces         agent -> space of its actions

    Agents with the same two spaces are one of `parts`, in the order of `possible_agents`. Actions and observations come
    per part, as trees of arrays `any[N, A, ...]`: environments first, then the part's agents. An episode that ends is
    followed by the next one in the same step. Arrays that are returned may be written over by the next step.
    """

    num_envs: int
    possible_agents: Sequence[Any]
    observation_spaces: Spaces
    action_spaces: Spaces

    @cached_property
    def parts(self) -> tuple[AgentPart, ...]:
        """The parts, in the order of their first agents."""
        return parts_of(self.possible_agents, self.observation_spaces, self.action_spaces)

    @abstractmethod
    def reset_arrays(self, seeds: Sequence[int] | None) -> tuple[Sequence[Tree], AgentInfos]:
        """Begin an episode everywhere, with a seed for each of N, or with the generators that there are.

        Returns the first observations per part, any[N, A, ...], and per environment agent -> info; () for none.
        """

    @abstractmethod
    def step_arrays(self, actions: Sequence[Tree]) -> ArrayStep:
        """Take everybody's actions, per part any[N, A, ...]."""

    def close(self) -> None:
        """Give back what the environments hold."""
        return None


class ArrayEnvs:
    """A `MultiAgentVectorEnv`, told in vector steps: views on its arrays, whatever the number of agents.

    first_env     the number of the first environment, in errors
    deviations    of observations from their space; None: of this lane alone

    Raises EnvError for arrays that do not fit the spaces, rewards that are no finite numbers, infos that are no dicts
    by agents, and actions that are not everybody's.
    """

    def __init__(self, env: MultiAgentVectorEnv, *, first_env: int = 0, deviations: Deviations | None = None) -> None:
        self.env, self.given, self.parts = env, [env], env.parts
        self.possible_agents, self.observation_spaces, self.action_spaces = agents_of(env)
        if not is_whole(env.num_envs) or env.num_envs < 1:
            raise EnvError(f"'num_envs' is {env.num_envs!r}, expected a whole number, 1 or more")
        self.num_envs = int(env.num_envs)
        agents = [part.agents for part in self.parts]
        self._slots, self._first_env = AgentNumbers(agents, self.num_envs, first_env), first_env
        self._sizes = [len(part.agents) for part in self.parts]
        self._checks = checks_of(self.parts, deviations)
        self._steps_made = 0
        self._items = [item_of(part.observation_space) for part in self.parts]

    def tell_resets(self, turn: Turn) -> bool:
        """Return False: resets can't be told from the step that they are in."""
        return False

    def reset(self, seeds: Sequence[int] | None = None) -> tuple[Sequence[Observed], AgentInfos]:
        """Begin an episode in every environment."""
        self._slots.steps[:] = -1
        answer = self.env.reset_arrays(seeds)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvError(
                f"environments from {self._first_env}: reset_arrays gave a {type(answer).__name__}, expected a tuple: "
                "observations per part, and infos, () where there are none"
            )
        observations, infos = answer
        observed = [Observed(None, tree) for tree in self._flat(observations, self.num_envs, "observations")]
        self._check(observations)
        self._slots.steps[:] = 0
        return observed, self._checked_infos(infos, range(self.num_envs), "infos")

    def step(self, actions: Actions) -> VectorStep:
        """Step every environment with everybody's actions."""
        made = self.env.step_arrays(self._by_env(actions))
        if not isinstance(made, ArrayStep):
            raise EnvError(
                f"environments from {self._first_env}: step_arrays gave a {type(made).__name__}, expected an ArrayStep"
            )
        observations = self._flat(made.observations, self.num_envs, "observations")
        if self._steps_made in CHECKED_STEPS:
            self._check(made.observations)
        self._steps_made += 1
        terminateds = self._flags(made.terminateds, "terminateds")
        truncateds = self._flags(made.truncateds, "truncateds")
        if len(made.rewards) != len(self.parts):
            raise EnvError(f"rewards of {len(made.rewards)} parts, expected {len(self.parts)}")
        parts = [
            PartStep(
                Observed(None, tree),
                self._rewards(rewards, part),
                np.repeat(terminateds, self._sizes[part]),
                np.repeat(truncateds, self._sizes[part]),
            )
            for part, (tree, rewards) in enumerate(zip(observations, made.rewards, strict=True))
        ]
        ended = np.flatnonzero(terminateds | truncateds)
        self._slots.steps += 1
        infos = self._checked_infos(made.infos, range(self.num_envs), "infos")
        first = self._first(made, ended)
        first_infos = self._checked_infos(made.first_infos, ended.tolist(), "first infos")
        return VectorStep(parts, ended, ~terminateds[ended], first, infos, first_infos)

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    # Inside

    def _check(self, observations: Sequence[Tree]) -> None:
        """Check observations of each part, trees of arrays any[N, A, ...], against their spaces."""
        for check, tree, first in zip(self._checks, observations, self._slots.bounds, strict=False):
            flat = map_tree(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree)
            check.rows(flat, partial(self._named, first))

    def _named(self, first: int, slot: int) -> str:
        """Name of a slot of the part whose slots begin at `first`."""
        return self._slots.named(first + slot)

    def _first(self, made: ArrayStep, ended: NDArray[np.int64]) -> list[Observed]:
        if not len(ended):
            return []
        self._slots.steps[ended] = 0
        trees = self._flat(made.first, len(ended), "first observations")
        if len(ended) == self.num_envs:
            return [Observed(None, tree) for tree in trees]
        return [
            Observed((ended[:, None] * size + np.arange(size)).reshape(-1), tree)
            for size, tree in zip(self._sizes, trees, strict=True)
        ]

    def _by_env(self, actions: Actions) -> list[Tree]:
        """Actions any[N * A, ...] as any[N, A, ...]. Raises EnvError where they are not everybody's."""
        by_env = []
        for part, (size, (slots, tree)) in enumerate(zip(self._sizes, actions, strict=True)):
            if slots is not None:
                self._slots.check_acting(part, slots, None)
            by_env.append(map_tree(lambda leaf, size=size: leaf.reshape(self.num_envs, size, *leaf.shape[1:]), tree))
        return by_env

    def _flat(self, trees: Sequence[Tree], num_envs: int, name: str) -> list[Tree]:
        """Observations any[E, A, ...] as any[E * A, ...]. Raises EnvError where they do not fit the spaces."""
        if len(trees) != len(self.parts):
            raise EnvError(f"{name} of {len(trees)} parts, expected {len(self.parts)}")
        flat = []
        for part, (tree, item) in enumerate(zip(trees, self._items, strict=True)):
            try:
                flat.append(map_tree(partial(self._rows, part, num_envs, name), item, tree))
            except EnvError:
                raise
            except ValueError as error:
                raise EnvError(f"{self._of(part)}: the structure of {name} differs from the space's: {error}") from None
        return flat

    def _rows(self, part: int, num_envs: int, name: str, like: Any, leaf: Any) -> NDArray[Any]:
        size = self._sizes[part]
        self._check_array(leaf, (num_envs, size, *like.shape), like.dtype, part, name)
        rows: NDArray[Any] = leaf.reshape(num_envs * size, *like.shape).astype(like.dtype, copy=False)
        return rows

    def _rewards(self, rewards: Any, part: int) -> NDArray[np.float32]:
        self._check_array(rewards, (self.num_envs, self._sizes[part]), np.dtype(np.float32), part, "rewards")
        with np.errstate(over="ignore"):
            flat: NDArray[np.float32] = rewards.reshape(-1).astype(np.float32, copy=False)
        # A sum of float32 can't grow beyond float64: it is finite where all are.
        if not np.isfinite(np.add.reduce(flat, dtype=np.float64)):
            slot = int(np.argmin(np.isfinite(flat)))
            where = self._slots.named(self._slots.bounds[part] + slot)
            raise EnvError(f"{where}: its reward is {rewards.reshape(-1)[slot]}, expected a finite float32")
        return flat

    def _check_array(self, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any], part: int, name: str) -> None:
        if not isinstance(array, np.ndarray):
            raise EnvError(f"{self._of(part)}: {name} are {shown(array)}, expected {dtype}{list(shape)}")
        if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise EnvError(
                f"{self._of(part)}: {name} are {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}"
            )

    def _flags(self, flags: Any, name: str) -> NDArray[np.bool_]:
        if not (isinstance(flags, np.ndarray) and flags.dtype == np.bool_ and flags.shape == (self.num_envs,)):
            raise EnvError(
                f"environments from {self._first_env}: {name} are {shown(flags)}, expected bool[{self.num_envs}]"
            )
        return flags

    def _checked_infos(self, infos: Any, envs: Sequence[int], name: str) -> AgentInfos:
        """Infos of these environments. Raises EnvError for what is not agent -> dict."""
        if not isinstance(infos, Sequence) or len(infos) not in (0, len(envs)):
            raise EnvError(
                f"environments from {self._first_env}: {name} are {shown(infos)}, expected a dict for each of "
                f"{len(envs)} environments, or () where there are none"
            )
        check_infos(infos, self._slots, envs[: len(infos)], name)
        return infos

    def _of(self, part: int) -> str:
        agents = ", ".join(map(repr, self.parts[part].agents))
        return f"environments from {self._first_env}, agents {agents}"
