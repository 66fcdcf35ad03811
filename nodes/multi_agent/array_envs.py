"""What a lane takes from environments that are vectorized already."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.nodes.env_source import is_whole
from rollflow.nodes.multi_agent.agent_slots import AgentSlots
from rollflow.nodes.multi_agent.array_vector import AgentInfos, ArrayStep, MultiAgentVectorEnv
from rollflow.nodes.multi_agent.multi_agent_env import agents_of
from rollflow.nodes.multi_agent.places import Places
from rollflow.stream.errors import EnvError
from rollflow.stream.multi_agent.vector_step import Actions, Observed, PartStep, VectorStep
from rollflow.stream.space import item_of
from rollflow.stream.tree import Tree, map_tree


class ArrayEnvs:
    """A `MultiAgentVectorEnv`, told in vector steps: views on its arrays, whatever the number of agents.

    first_env    the number of the first environment, in errors

    Raises EnvError for arrays that do not fit the spaces, rewards that are no finite numbers, infos that are no dicts
    by agents, and actions that are not everybody's.
    """

    def __init__(self, env: MultiAgentVectorEnv, *, first_env: int = 0) -> None:
        spaces = agents_of(env)
        self.env = env
        if not is_whole(env.num_envs) or env.num_envs < 1:
            raise EnvError(f"'num_envs' is {env.num_envs!r}, expected a whole number, 1 or more")
        self.num_envs = int(env.num_envs)
        self.parts = env.parts
        self.possible_agents, self.observation_spaces, self.action_spaces = spaces
        self._slots = AgentSlots(self.parts, self.num_envs)
        self._places = Places(self._slots, first_env)
        self._first_env = first_env
        self._sizes = [len(part.agents) for part in self.parts]
        self._items = [item_of(part.observation_space) for part in self.parts]

    def reset(self, seeds: Sequence[int] | None = None) -> tuple[Sequence[Observed], AgentInfos]:
        """Begin an episode in every environment."""
        if seeds is not None and len(seeds) != self.num_envs:
            raise EnvError(f"got {len(seeds)} seeds, expected one for each of {self.num_envs} environments")
        self._places.steps[:] = -1
        told = self.env.reset_arrays(seeds)
        if not isinstance(told, tuple) or len(told) != 2:
            raise EnvError(
                f"environments from {self._first_env}: reset_arrays gave a {type(told).__name__}, expected a tuple: "
                "observations per part, and infos, () where there are none"
            )
        observations, infos = told
        observed = [Observed(None, tree) for tree in self._flat(observations, self.num_envs, "observations")]
        self._places.steps[:] = 0
        return observed, self._known(infos, range(self.num_envs), "infos")

    def step(self, actions: Actions) -> VectorStep:
        """Step every environment with everybody's actions."""
        told = self.env.step_arrays(self._given(actions))
        if not isinstance(told, ArrayStep):
            raise EnvError(
                f"environments from {self._first_env}: step_arrays gave a {type(told).__name__}, expected an ArrayStep"
            )
        observations = self._flat(told.observations, self.num_envs, "observations")
        terminateds = self._flags(told.terminateds, "terminateds")
        truncateds = self._flags(told.truncateds, "truncateds")
        if len(told.rewards) != len(self.parts):
            raise EnvError(f"rewards of {len(told.rewards)} parts, expected {len(self.parts)}")
        parts = [
            PartStep(
                Observed(None, tree),
                self._rewards(rewards, part),
                np.repeat(terminateds, self._sizes[part]),
                np.repeat(truncateds, self._sizes[part]),
            )
            for part, (tree, rewards) in enumerate(zip(observations, told.rewards, strict=True))
        ]
        ended = np.flatnonzero(terminateds | truncateds)
        self._places.steps += 1
        infos = self._known(told.infos, range(self.num_envs), "infos")
        first = self._first(told, ended)
        first_infos = self._known(told.first_infos, ended.tolist(), "first infos")
        return VectorStep(parts, ended, ~terminateds[ended], first, infos, first_infos)

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    # Inside

    def _first(self, told: ArrayStep, ended: NDArray[np.int64]) -> list[Observed]:
        if not len(ended):
            return []
        self._places.steps[ended] = 0
        trees = self._flat(told.first, len(ended), "first observations")
        if len(ended) == self.num_envs:
            return [Observed(None, tree) for tree in trees]
        return [
            Observed((ended[:, None] * size + np.arange(size)).reshape(-1), tree)
            for size, tree in zip(self._sizes, trees, strict=True)
        ]

    def _given(self, actions: Actions) -> list[Tree]:
        """Actions any[N * A, ...] as any[N, A, ...]."""
        if len(actions) != len(self.parts):
            raise EnvError(f"got actions for {len(actions)} parts, expected {len(self.parts)}")
        given = []
        for part, (slots, tree) in enumerate(actions):
            size = self._sizes[part]
            everybody = self.num_envs * size
            if slots is not None and not np.array_equal(slots, np.arange(everybody)):
                missing = np.setdiff1d(np.arange(everybody), slots)
                where = self._places.of(self._slots.bounds[part] + int(missing[0])) if len(missing) else "agent slots"
                raise EnvError(f"{where}: expected an action of every agent, in order, got those of slots {slots!r}")
            for leaf in optree.tree_leaves(tree, none_is_leaf=True):
                if np.shape(leaf)[:1] != (everybody,):
                    raise EnvError(f"{self._of(part)}: actions of shape {np.shape(leaf)}, expected {everybody} of them")
            given.append(map_tree(lambda leaf, size=size: leaf.reshape(self.num_envs, size, *leaf.shape[1:]), tree))
        return given

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
            where = self._places.of(self._slots.bounds[part] + slot)
            raise EnvError(f"{where}: its reward is {rewards.reshape(-1)[slot]}, expected a finite float32")
        return flat

    def _check_array(self, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any], part: int, name: str) -> None:
        if not isinstance(array, np.ndarray):
            raise EnvError(f"{self._of(part)}: {name} are {array!r}, expected {dtype}{list(shape)}")
        if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise EnvError(
                f"{self._of(part)}: {name} are {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}"
            )

    def _flags(self, flags: Any, name: str) -> NDArray[np.bool_]:
        if not (isinstance(flags, np.ndarray) and flags.dtype == np.bool_ and flags.shape == (self.num_envs,)):
            raise EnvError(f"environments from {self._first_env}: {name} are {flags!r}, expected bool[{self.num_envs}]")
        return flags

    def _known(self, infos: Any, envs: Sequence[int], name: str) -> AgentInfos:
        """Infos of these environments. Raises EnvError for what is not agent -> dict."""
        if not isinstance(infos, Sequence) or len(infos) not in (0, len(envs)):
            raise EnvError(
                f"environments from {self._first_env}: {name} are {infos!r:.200}, expected a dict for each of "
                f"{len(envs)} environments, or () where there are none"
            )
        for env, of_agents in zip(envs, infos, strict=False):
            if not isinstance(of_agents, Mapping):
                raise EnvError(f"{self._places.at(env)}: its {name} are {of_agents!r:.200}, expected a dict by agents")
            for agent, info in of_agents.items():
                if agent not in self.observation_spaces:
                    raise EnvError(
                        f"{self._places.of_agent(env, agent)}: {name} have it, but it is not in 'possible_agents', "
                        f"{list(self.possible_agents)}"
                    )
                if not isinstance(info, Mapping):
                    where = self._places.of_agent(env, agent)
                    raise EnvError(f"{where}: {name} have {info!r:.200}, expected a dict")
        return infos

    def _of(self, part: int) -> str:
        agents = ", ".join(map(repr, self.parts[part].agents))
        return f"environments from {self._first_env}, agents {agents}"
