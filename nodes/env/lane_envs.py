"""The environments of one lane, with several agents each: dict environments side by side, or arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.env.env_source import given_by
from rollflow.nodes.env.env_state import check_states, recorded, recorded_as_needed, restored, states_of
from rollflow.nodes.env.multi_agent_env import (
    AgentInfos,
    AgentSpaces,
    ArrayStep,
    MultiAgentVectorEnv,
    adapted,
    agent_spaces,
    agents_of,
)
from rollflow.nodes.env.observation_check import (
    CHECKED_STEPS,
    Deviations,
    ObservationRows,
    checks_of,
    rewards_of,
)
from rollflow.nodes.env.stepping import Turn, nothing
from rollflow.stream.data.closing import Closing, close_all, closing_on_error
from rollflow.stream.data.errors import EnvError, located, noted, shown
from rollflow.stream.data.infos import copied
from rollflow.stream.data.ranges import finite_float32
from rollflow.stream.data.space import item_of
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.episodes.agent_timeline import ALL_AGENTS
from rollflow.stream.multi_agent.agent_part import Actions, Observed, PartStep, VectorStep, parts_of
from rollflow.stream.multi_agent.agent_states import AgentNumbers, AgentStates, Ends

COMMON_INFO = "__common__"  # the key of infos that are no agent's; told to nobody

_NAMES = ("observations", "rewards", "terminateds", "truncateds", "infos")
_FLAGS = ("terminateds", "truncateds")
_NO_INFOS: AgentInfos = ()  # there is one empty tuple: nearly every step has it
_FLOAT32, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)
_MAPPING_ERRORS = (AttributeError, KeyError, TypeError, ValueError)  # of what is no dict, or has unknown agents


EndFlags = tuple[list[int], list[int]]
"""End flags of one kind that were set: the numbers of agents, and environments of those of everybody."""


class StepValues(NamedTuple):
    """One vector step of all environments."""

    numbers: NDArray[np.int64]  # i64[K], ascending: who has an observation
    items: Sequence[Tree]  # K of them
    rewarded: NDArray[np.int64]  # i64[R]
    rewards: NDArray[np.float32]  # f32[R]
    terminated: EndFlags
    truncated: EndFlags
    infos: Sequence[Mapping[Any, Mapping[str, Any]]]  # per environment; () where all are empty


def actions_by_env(
    actions: Actions, acting: Sequence[NDArray[np.int64] | None], slots: AgentNumbers
) -> list[dict[Any, Any]]:
    """One dict per environment, agent -> action.

    `acting` has, per part, the slots of those that must act; None: all. Raises EnvError if others are given.
    """
    by_env: list[dict[Any, Any]] = [{} for _ in range(slots.num_envs)]
    for part, ((chosen, tree), expected) in enumerate(zip(actions, acting, strict=True)):
        if chosen is not expected:
            slots.check_acting(part, chosen, expected)
        agents = slots.agents_of[part]
        items = _items(tree)
        if expected is None:
            for env, own in enumerate(by_env):
                own.update(zip(agents, items[env * len(agents) : (env + 1) * len(agents)], strict=True))
        else:
            envs, places = np.divmod(expected, len(agents))
            for env, place, item in zip(envs.tolist(), places.tolist(), items, strict=True):
                by_env[env][agents[place]] = item
    return by_env


def _items(tree: Tree) -> Sequence[Any]:
    """The actions one by one."""
    if isinstance(tree, np.ndarray):
        return list(tree)
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    return [spec.unflatten(item) for item in zip(*leaves, strict=True)]


class MultiAgentEnvs:
    """N dict environments that step one after the other, and are reset if their episode ends.

        makers       one callable for each, which makes a `MultiAgentEnv`, one of RLlib's, or one of PettingZoo's
        first_env    the number of the first of them, in errors
        deviations   of observations from their space; None: of this lane alone

    Observations and rewards are copies; infos are the environments' own. Raises EnvError for environments that can't be
    stepped together, and, with environment, env step and agent, for whatever breaks the conventions of `MultiAgentEnv`.
    """

    def __init__(
        self, makers: Sequence[Callable[[], Any]], *, first_env: int = 0, deviations: Deviations | None = None
    ) -> None:
        self.envs: list[Any] = []
        self.given: list[Any] = []  # by the callables
        self._turn: Turn = nothing
        self._opened: list[Closing] = []
        with closing_on_error(self.close):
            self._make(makers, first_env)
            with located(f"environment {first_env}"):
                spaces = agent_spaces(self.envs[0])
                self.parts = parts_of(*spaces)
            for env, each in enumerate(self.envs[1:], first_env + 1):
                with located(f"environment {env}"):
                    check_alike(agent_spaces(each), spaces, first_env)
        self.num_envs = len(self.envs)
        self._each = list(self.envs)  # what is reset and stepped: they, or what records their steps
        self._drops_records = False
        self.possible_agents, self.observation_spaces, self.action_spaces = spaces
        self._slots = AgentNumbers([part.agents for part in self.parts], self.num_envs, first_env)
        self._states = AgentStates(self._slots)
        self._rows = [ObservationRows(part.observation_space) for part in self.parts]
        self._checks = checks_of(self.parts, deviations)
        self._steps_made = 0
        self._acting: list[NDArray[np.int64] | None] = [np.zeros(0, np.int64) for _ in self.parts]

    def tell_resets(self, turn: Turn) -> bool:
        """Have a function called when resets within a step begin, and when they have ended. True: they can be told."""
        self._turn = turn
        return True

    def reset(self, seeds: Sequence[int] | None = None) -> tuple[Sequence[Observed], AgentInfos]:
        """Begin an episode in every environment, each with a seed of its own, or with the generators that there are.

        Returns the first observations per part, and per environment agent -> info; () if all are empty.
        """
        first, infos = self._reset(np.arange(self.num_envs), seeds)
        self._set_acting()
        if self._drops_records:
            self._drops_records, self._each = False, recorded_as_needed(self._each)
        return first, infos

    def record_actions(self) -> None:
        """Record the steps of environments whose state can't be read, so that others can be stepped to the same."""
        self._each, self._drops_records = recorded(self._each), True

    def get_state(self) -> list[dict[str, Any]]:
        """The state of each environment, see `states_of`, beside that of its agents, and the steps of its episode."""
        return [
            {kind: {"env": state, "agents": agents, "steps": steps} if kind != "restart" else state}
            for each, agents, steps in zip(
                states_of(self._each), self._states.get_state(), self._slots.steps.tolist(), strict=True
            )
            for kind, state in each.items()
        ]

    def set_state(self, states: Sequence[Mapping[str, Any]], seeds: Sequence[int], ended: Sequence[int]) -> None:
        """Go on from what `get_state` gave. Raises EnvError if an environment can't.

        seeds    of a reset before: what that makes is there then
        ended    is empty: no step only resets
        """
        check_states(states, self.num_envs)
        self.reset(seeds)
        told = [pair for each in states for pair in each.items()]
        of_each = [{kind: of["env"]} for kind, of in told]
        self._each = list(map(restored, self._each, of_each, range(self.num_envs)))
        self._states.set_state(np.stack([of["agents"] for _, of in told]))
        self._slots.steps[:] = [of["steps"] for _, of in told]
        self._set_acting()

    def step(self, actions: Actions) -> VectorStep:
        """Step every environment with the actions of all agents that must act, and reset those whose episode ends."""
        if self._slots.steps[0] < 0:
            raise EnvError("step before the first reset")
        by_env = actions_by_env(actions, self._acting, self._slots)
        steps = []
        env = 0
        try:
            for each, env_actions in zip(self._each, by_env, strict=True):
                steps.append(each.step(env_actions))
                env += 1
        except Exception as error:
            error.add_note(self._slots.env_named(env))
            raise
        values = step_values(steps, self._slots)
        if self._steps_made in CHECKED_STEPS:
            self._check(values)
        self._steps_made += 1
        ends = self._ends_of(values)
        (terminateds, truncateds), envs = self._states.step(values.numbers, values.rewarded, ends)
        rewards = np.zeros(self._slots.count, np.float32)
        rewards[values.rewarded] = values.rewards
        parts = [
            PartStep(observed, rewards[first:stop], terminateds[first:stop], truncateds[first:stop])
            for (first, stop), observed in zip(pairwise(self._slots.bounds), self._observed(values), strict=True)
        ]
        infos = values.infos
        self._slots.steps += 1
        first_observed: Sequence[Observed] = ()
        first_infos: AgentInfos = ()
        is_truncated = np.zeros(0, np.bool_)
        if len(envs):
            is_truncated = self._truncated(envs, values, terminateds)
            infos = copied(infos)  # the reset may write over them
            self._turn()
            try:
                first_observed, first_infos = self._reset(envs, None)
            finally:
                self._turn()
        self._set_acting()
        return VectorStep(parts, envs, is_truncated, first_observed, infos, first_infos)

    def number_from(self, first_env: int) -> None:
        """Have errors name the first environment by this number, and those after it by the next ones."""
        self._slots.first_env = first_env

    def close(self) -> None:
        """Close the environments, all of them, also if one raises."""
        opened, self._opened = self._opened, []
        close_all(opened)

    # Inside

    def _make(self, makers: Sequence[Callable[[], Any]], first_env: int) -> None:
        if not len(makers):
            raise EnvError("there are no makers of environments, expected at least one")
        for env, make in enumerate(makers, first_env):
            made = made_by(make, env)
            with noted(f"in the callable for environment {env}"):
                each = adapted(_apart(made))
            if each is None:
                raise EnvError(f"the callable for environment {env} gave None, expected a MultiAgentEnv")
            if any(made is other for other in self.given):
                raise EnvError(f"the callable for environment {env} gave one that another has already given")
            self.given.append(made)
            self.envs.append(each)
            close = getattr(each, "close", None)
            if callable(close):
                self._opened.append((f"environment {env}", close))

    def _reset(self, envs: NDArray[np.int64], seeds: Sequence[int] | None) -> tuple[list[Observed], AgentInfos]:
        numbers = envs.tolist()
        self._slots.steps[envs] = -1
        resets = []
        for place, env in enumerate(numbers):
            try:
                resets.append(self._each[env].reset(seed=None if seeds is None else seeds[place], options=None))
            except Exception as error:
                error.add_note(self._slots.env_named(env))
                raise
        values = reset_values(numbers, resets, self._slots)
        if seeds is not None:
            self._check(values)
        self._states.begin(envs, values.numbers)
        first = self._observed(values)
        self._slots.steps[envs] = 0
        return first, values.infos

    def _observed(self, values: StepValues) -> list[Observed]:
        observed = []
        for part, (rows, share) in enumerate(zip(self._rows, self._slots.split(values.numbers), strict=True)):
            numbers = values.numbers[share]
            items = values.items[share] if len(self.parts) > 1 else values.items
            observations = rows(items, partial(self._whose, numbers))
            observed.append(Observed(self._slots.slots_of(part, numbers), observations))
        return observed

    def _check(self, values: StepValues) -> None:
        """Check observations against their spaces."""
        for check, share in zip(self._checks, self._slots.split(values.numbers), strict=True):
            check.items(values.items[share], partial(self._whose, values.numbers[share]))

    def _whose(self, numbers: NDArray[np.int64], place: int) -> str:
        return self._slots.named(int(numbers[place]))

    def _ends_of(self, values: StepValues) -> Ends | None:
        """Who ends with a step: agents by themselves, or with everybody; None: nobody."""
        if not any((*values.terminated, *values.truncated)):
            return None
        flags = np.zeros((2, self._slots.count), np.bool_)
        for row, (numbers, envs) in zip(flags, (values.terminated, values.truncated), strict=True):
            row[numbers] = True
            row[self._slots.of_env[envs]] = True
        return flags[0], flags[1]

    def _truncated(
        self, envs: NDArray[np.int64], values: StepValues, terminateds: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """bool[E]: whether "__all__" were truncated, or without "__all__", all of the last agents."""
        by_last = ~terminateds[self._slots.of_env[envs]].any(axis=1)
        of_all = np.isin(envs, values.truncated[1])
        truncated: NDArray[np.bool_] = ~np.isin(envs, values.terminated[1]) & (of_all | by_last)
        return truncated

    def _set_acting(self) -> None:
        acting = self._states.acting
        shares = enumerate(self._slots.split(acting))
        self._acting = [self._slots.slots_of(part, acting[share]) for part, share in shares]


def made_by(make: Callable[[], Any], env: int) -> Any:
    """The environment that a callable makes; `env` is its number, in errors. Raises EnvError if it raises."""
    return given_by(make, f"the callable for environment {env}", "a MultiAgentEnv")


def _apart(env: Any) -> Any:
    """The environment. Raises EnvError if it is many already."""
    if isinstance(env, MultiAgentVectorEnv):
        with closing_on_error(env.close):
            raise EnvError(
                f"the callable made a {type(env).__name__}, a MultiAgentVectorEnv of {env.num_envs} environments, "
                "which is a lane by itself; expected num_envs to be left out, and as many lanes as there are callables"
            )
    return env


def check_alike(spaces: AgentSpaces, first: AgentSpaces, first_env: int) -> None:
    """Raise EnvError if an environment's agents or spaces are not those of the one with the number `first_env`."""
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
        self._shape = (self.num_envs,)  # of end flags
        agents = [part.agents for part in self.parts]
        self._slots = AgentNumbers(agents, self.num_envs, first_env)
        self._sizes = [len(part.agents) for part in self.parts]
        self._checks = checks_of(self.parts, deviations)
        self._steps_made = 0
        self._items = [item_of(part.observation_space) for part in self.parts]
        # Of observations that are one array: the dtype and shape that need no look, and the shape by agent slots.
        self._whole = [
            (item.dtype, (self.num_envs, size, *item.shape), (self.num_envs * size, *item.shape))
            if isinstance(item, np.ndarray)
            else None
            for item, size in zip(self._items, self._sizes, strict=True)
        ]
        # Of a step with which nothing ends, which is nearly every one.
        self._unset = bytes(self.num_envs)
        self._none_ended = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        self._none_flagged = [(np.zeros(self.num_envs * size, np.bool_),) * 2 for size in self._sizes]
        for each in (*self._none_ended, *(flags for flags, _ in self._none_flagged)):
            each.flags.writeable = False

    def tell_resets(self, turn: Turn) -> bool:
        """Return False: resets can't be told from the step that they are in."""
        return False

    def reset(self, seeds: Sequence[int] | None = None) -> tuple[Sequence[Observed], AgentInfos]:
        """Begin an episode in every environment."""
        self._slots.steps[:] = -1
        answer = self.env.reset_arrays(seeds)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvError(
                f"{self._first_named}: reset_arrays gave a {type(answer).__name__}, expected a "
                "tuple: observations per part, and infos, () where there are none"
            )
        observations, infos = answer
        observed = [Observed(None, tree) for tree in self._flat(observations, self.num_envs, "observations")]
        self._check(observations)
        self._slots.steps[:] = 0
        return observed, self._checked_infos(infos, range(self.num_envs), "infos")

    def record_actions(self) -> None:
        """Do nothing: environments that step together are not stepped again."""

    def get_state(self) -> list[dict[str, Any]]:
        """The state of the environments together: see `states_of`."""
        return states_of(self.given)

    def set_state(self, states: Sequence[Mapping[str, Any]], seeds: Sequence[int], ended: Sequence[int]) -> None:
        """Go on from what `get_state` gave: see `MultiAgentEnvs`."""
        check_states(states, 1)
        self.reset(seeds)
        restored(self.env, states[0], 0)

    def step(self, actions: Actions) -> VectorStep:
        """Step every environment with everybody's actions."""
        made = self.env.step_arrays(self._by_env(actions))
        if not isinstance(made, ArrayStep):
            raise EnvError(f"{self._first_named}: step_arrays gave a {type(made).__name__}, expected an ArrayStep")
        trees, rewards, terminateds, truncateds, first, infos, first_infos = made
        observations = self._flat(trees, self.num_envs, "observations")
        if self._steps_made in CHECKED_STEPS:
            self._check(trees)
        self._steps_made += 1
        self._check_flags("terminateds", terminateds)
        self._check_flags("truncateds", truncateds)
        if len(rewards) != len(self.parts):
            raise EnvError(f"rewards of {len(rewards)} parts, expected {len(self.parts)}")
        (ended, truncated), flagged = self._none_ended, self._none_flagged
        if terminateds.tobytes() != self._unset or truncateds.tobytes() != self._unset:  # quicker than to look for True
            ended = np.flatnonzero(terminateds | truncateds)
            truncated = ~terminateds[ended]
            flagged = [(np.repeat(terminateds, size), np.repeat(truncateds, size)) for size in self._sizes]
        parts = []
        for part, tree in enumerate(observations):
            parts.append(PartStep(Observed(None, tree), self._rewards(rewards[part], part), *flagged[part]))
        self._slots.steps += 1
        observed = self._first(first, ended) if len(ended) else ()
        if infos is not _NO_INFOS:
            infos = self._checked_infos(infos, range(self.num_envs), "infos")
        if first_infos is not _NO_INFOS:
            first_infos = self._checked_infos(first_infos, ended.tolist(), "first infos")
        return VectorStep(parts, ended, truncated, observed, infos, first_infos)

    def number_from(self, first_env: int) -> None:
        """Have errors name the first environment by this number, and those after it by the next ones."""
        self._slots.first_env = first_env

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    # Inside

    def _check(self, observations: Sequence[Tree]) -> None:
        """Check observations of each part, trees of arrays any[N, A, ...], against their spaces."""
        for check, tree, first in zip(self._checks, observations, self._slots.bounds, strict=False):
            flat = map_tree(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree)
            check.rows(flat, partial(self._named, first))

    def _check_flags(self, name: str, flags: Any) -> None:
        if not (isinstance(flags, np.ndarray) and flags.dtype is _BOOL and flags.shape == self._shape):
            raise EnvError(f"{self._first_named}: {name} are {shown(flags)}, expected bool[{self.num_envs}]")

    @property
    def _first_named(self) -> str:
        return f"environments from {self._slots.first_env}"

    def _named(self, first: int, slot: int) -> str:
        """Name of a slot of the part whose slots begin at `first`."""
        return self._slots.named(first + slot)

    def _first(self, first: Sequence[Tree], ended: NDArray[np.int64]) -> list[Observed]:
        self._slots.steps[ended] = 0
        trees = self._flat(first, len(ended), "first observations")
        if len(ended) == self.num_envs:
            return [Observed(None, tree) for tree in trees]
        return [
            Observed((ended[:, None] * size + np.arange(size)).reshape(-1), tree)
            for size, tree in zip(self._sizes, trees, strict=True)
        ]

    def _by_env(self, actions: Actions) -> list[Tree]:
        """Actions any[N * A, ...] as any[N, A, ...]. Raises EnvError if they are not everybody's."""
        by_env = []
        for part, (size, (slots, tree)) in enumerate(zip(self._sizes, actions, strict=True)):
            if slots is not None:
                self._slots.check_acting(part, slots, None)
            if type(tree) is np.ndarray:
                by_env.append(tree.reshape(self.num_envs, size, *tree.shape[1:]))
            else:
                shape = self.num_envs, size
                by_env.append(map_tree(lambda leaf, shape=shape: leaf.reshape(*shape, *leaf.shape[1:]), tree))
        return by_env

    def _flat(self, trees: Sequence[Tree], num_envs: int, name: str) -> list[Tree]:
        """Observations any[E, A, ...] as any[E * A, ...]. Raises EnvError if they do not fit the spaces."""
        if len(trees) != len(self.parts):
            raise EnvError(f"{name} of {len(trees)} parts, expected {len(self.parts)}")
        flat = []
        for part, tree in enumerate(trees):
            whole = self._whole[part] if num_envs == self.num_envs else None
            if whole is not None and type(tree) is np.ndarray and tree.shape == whole[1] and tree.dtype is whole[0]:
                flat.append(tree.reshape(whole[2]))
                continue
            try:
                flat.append(map_tree(partial(self._rows, part, num_envs, name), self._items[part], tree))
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
        shape = self.num_envs, self._sizes[part]
        if not (type(rewards) is np.ndarray and rewards.dtype is _FLOAT32 and rewards.shape == shape):
            self._check_array(rewards, shape, _FLOAT32, part, "rewards")
        return finite_float32(rewards.reshape(-1), lambda slot: self._slots.named(self._slots.bounds[part] + slot))

    def _check_array(self, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any], part: int, name: str) -> None:
        if not isinstance(array, np.ndarray):
            raise EnvError(f"{self._of(part)}: {name} are {shown(array)}, expected {dtype}{list(shape)}")
        if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise EnvError(
                f"{self._of(part)}: {name} are {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}"
            )

    def _checked_infos(self, infos: Any, envs: Sequence[int], name: str) -> AgentInfos:
        """Infos of these environments. Raises EnvError for what is not agent -> dict."""
        if not isinstance(infos, Sequence) or len(infos) not in (0, len(envs)):
            raise EnvError(
                f"{self._first_named}: {name} are {shown(infos)}, expected a dict for each of "
                f"{len(envs)} environments, or () where there are none"
            )
        check_infos(infos, self._slots, envs[: len(infos)], name)
        return infos

    def _of(self, part: int) -> str:
        agents = ", ".join(map(repr, self.parts[part].agents))
        return f"{self._first_named}, agents {agents}"


