"""Dict environments side by side."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.nodes.closing import Closing, close_all, closing_on_error
from rollflow.nodes.env.env_source import given_by
from rollflow.nodes.env.multi_agent.array_vector import AgentInfos, MultiAgentVectorEnv
from rollflow.nodes.env.multi_agent.multi_agent_env import AgentSpaces, agent_spaces
from rollflow.nodes.env.multi_agent.petting_zoo import adapted
from rollflow.nodes.env.multi_agent.step_validation import StepValues, reset_values, step_values
from rollflow.nodes.env.observation_check import CHECKED_STEPS, Deviations, checks_of
from rollflow.nodes.env.stepping import Turn, nothing
from rollflow.stream.data.column import Column
from rollflow.stream.data.errors import ColumnError, EnvError, located, noted
from rollflow.stream.data.infos import copied
from rollflow.stream.data.space import item_of, row_of
from rollflow.stream.data.tree import Tree, leaves_of
from rollflow.stream.multi_agent.agent_part import Actions, Observed, PartStep, VectorStep, parts_of
from rollflow.stream.multi_agent.agent_states import AgentNumbers, AgentStates, Ends


def actions_by_env(
    actions: Actions, acting: Sequence[NDArray[np.int64] | None], slots: AgentNumbers
) -> list[dict[Any, Any]]:
    """One dict per environment, agent -> action.

    `acting` has, per part, the slots of those that must act; None: all. Raises EnvError where others are given.
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
    """N dict environments that step one after the other, and are reset where their episode ends.

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

        Returns the first observations per part, and per environment agent -> info; () where all are empty.
        """
        first, infos = self._reset(np.arange(self.num_envs), seeds)
        self._set_acting()
        return first, infos

    def step(self, actions: Actions) -> VectorStep:
        """Step every environment with the actions of all agents that must act, and reset those whose episode ends."""
        if self._slots.steps[0] < 0:
            raise EnvError("step before the first reset")
        by_env = actions_by_env(actions, self._acting, self._slots)
        steps = []
        env = 0
        try:
            for each, env_actions in zip(self.envs, by_env, strict=True):
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

    def close(self) -> None:
        """Close the environments, all of them, also where one raises."""
        opened, self._opened = self._opened, []
        close_all(opened)

    # Inside

    def _make(self, makers: Sequence[Callable[[], Any]]) -> None:
        if not len(makers):
            raise EnvError("there are no makers of environments, expected at least one")
        for env, make in enumerate(makers, self._first_env):
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
                resets.append(self.envs[env].reset(seed=None if seeds is None else seeds[place], options=None))
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
        for row, ends in zip(flags, (values.terminated, values.truncated), strict=True):
            row[ends.numbers] = True
            row[self._slots.of_env[ends.envs]] = True
        return flags[0], flags[1]

    def _truncated(
        self, envs: NDArray[np.int64], values: StepValues, terminateds: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """bool[E]: whether "__all__" were truncated, or without "__all__", all of the last agents."""
        by_last = ~terminateds[self._slots.of_env[envs]].any(axis=1)
        of_all = np.isin(envs, values.truncated.envs)
        truncated: NDArray[np.bool_] = ~np.isin(envs, values.terminated.envs) & (of_all | by_last)
        return truncated

    def _set_acting(self) -> None:
        acting = self._states.acting
        shares = enumerate(self._slots.split(acting))
        self._acting = [self._slots.slots_of(part, acting[share]) for part, share in shares]


def made_by(make: Callable[[], Any], env: int) -> Any:
    """The environment that a callable makes; `env` is its number, in errors. Raises EnvError where it raises."""
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


class ObservationRows:
    """Makes a tree of arrays `any[K, ...]`, copies in the space's dtypes, from K items of one space."""

    def __init__(self, space: gym.Space[Any]) -> None:
        item = item_of(space)
        self._space = space
        self._spec = optree.tree_structure(item, none_is_leaf=True)
        self._leaves = [(leaf.shape, leaf.dtype) for leaf in leaves_of(item)]
        self._is_nested = isinstance(item, dict | tuple)

    def __call__(self, items: Sequence[Tree], whose: Callable[[int], str]) -> Tree:
        """The rows of these items.

        `whose` says for an error whose item it is, by its place in the sequence. Raises EnvError for an item that is
        not of the space's structure, shapes and kinds of dtypes.
        """
        if not items:
            return row_of(self._space, 0)
        if not self._is_nested:
            rows = _rows(items, *self._leaves[0])
            return self._one_by_one(items, whose) if rows is None else rows
        try:
            leaves = list(zip(*map(self._spec.flatten_up_to, items), strict=True))
        except ValueError:
            return self._one_by_one(items, whose)
        columns = [_rows(leaf, *like) for leaf, like in zip(leaves, self._leaves, strict=True)]
        if any(rows is None for rows in columns):
            return self._one_by_one(items, whose)
        return self._spec.unflatten(columns)

    def _one_by_one(self, items: Sequence[Tree], whose: Callable[[int], str]) -> Tree:
        column = Column.empty("obs", row_of(self._space, len(items)), 1)
        for place, item in enumerate(items):
            try:
                column.write_slot(0, place, item)
            except (ColumnError, ValueError) as error:
                raise EnvError(f"{whose(place)}: an observation that is not in its space: {error}") from None
        return column.row(0)


def _rows(values: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The values as one array; None where they don't all fit."""
    try:
        rows = np.array(values)
    except ValueError:
        return None
    if rows.shape != (len(values), *shape) or not np.can_cast(rows.dtype, dtype, "same_kind"):
        return None
    return rows.astype(dtype, copy=False)
