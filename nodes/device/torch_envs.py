"""Environments that step many slots at once in torch tensors, as one vector environment."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import check_flags, checking_constructor
from rollflow.nodes.device.agent_rows import AgentRows
from rollflow.nodes.device.foreign_spaces import whole_limits
from rollflow.nodes.env.observation_check import STEP_GIVES, kind_of
from rollflow.nodes.env.stepping import Stepped
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.data.infos import copied
from rollflow.stream.data.space import leaves_within
from rollflow.stream.data.tree import Tree, leaves_of, map_tree

_FINAL = ("final_obs", "final_observation")  # names of last observations, in infos
_STEP_GIVES = {4: ("observations", "rewards", "dones", "extras"), 5: tuple(f"{name}s" for name in STEP_GIVES)}


@checking_constructor()
class TorchEnvs(VectorEnv[Any, Any, Any]):
    """Vector environment made of one that steps many slots at once in tensors on one device.

        env                  what steps them, and resets a slot in the step that ends its episode:

                             * an rsl_rl `VecEnv`, with `num_actions`, `get_observations()`, and `step(actions)` that
                               gives observations, rewards, dones and extras. `extras["time_outs"]` are truncations
                             * a gymnasium `VectorEnv` whose arrays are tensors, such as ManiSkill's
                             * an `Environment` of VMAS whose agents have the same spaces: they share one policy, and
                               each is a slot. Slot e · `num_agents` + a is agent a of environment e, whose end ends the
                               episodes of all its agents. Its flags are copied to the host in each step
                             * any other object with `reset()`, which gives observations, or those and infos, and with a
                               `step(actions)` of rsl_rl's four values or gymnasium's five

        observation_space,   of one slot; None: those of `env`, or what its observations say; an environment that is
        action_space         neither rsl_rl's nor gymnasium's needs `action_space`
        group                the one group of observations to be used; None: all of them, as a Dict space
        allow_host_copies    whether each step may be copied to the host if the rollout can't stay on the device

    device             of all tensors
    is_last_missing    whether `step` knew no last observations if episodes last ended
    num_agents         A, of slots that follow each other, and are agents of one environment; 1 but for VMAS
    last_extras        what the newest step gave beside its values: extras or infos. Rollouts record no infos of tensors

    Observations are trees of tensors any[N, ...]. If `env` gives last observations of ended episodes, as
    `infos["final_obs"]` or `infos["final_observation"]`, they are recorded; else the observation before stands for the
    last one, so that an estimate of a truncated episode's value is that of the observation before, as in rsl_rl.

    Flags may be numbers: each but 0 is True, which is not looked at. Tensors may be written over by the next step.
    `close` closes `env`.

    Environments step and reset under `torch.no_grad()`.

    One with `get_state()` and `set_state(state)`, of trees of tensors and plain values, goes on in a run that is saved.

    Raises EnvError for environments and spaces other than these, for another autoreset mode than SAME_STEP, for
    observations that are no tensors of a dtype that numpy has, and for other values that are no tensors any[N].
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  # as gymnasium has it

    def __init__(
        self,
        env: Any,
        *,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        group: str | None = None,
        allow_host_copies: bool = False,
    ) -> None:
        check_flags(allow_host_copies=allow_host_copies)
        if group is not None and not isinstance(group, str):
            raise EnvError(f"group is {shown(group)}, expected the name of one group, or None for all of them")
        self.env, self.group, self.allow_host_copies = env, group, allow_host_copies
        self.last_extras: Mapping[str, Any] = {}
        self.num_agents = 1
        self.is_last_missing = False
        if isinstance(env, type):
            raise EnvError(f"env is the class {env.__name__}, expected an instance of it")
        if hasattr(env, "reset_at") and hasattr(env, "n_agents"):
            env = AgentRows(env)
            observation_space, action_space = env.observation_space, env.action_space
            self.num_agents = env.num_agents
        self._steps = env
        self._is_rsl_rl = hasattr(env, "get_observations") and hasattr(env, "num_actions")
        if not callable(getattr(env, "step", None)) or not (self._is_rsl_rl or hasattr(env, "reset")):
            raise EnvError(f"env is {shown(env)}, expected an environment of tensors, with reset() and step(actions)")
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode", AutoresetMode.SAME_STEP)
        if mode is not AutoresetMode.SAME_STEP:
            raise EnvError(f"metadata['autoreset_mode'] of {env} is {mode}, expected AutoresetMode.SAME_STEP").see(
                "autoreset"
            )
        self._takes_seed = not self._is_rsl_rl and any(
            each.name == "seed" or each.kind is each.VAR_KEYWORD for each in signature(env.reset).parameters.values()
        )
        if action_space is None and self._is_rsl_rl:
            action_space = spaces.Box(-np.inf, np.inf, (int(env.num_actions),), np.float32)
        elif action_space is None:
            action_space = getattr(env, "single_action_space", None)
            if action_space is None and isinstance(env, gym.Env) and not hasattr(env.unwrapped, "num_envs"):
                raise EnvError(
                    f"env is {shown(env)}, a gymnasium.Env of one slot, expected an environment that steps many slots "
                    "at once in tensors; Rollout takes a callable that makes one such Env, without TorchEnvs"
                ).see("environment")
        self.single_action_space = _actions_in(action_space)
        if observation_space is None and group is None and not self._is_rsl_rl:
            observation_space = getattr(env, "single_observation_space", None)
        first = leaves = None
        if observation_space is None or not hasattr(env, "num_envs") or not hasattr(env, "device"):
            first = self._begin(None)
            leaves = leaves_of(first)
            if not leaves or not all(leaf.ndim for leaf in leaves):
                begun = "get_observations" if self._is_rsl_rl else "reset"
                raise EnvError(f"{begun} gave {shown(first)}, expected tensors [N, ...], with a row for each slot")
        self.single_observation_space = _space_of(first) if observation_space is None else observation_space
        self.num_envs = int(env.num_envs if leaves is None or hasattr(env, "num_envs") else len(leaves[0]))
        device = env.device if leaves is None or hasattr(env, "device") else leaves[0].device
        self._before: Tree = None  # arrays: the observations that the newest actions were chosen for
        self._no_flags: Any = torch.zeros(self.num_envs, dtype=torch.bool, device=device)
        self._shape, self._no_grad = self._no_flags.shape, torch.no_grad()
        self.device: torch.device = self._no_flags.device  # with its number, which "cuda" lacks

    @cached_property
    def observation_space(self) -> gym.Space[Any]:
        """The space of the observations of all slots."""
        return batch_space(self.single_observation_space, self.num_envs)

    @cached_property
    def action_space(self) -> gym.Space[Any]:
        """The space of the actions of all slots."""
        return batch_space(self.single_action_space, self.num_envs)

    # Tensors

    def reset_tensors(self, seeds: Sequence[int] | None) -> tuple[Tree, dict[str, Any]]:
        """Begin episodes: observations, a tree of any[N, ...], and no infos. The first of the seeds is used.

        An rsl_rl environment goes on with the episodes that it has begun.
        """
        return self._begin(None if seeds is None else int(seeds[0])), {}

    def step_tensors(self, actions: Tree) -> Stepped:
        """Step with actions, a tree of tensors any[N, ...]: values, with bool flags, and no infos.

        `final` has last observations, any[N, ...], which mean something if an episode ended; None: there are none.
        Nothing is copied, and nothing is read from the device.
        """
        with self._no_grad:
            return self._stepped(self._steps.step(actions))

    # Arrays

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tree, dict[str, Any]]:
        """Begin episodes: observations, a tree of arrays any[N, ...], and no infos; `options` are not used."""
        seeds = [int(seed)] if isinstance(seed, int | np.integer) else seed
        self._before = map_tree(_array, self.reset_tensors(seeds)[0])
        return self._before, {}

    def step(self, actions: Tree) -> tuple[Tree, NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step with actions, a tree of arrays any[N, ...]: gymnasium's five values, in new arrays."""
        stepped = self.step_tensors(map_tree(lambda leaf: torch.tensor(leaf, device=self.device), actions))
        terminateds, truncateds, rewards = map(_array, (stepped.terminateds, stepped.truncateds, stepped.rewards))
        infos = {}
        if terminateds.any() or truncateds.any():
            self.is_last_missing = stepped.final is None
            infos["final_obs"] = self._before if stepped.final is None else map_tree(_array, stepped.final[0])
        self._before = map_tree(_array, stepped.observations)
        return self._before, rewards, terminateds, truncateds, infos

    # States

    def get_state(self) -> dict[str, Any]:
        """What the environment's own `get_state()` gives, copied. Raises EnvError if it has none."""
        self._check_has_state()
        own = copied(self.env.get_state())
        there = [torch.is_tensor(leaf) and leaf.device.type != "cpu" for leaf in leaves_of(own)]
        return {"env": own, "there": there, "before": self._before}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one gave, once reset. Raises EnvError if it can't."""
        self._check_has_state()
        there = iter(state["there"])  # of each leaf; a file has tensors of the host alone
        self.env.set_state(map_tree(lambda leaf: leaf.to(self.device) if next(there) else leaf, state["env"]))
        self._before = state["before"]

    def _check_has_state(self) -> None:
        env, names = self.env, ("get_state", "set_state")
        is_of_simulation = hasattr(env, "get_state_dict")  # as ManiSkill's, without its steps and targets
        if is_of_simulation or not all(callable(getattr(env, name, None)) for name in names):
            raise EnvError(
                f"{self}: the state of a {type(env).__name__} can't be read; expected it to have get_state() and "
                "set_state(state), of all that its steps follow from"
            ).see("state of environments")

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self.env, "close", None)
        if callable(close):
            close()

    def __str__(self) -> str:
        return f"TorchEnvs({type(self.env).__name__})"

    # Inside

    def _begin(self, seed: int | None) -> Tree:
        with torch.no_grad():
            observations, extras = self._begun(seed)
            return self._observed(observations, extras)

    def _begun(self, seed: int | None) -> tuple[Any, Mapping[str, Any]]:
        """The first observations of an environment, as it gives them, and its extras."""
        if self._is_rsl_rl:
            if seed is not None and callable(getattr(self.env, "seed", None)):
                self.env.seed(seed)
            answer = self.env.get_observations()  # in rsl_rl's environments `reset` may make a step
        else:
            answer = self._steps.reset() if seed is None or not self._takes_seed else self._steps.reset(seed=seed)
        has_extras = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping)
        return answer if has_extras else (answer, {})

    def _stepped(self, answer: Any) -> Stepped:
        """The values of what `step` gave."""
        if not isinstance(answer, tuple | list) or len(answer) not in ((4,) if self._is_rsl_rl else _STEP_GIVES):
            raise EnvError(f"step gave {kind_of(answer)}, {self._expected(answer)}").see("flags")
        if len(answer) == 5:
            observations, rewards, terminateds, truncateds, extras = answer
            extras = _mapping("infos", extras)
            terminateds, truncateds = self._flags("terminateds", terminateds), self._flags("truncateds", truncateds)
        else:
            observations, rewards, dones, extras = answer
            extras = _mapping("extras", extras)
            terminateds, truncateds = self._flags("dones", dones), self._no_flags
            if (time_outs := extras.get("time_outs")) is not None:
                time_outs = self._flags("extras['time_outs']", time_outs)
                terminateds, truncateds = terminateds > time_outs, terminateds & time_outs  # `> x`: `& ~x` in one
        self.last_extras = extras
        now, last = self._observed(observations, extras), None
        name = next((name for name in _FINAL if name in extras), None)
        if name is not None and extras[name] is not None:
            last = self._last(f"{'infos' if len(answer) == 5 else 'extras'}['{name}']", extras[name], now)
        rewards = self._each("rewards", rewards)
        return Stepped(now, rewards, terminateds, truncateds, {}, None if last is None else (last, {}))

    def _expected(self, answer: Any) -> str:
        """What `step` is expected to give instead of an answer."""
        names = {count: f"({', '.join(each)})" for count, each in _STEP_GIVES.items()}
        if not self._is_rsl_rl:
            return f"expected {' or '.join(names.values())}"
        text = f"expected {names[4]} of an rsl_rl environment, one with num_actions and get_observations()"
        if isinstance(answer, tuple | list) and len(answer) == 5:
            text += "; five values are the form of legged_gym, with privileged observations, or of gymnasium"
        return text

    def _each(self, name: str, values: Any) -> Any:
        """A tensor any[N] that an environment gave. Raises EnvError for anything else."""
        if not isinstance(values, torch.Tensor) or values.shape != self._shape or values.device != self.device:
            place = f" on {values.device}" if isinstance(values, torch.Tensor) else ""
            expected = f"a tensor [{self.num_envs}] on {self.device}, with one value for each slot"
            raise EnvError(f"{name} is {shown(values)}{place}, expected {expected}").see("flags")
        return values.detach() if values.requires_grad else values

    def _flags(self, name: str, values: Any) -> Any:
        return self._each(name, values).bool()

    def _last(self, name: str, given: Any, now: Tree) -> Tree:
        """The last observations, any[N, ...], shaped as the newest ones are. Raises EnvError for others."""
        try:
            last = self._observed(given, {})
            if _are_alike(last, now):
                return last
        except EnvError:
            pass
        expected = f"{shown(now)}: a row for each of the {self.num_envs} slots, whether its episode ended or not"
        raise EnvError(f"{name} is {shown(given)}, expected {expected}").see("autoreset")

    def _observed(self, observations: Any, extras: Mapping[str, Any]) -> Tree:
        """The tree of tensors of what an environment gave."""
        if self._is_rsl_rl and "observations" in extras and isinstance(observations, torch.Tensor):
            observations = {"policy": observations, **extras["observations"]}  # rsl_rl 2
        tree = _tensors(observations)
        if self.group is None:
            return tree
        if not isinstance(tree, dict) or self.group not in tree:
            groups = f"its groups are {list(tree)}" if isinstance(tree, dict) else "its observations have no groups"
            raise EnvError(f"group is {self.group!r}, but {groups}")
        return tree[self.group]


