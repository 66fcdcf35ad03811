"""Environments that are functions in JAX: many slots step as one compiled function, in tensors on its device."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from rollflow.nodes.argument_checks import check_numbers, checking_constructor
from rollflow.nodes.device.foreign_spaces import gymnasium_space
from rollflow.nodes.device.torch_envs import TorchEnvs
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.data.system import require_packages
from rollflow.stream.data.tree import Tree, map_tree

_GYMNAX = {"step": "key, state, action, params", "observation_space": "params", "action_space": "params"}

Functions = tuple[Callable[..., Any], Callable[..., Any], gym.Space[Any] | None, gym.Space[Any]]
"""Of one slot, and its spaces of observations, if they are known, and actions:

begin    key -> state, observations
step     key, state, actions -> state, observations, reward, whether terminated, whether truncated, last observations
"""


@checking_constructor()
class JaxEnvs(TorchEnvs):
    """Vector environment made of an environment of one slot in JAX.

        env         an environment that is free of side effects:

                    * gymnax's, with `reset(key, params)`, `step(key, state, action, params)`,
                      `observation_space(params)`, `action_space(params)` and `default_params`. Before version 1.0 every
                      end is a termination. One of your own has `step_env`, which does not reset itself, and takes and
                      gives what `step` does; both may be the same
                    * Brax's, and MuJoCo Playground's, with `reset(key)` and `step(state, action)`, which does not reset
                      itself: `auto_reset=False`. `info["truncation"]` are truncations
                    * PGX's for one player, with `init(key)` and `step(state, action, key)`

        params      of a gymnax environment; None: its `default_params`
        num_envs    N, the number of slots

    A slot begins anew in the step that ends its episode, whose last observation is recorded. A slot's keys follow from
    the rollout's seed. Tensors and JAX's arrays share memory, on the device that is JAX's default where this is made.

    All else is as for `TorchEnvs`. Raises EnvError also if JAX is missing, or on a device that torch can't use.
    """

    def __init__(self, env: Any, params: Any = None, *, num_envs: int, allow_host_copies: bool = False) -> None:
        check_numbers(num_envs=(num_envs, 1))
        require_packages("JaxEnvs", "jax", "jax", error=EnvError)
        begin, step, seen, done = _functions_of(env, params)
        slots = JaxSlots(begin, step, num_envs)
        super().__init__(slots, observation_space=seen, action_space=done, allow_host_copies=allow_host_copies)
        self._name = type(env).__name__

    def __str__(self) -> str:
        return f"JaxEnvs({self._name})"


class JaxSlots:
    """N slots of an environment in JAX, with `reset` and `step` of tensors any[N, ...].

    A slot has a key of `jax.random.split(jax.random.PRNGKey(seed), N)`, which is split in two at the reset and in each
    step: it keeps the first, and `begin` or `step` gets the second.

    num_envs    N
    device      of the tensors
    """

    def __init__(self, begin: Callable[..., Any], step: Callable[..., Any], num_envs: int) -> None:
        self._jax = jax = import_module("jax")
        split = jax.random.split

        def begun(key: Any) -> Any:
            kept, given = split(key)
            state, observations = begin(given)
            return (kept, state), observations

        def stepped(held: Any, actions: Any) -> Any:
            kept, given = split(held[0])
            state, *values = step(given, held[1], actions)
            return (kept, state), values

        self.num_envs = num_envs
        self._begun = jax.jit(lambda key: jax.vmap(begun)(split(key, num_envs)))
        self._stepped = jax.jit(jax.vmap(stepped))
        self._held: Any = None  # keys and states of all slots
        one = jax.numpy.zeros(1)
        (self._place,) = one.devices()
        try:
            self.device = from_dlpack(one).device
        except (AssertionError, BufferError, RuntimeError) as error:
            raise EnvError(
                f"JAX is on {self._place}, which torch can't use here: {error}; expected one device for both, such as "
                "with jax.default_device(jax.devices('cpu')[0]): JaxEnvs(…)"
            ) from error

    def reset(self, *, seed: int | None = None) -> Tree:
        """Begin an episode in every slot: observations, any[N, ...]. Without a seed each time others."""
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        key = self._jax.device_put(self._jax.random.PRNGKey(seed), self._place)
        self._held, observations = self._begun(key)
        return self._tensors(observations)

    def step(self, actions: Tree) -> tuple[Any, ...]:
        """Gymnasium's five values, with `infos["final_obs"]`, any[N, ...]."""
        self._held, values = self._stepped(self._held, map_tree(self._array, actions))
        *values, last = self._tensors(values)
        return (*values, {"final_obs": last})

    def get_state(self) -> list[NDArray[Any]]:
        """Keys and states of all slots, leaf by leaf."""
        leaves = self._jax.tree.leaves(self._held)
        return [np.array(self._jax.random.key_data(leaf) if self._is_key(leaf) else leaf) for leaf in leaves]

    def set_state(self, state: Sequence[NDArray[Any]]) -> None:
        """Go on from what another one gave, once reset."""
        jax = self._jax
        leaves, structure = jax.tree.flatten(self._held)
        there = [jax.device_put(leaf, self._place) for leaf in state]
        made = [
            jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if self._is_key(old) else new
            for old, new in zip(leaves, there, strict=True)
        ]
        self._held = jax.tree.unflatten(structure, made)

    def _is_key(self, leaf: Any) -> bool:
        is_key: bool = self._jax.dtypes.issubdtype(leaf.dtype, self._jax.dtypes.prng_key)
        return is_key

    def _tensors(self, arrays: Any) -> Any:
        return self._jax.tree.map(from_dlpack, arrays)

    def _array(self, actions: torch.Tensor) -> Any:
        # JAX has no i64 by default, and compiles no view that is not contiguous.
        actions = actions.to(torch.int32) if actions.dtype is torch.int64 else actions.contiguous()
        return self._jax.dlpack.from_dlpack(actions)