LaneEnvs = MultiAgentEnvs | ArrayEnvs


@dataclass(frozen=True, slots=True)
class AgentLaneMaker:
    """Makes the environments of one lane.

    makers       callables: one that makes a `MultiAgentVectorEnv`, or one for each dict environment; or a vector
                 environment that a user has made
    first_slot   the number of the first
    """

    makers: Sequence[Any] | MultiAgentVectorEnv
    first_slot: int

    @property
    def can_travel(self) -> bool:
        """True if the environments are yet to be made."""
        return not isinstance(self.makers, MultiAgentVectorEnv)

    def lane_env(self, deviations: Deviations, where: str = "", *, may_be_async: bool = False) -> LaneEnvs:
        """The environments as a lane takes them: arrays, or a dict environment of each callable.

        Their numbers say where they are. Raises EnvError if they can't be stepped together.
        """
        options: Any = {"first_env": self.first_slot, "deviations": deviations}
        if isinstance(self.makers, MultiAgentVectorEnv):
            return ArrayEnvs(self.makers, **options)
        if len(self.makers) != 1:
            return MultiAgentEnvs(self.makers, **options)
        env = made_by(self.makers[0], self.first_slot)
        if not isinstance(env, MultiAgentVectorEnv):
            return MultiAgentEnvs([lambda: env], **options)
        with closing_on_error(env.close):
            return ArrayEnvs(env, **options)