def _tensors(observations: Any) -> Tree:
    """The observations with dicts for mappings and TensorDicts, and tuples for lists."""
    if isinstance(observations, torch.Tensor):
        return observations.detach() if observations.requires_grad else observations
    if isinstance(observations, tuple | list):
        return tuple(map(_tensors, observations))
    if not callable(getattr(observations, "items", None)):
        instead = "; an environment of arrays goes to Rollout without TorchEnvs"
        is_array = isinstance(observations, np.ndarray)
        raise EnvError(f"an observation is {kind_of(observations)}, expected a tensor{instead if is_array else ''}")
    return {key: _tensors(part) for key, part in observations.items()}


def _space_of(observations: Tree) -> gym.Space[Any]:
    """The space without bounds of one slot of observations, a tree of any[N, ...]."""
    if isinstance(observations, dict):
        return spaces.Dict({key: _space_of(part) for key, part in observations.items()})
    if isinstance(observations, tuple):
        return spaces.Tuple([_space_of(part) for part in observations])
    try:
        dtype = torch.empty(0, dtype=observations.dtype, device="cpu").numpy().dtype
    except TypeError:
        raise EnvError(f"an observation is {observations.dtype}, expected a dtype that numpy has") from None
    if dtype.kind not in "iub":
        return spaces.Box(-np.inf, np.inf, tuple(observations.shape[1:]), dtype.type)
    return spaces.Box(*whole_limits(dtype), tuple(observations.shape[1:]), dtype.type)