def _functions_of(env: Any, params: Any) -> Functions:
    """The functions of an environment. Raises EnvError for one of another kind."""
    has = [name for name in ("reset", "init", "step") if callable(getattr(env, name, None))]
    is_made, name = not isinstance(env, type), type(env).__name__
    lacks = [f"{each}({_GYMNAX[each]})" for each in _GYMNAX if not callable(getattr(env, each, None))]
    if params is None and not hasattr(env, "default_params"):
        lacks.append("default_params")
    if is_made and has[:1] == ["reset"] and not lacks:
        return _gymnax(env, env.default_params if params is None else params)
    is_like_gymnax = any(callable(getattr(env, each, None)) for each in ("step_env", "action_space"))
    if params is not None and not is_like_gymnax:
        raise EnvError(f"params is {shown(params)}, expected None for a {name}, which is no gymnax environment")
    if is_made and has[:1] == ["reset"] and hasattr(env, "action_size"):
        return _brax(env)
    if is_made and has == ["init", "step"]:
        return _pgx(env)
    given = "the class " + env.__name__ if isinstance(env, type) else shown(env)
    hint = "; gymnax.make gives two values: JaxEnvs(*gymnax.make(…), num_envs=…)" if isinstance(env, tuple) else ""
    if is_made and has[:1] == ["reset"]:
        hint = f"; in gymnax's form it lacks {', '.join(lacks)}"
        if "step" not in has and callable(getattr(env, "step_env", None)):
            hint += ": step may be step_env"
    raise EnvError(f"env is {given}, expected an environment of gymnax, Brax, or PGX{hint}")


def _gymnax(env: Any, params: Any) -> Functions:
    jax = import_module("jax")

    def begin(key: Any) -> Any:
        observations, state = env.reset(key, params)
        return state, observations

    def step_of_old(key: Any, state: Any, actions: Any) -> Any:
        last, state, reward, done, _ = env.step_env(key, state, actions, params)
        return state, last, reward, done, jax.numpy.zeros_like(done)

    def step(key: Any, state: Any, actions: Any) -> Any:
        now, after, reward, *ends, infos = env.step(key, state, actions, params)
        if len(ends) == 2 and "final_observation" in infos:
            return after, now, reward, *ends, infos["final_observation"]
        if not hasattr(type(env), "step_env"):  # that which a wrapper hands on is not its own
            raise EnvError(
                f"{type(env).__name__} gives no info['final_observation'], and has no step_env, so that last "
                "observations of episodes are lost; expected an environment of gymnax 1.0, or one without wrapper; one "
                "of your own has step_env(key, state, action, params), which does not reset itself"
            )
        return _beginning_anew(begin, step_of_old)(key, state, actions)

    seen = jax.eval_shape(begin, jax.random.PRNGKey(0))[1]
    return begin, step, gymnasium_space(env.observation_space(params), seen), gymnasium_space(env.action_space(params))


def _brax(env: Any) -> Functions:
    jax = import_module("jax")

    def begin(key: Any) -> Any:
        state = env.reset(key)
        return state, state.obs

    def step(key: Any, state: Any, actions: Any) -> Any:
        state = env.step(state, actions)
        done, is_cut = state.done != 0, state.info.get("truncation", 0) != 0
        return state, state.obs, state.reward, done & ~is_cut, done & is_cut

    state = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
    if "first_obs" in state.info:
        raise EnvError(
            f"env is {shown(env)}, which resets itself, and keeps no episode's last observation; expected it without "
            "AutoResetWrapper: auto_reset=False"
        )
    action_space = spaces.Box(-1, 1, (env.action_size,), np.float32)
    return begin, _beginning_anew(begin, step), None, action_space


def _pgx(env: Any) -> Functions:
    if env.num_players != 1:
        raise EnvError(f"env is {shown(env)} for {env.num_players} players, expected a game for one")

    def seen(state: Any) -> Any:
        if str(env.id).startswith("minatar-"):  # where each action is legal
            return state.observation
        return {"observation": state.observation, "action_mask": state.legal_action_mask}

    def begin(key: Any) -> Any:
        state = env.init(key)
        return state, seen(state)

    def step(key: Any, state: Any, actions: Any) -> Any:
        state = env.step(state, actions, key)
        return state, seen(state), state.rewards[0], state.terminated, state.truncated

    return begin, _beginning_anew(begin, step), None, spaces.Discrete(env.num_actions)


def _beginning_anew(begin: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of an environment that does not reset itself: its key is split into the step's and the reset's."""
    jax = import_module("jax")

    def stepped(key: Any, state: Any, actions: Any) -> Any:
        of_step, of_reset = jax.random.split(key)
        state, last, reward, terminated, truncated = step(of_step, state, actions)
        done = terminated | truncated
        state, now = jax.tree.map(lambda new, old: jax.numpy.where(done, new, old), begin(of_reset), (state, last))
        return state, now, reward, terminated, truncated, last

    return stepped