def reset_values(envs: Sequence[int], resets: Sequence[Any], slots: AgentNumbers) -> StepValues:
    """Values that `reset` of some environments gave. Raises EnvError as `step_values` does."""
    try:
        steps: list[tuple[Any, ...]] = [(observations, {}, {}, {}, infos) for observations, infos in resets]
    except (TypeError, ValueError) as error:
        _refuse_form(envs, resets, ("observations", "infos"), slots)
        raise error
    return step_values(steps, slots, envs)


def step_values(steps: Sequence[Any], slots: AgentNumbers, envs: Sequence[int] | None = None) -> StepValues:
    """Values that `step` of every environment gave, or of `envs`.

    Raises EnvError for other forms, and for unknown agents.
    """
    numbers: list[int] = []
    items: list[Tree] = []
    rewarded: list[int] = []
    rewards: list[Any] = []
    terminated: EndFlags = [], []
    truncated: EndFlags = [], []
    infos: list[Any] = []
    has_infos = False
    envs = range(slots.num_envs) if envs is None else envs

    def named(place: int) -> str:
        return slots.named(rewarded[place])

    try:
        for env, (observations, gains, terminateds, truncateds, more) in zip(envs, steps, strict=True):
            number_of = slots.by_env[env].__getitem__
            numbers.extend(map(number_of, observations))
            items.extend(observations.values())
            rewarded.extend(map(number_of, gains))
            rewards.extend(gains.values())
            if any(terminateds.values()):
                _add_ends(terminated, terminateds, env, number_of)
            if any(truncateds.values()):
                _add_ends(truncated, truncateds, env, number_of)
            infos.append(more)
            has_infos = has_infos or any(more.values())
    except _MAPPING_ERRORS as error:
        _refuse_form(envs, steps, _NAMES, slots)
        _refuse_values(envs, steps, slots)
        raise error
    return StepValues(
        *_ascending(numbers, items),
        np.array(rewarded, np.int64),
        finite_float32(rewards_of(rewards, named), named),
        terminated,
        truncated,
        _checked_infos(infos, slots, envs) if has_infos else (),
    )