def _actions_in(space: Any) -> gym.Space[Any]:
    """The action space. Raises EnvError for one whose actions can't be made of tensors."""
    if not isinstance(space, gym.Space):
        raise EnvError(f"action_space is {shown(space)}, expected the gymnasium.Space of one slot's actions")
    for leaf in leaves_within(space, "action_space"):
        if isinstance(leaf.space, spaces.Box) and leaf.is_whole:
            raise EnvError(
                f"{leaf.path} is a Box of {leaf.dtype}, expected Discrete or MultiDiscrete, or one of floats"
            )
    return space


def _are_alike(one: Tree, other: Tree) -> bool:
    """True for two trees of tensors of one structure and the same shapes."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and _are_alike(part, other[key]) for key, part in one.items())
    return all(map(_are_alike, one, other))


def _mapping(name: str, extras: Any) -> Mapping[str, Any]:
    if extras is None:
        return {}
    if not callable(getattr(extras, "get", None)):
        raise EnvError(f"{name} is {kind_of(extras)}, expected a dict").see("flags")
    return extras  # type: ignore[no-any-return]


def _array(tensor: Any) -> NDArray[Any]:
    """A new array of a tensor's values."""
    array: NDArray[Any] = tensor.numpy(force=True)
    return array.copy() if tensor.device.type == "cpu" else array