def _add_ends(ends: EndFlags, flags: Mapping[Any, Any], env: int, number_of: Any) -> None:
    for agent, is_set in flags.items():
        if not is_set:
            continue
        if agent == ALL_AGENTS:
            ends[1].append(env)
        else:
            ends[0].append(number_of(agent))


def _ascending(numbers: list[int], items: list[Tree]) -> tuple[NDArray[np.int64], list[Tree]]:
    ordered = np.array(numbers, np.int64)
    if len(ordered) > 1 and (ordered[1:] < ordered[:-1]).any():
        order = np.argsort(ordered)
        return ordered[order], [items[place] for place in order.tolist()]
    return ordered, items


def _checked_infos(
    infos: list[Any], slots: AgentNumbers, envs: Sequence[int]
) -> Sequence[Mapping[Any, Mapping[str, Any]]]:
    """Infos without those that are no agent's. Raises EnvError as `check_infos`."""
    if any(COMMON_INFO in each for each in infos):
        infos = [{agent: info for agent, info in each.items() if agent != COMMON_INFO} for each in infos]
    check_infos(infos, slots, envs, "infos")
    return infos


def check_infos(infos: Sequence[Any], slots: AgentNumbers, envs: Sequence[int], name: str) -> None:
    """Raise EnvError for infos of `envs` that are no dicts by agents, of an unknown agent, and for no dicts."""
    for env, by_agent in zip(envs, infos, strict=True):
        if not isinstance(by_agent, Mapping):
            raise _no_dict(env, by_agent, name, slots)
        for agent, info in by_agent.items():
            if agent not in slots.by_env[env]:
                raise _unknown(env, agent, name, slots)
            if type(info) is not dict and info and not isinstance(info, Mapping):
                raise EnvError(f"{slots.agent_named(env, agent)}: its info is {shown(info)}, expected a dict")


def _refuse_form(envs: Sequence[int], answers: Sequence[Any], names: Sequence[str], slots: AgentNumbers) -> None:
    """Raise EnvError for the first answer that is no tuple of these."""
    for env, answer in zip(envs, answers, strict=True):
        if not isinstance(answer, tuple) or len(answer) != len(names):
            text = f"{slots.env_named(env)}: it gave {shown(answer)}, expected a tuple of {', '.join(names)}"
            raise EnvError(text) from None


def _refuse_values(envs: Sequence[int], steps: Sequence[Any], slots: AgentNumbers) -> None:
    """Raise EnvError for the first value that is not as it should be."""
    for env, each in zip(envs, steps, strict=True):
        for name, values in zip(_NAMES, each, strict=True):
            if not isinstance(values, Mapping):
                raise _no_dict(env, values, name, slots) from None
            for agent, value in values.items():
                if name in _FLAGS:
                    if np.ndim(value):
                        where = slots.agent_named(env, agent)
                        raise EnvError(f"{where}: {name} says {shown(value)}, expected a bool") from None
                    if agent == ALL_AGENTS or not value:
                        continue
                if name != "infos" and agent not in slots.by_env[env]:
                    raise _unknown(env, agent, name, slots) from None


def _no_dict(env: int, values: Any, name: str, slots: AgentNumbers) -> EnvError:
    return EnvError(f"{slots.env_named(env)}: its {name} are {shown(values)}, expected a dict by agents")


def _unknown(env: int, agent: Any, name: str, slots: AgentNumbers) -> EnvError:
    return EnvError(
        f"{slots.agent_named(env, agent)}: {name} has it, but it is not in 'possible_agents', {list(slots.by_env[env])}"
    )
