"""One vector step, whatever the autoreset mode: what a lane records of it.

All three of gymnasium's modes come to the same episodes. Under NEXT_STEP the step after an end only resets, which is
what a lane assumes where it is told of no last observations.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray
from optree import PyTreeSpec

from rollflow.stream.errors import EnvError
from rollflow.stream.infos import SlotInfos, replaced, without
from rollflow.stream.seeding import seed_for
from rollflow.stream.space import is_columnar, item_of
from rollflow.stream.tree import Tree, map_in, map_tree, stack_in, stack_trees, structure_of

logger = logging.getLogger(__name__)

_RESET_GIVES = "if that is reset's: each environment's takes seed and options by name, and gives (observation, info)"
_STEP_GIVES = ("observation", "reward", "terminated", "truncated", "info")


class Stepped(NamedTuple):
    """What a vector step gave."""

    observations: Tree  # any[N, ...]
    rewards: NDArray[Any]  # number[N]
    terminateds: NDArray[np.bool_]  # bool[N]
    truncateds: NDArray[np.bool_]  # bool[N]
    infos: Mapping[str, Any]  # gymnasium's vector form, or SlotInfos
    # Last observations (one per ended slot, in slot order) and their infos, where `observations` has the next first.
    final: tuple[Sequence[Tree], Mapping[str, Any]] | None = None


Turn = Callable[[], None]
Step = Callable[[Tree], Stepped]  # of actions, any[N, ...]; or what gymnasium gives, which lacks `final`


def nothing() -> None:
    """Nobody has to be told."""


def step_of(env: VectorEnv[Any, Any, Any], *, is_ours: bool, turn: Turn = nothing) -> Step:
    """The function that steps a vector environment; one that is ours may be stepped without its own `step`.

    turn    called when a reset within a step begins, and when it has ended, unless the environment blends them
    """
    if is_ours and isinstance(env, SyncVectorEnv):
        return _one_after_the_other(env, turn)
    mode = autoreset_mode(env)
    return _disabled(env, turn) if mode is AutoresetMode.DISABLED else _STEPS[mode](env)


def blends_resets(env: VectorEnv[Any, Any, Any], *, is_ours: bool) -> bool:
    """Whether its own `step` resets it, where nobody can tell a reset from a step."""
    is_one_by_one = is_ours and isinstance(env, SyncVectorEnv)
    return not is_one_by_one and autoreset_mode(env) is not AutoresetMode.DISABLED


def reset_first(env: VectorEnv[Any, Any, Any], seed: int, first_slot: int) -> tuple[Tree, Mapping[str, Any]]:
    """The first reset: every slot's seed follows from the rollout's and from the slot's number in it."""
    return reset_with(env, seeds_for(seed, first_slot, env.num_envs))


def seeds_for(seed: int, first_slot: int, num_envs: int) -> list[int]:
    """The seeds of so many slots, from the rollout's and the number of the first of them."""
    return [seed_for(seed, "env", first_slot + slot) for slot in range(num_envs)]


def reset_with(
    env: VectorEnv[Any, Any, Any], seeds: Sequence[int] | None, options: Any = None
) -> tuple[Tree, Mapping[str, Any]]:
    """Reset every slot with a seed of its own, or go on with the generators that there are."""
    seed: Any = None if seeds is None else list(seeds)
    if seed is not None and not isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
        seed = seed[0]  # one generator for all slots
    try:
        observations, infos = env.reset(seed=seed, options=options)
    except (AttributeError, TypeError, ValueError) as error:
        error.add_note(_RESET_GIVES)
        raise
    return observations, infos


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """The environment's mode. Raises EnvError where it does not say."""
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise EnvError(
            f"{env}: metadata['autoreset_mode'] is {mode!r}, expected a gymnasium.vector.AutoresetMode: "
            "without it the end of an episode can't be told from the start of the next"
        )
    return mode


def _one_after_the_other(env: SyncVectorEnv, turn: Turn) -> Step:
    """The environments of a `SyncVectorEnv` of our own, without what its `step` spends on copies and infos."""
    envs, space, seen = env.envs, env.action_space, env.single_observation_space
    structure = _structure_in(seen)
    steps, resets = [each.step for each in envs], [each.reset for each in envs]

    def step(actions: Tree) -> Stepped:
        taken: list[Any] = []
        try:
            each = actions if isinstance(actions, np.ndarray) else iterate(space, actions)
            for step_slot, action in zip(steps, each, strict=True):
                taken.append(step_slot(action))
        except Exception as error:
            error.add_note(f"slot {len(taken)}")
            raise
        observations, rewards, terminateds, truncateds, infos = _columns_of(taken)
        done = np.logical_or(terminateds, truncateds)
        final = _begun_anew(resets, done, observations, infos, structure, turn) if np.count_nonzero(done) else None
        vector_infos = SlotInfos(infos) if any(infos) else {}
        return Stepped(
            _stacked(observations, structure), np.array(rewards), terminateds, truncateds, vector_infos, final
        )

    return step


def _columns_of(taken: list[Any]) -> tuple[list[Tree], Sequence[Any], NDArray[np.bool_], NDArray[np.bool_], list[Any]]:
    """What every slot's step gave, item by item. Raises EnvError where one did not give its five."""
    try:
        observations, rewards, terminateds, truncateds, infos = zip(*taken, strict=True)
    except (TypeError, ValueError):
        for slot, given in enumerate(taken):
            count = len(given) if isinstance(given, Sequence) else None
            if count != len(_STEP_GIVES):
                told = f"a {type(given).__name__}" + (f" of {count}" if count is not None else "")
                expected = f"expected a tuple of {len(_STEP_GIVES)}: {', '.join(_STEP_GIVES)}"
                raise EnvError(f"slot {slot}: step gave {told}, {expected}") from None
        raise
    return (
        list(observations),
        rewards,
        _flags(terminateds, "terminated"),
        _flags(truncateds, "truncated"),
        list(infos),
    )


def _flags(given: Sequence[Any], name: str) -> NDArray[np.bool_]:
    try:
        flags = np.array(given, np.bool_)
    except ValueError:  # of different shapes
        flags = np.empty((0, 0), np.bool_)
    if flags.ndim == 1:
        return flags
    slot = next(slot for slot, each in enumerate(given) if np.ndim(each))
    raise EnvError(f"slot {slot}: {name} has shape {list(np.shape(given[slot]))}, expected one bool")


def _begun_anew(
    resets: Sequence[Callable[[], Any]],
    done: NDArray[np.bool_],
    observations: list[Tree],
    infos: list[Any],
    structure: PyTreeSpec,
    turn: Turn,
) -> tuple[Sequence[Tree], SlotInfos]:
    """Reset the slots that are done, whose observations and infos become the resets'; what they were before."""
    last: list[Tree] = []
    last_infos: list[dict[str, Any]] = [{}] * len(resets)
    for slot in np.flatnonzero(done).tolist():
        # The reset may write over both.
        last.append(_mapped(np.array, observations[slot], structure))
        last_infos[slot] = dict(infos[slot])
        turn()
        try:
            observations[slot], infos[slot] = resets[slot]()
        except Exception as error:
            error.add_note(f"slot {slot}")
            if isinstance(error, TypeError | ValueError):
                error.add_note(_RESET_GIVES)
            raise
        finally:
            turn()
    return last, SlotInfos(last_infos)


def _structure_in(space: gym.Space[Any]) -> PyTreeSpec:
    """Of observations in a space, where an environment may give lists for arrays."""
    return structure_of(item_of(space) if is_columnar(space) else 0)


def _mapped(function: Callable[..., Any], observation: Tree, structure: PyTreeSpec) -> Tree:
    try:
        return map_in(structure, function, observation)
    except ValueError:  # it has another structure, which is refused where it is written
        return map_tree(function, observation)


def _stacked(observations: list[Tree], structure: PyTreeSpec) -> Tree:
    try:
        if isinstance(observations[0], np.ndarray):
            return np.array(observations)
        with suppress(ValueError):
            return stack_in(structure, observations)
        return stack_trees(observations)
    except ValueError as error:
        shapes = ", ".join(
            f"{_mapped(np.shape, each, structure)} (slot {slot})" for slot, each in enumerate(observations)
        )
        raise EnvError(f"the environments gave observations of different shapes: {shapes}") from error


def _next_step(env: VectorEnv[Any, Any, Any]) -> Step:
    return env.step  # type: ignore[return-value]  # without last observations


def _same_step(env: VectorEnv[Any, Any, Any]) -> Step:
    """SAME_STEP: an ended episode's last observation is in `infos["final_obs"]`."""

    structure = _structure_in(env.single_observation_space)

    def step(actions: Tree) -> Stepped:
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        final = None
        if np.count_nonzero(terminateds) or np.count_nonzero(truncateds):
            slots = np.flatnonzero(np.logical_or(terminateds, truncateds)).tolist()
            final = (
                [_mapped(np.array, item, structure) for item in _final_items(infos, slots)],
                infos.get("final_info", {}),
            )
        kept = without(infos, "final_obs", "final_info")
        return Stepped(observations, rewards, terminateds, truncateds, kept, final)

    return step


def _disabled(env: VectorEnv[Any, Any, Any], turn: Turn) -> Step:
    """DISABLED: nothing resets by itself; the ended episodes' slots are reset right here."""

    def step(actions: Tree) -> Stepped:
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        done = np.logical_or(terminateds, truncateds)
        if not np.count_nonzero(done):
            return Stepped(observations, rewards, terminateds, truncateds, infos)
        rewards, terminateds, truncateds = rewards.copy(), terminateds.copy(), truncateds.copy()
        last = [map_tree(lambda leaf, i=i: leaf[i].copy(), observations) for i in np.flatnonzero(done).tolist()]
        turn()
        try:
            observations, reset_infos = env.reset(options={"reset_mask": done})
        finally:
            turn()
        merged = replaced(infos, reset_infos, done)
        return Stepped(observations, rewards, terminateds, truncateds, merged, (last, infos))

    return step


_STEPS: Mapping[AutoresetMode, Callable[[VectorEnv[Any, Any, Any]], Step]] = {
    AutoresetMode.NEXT_STEP: _next_step,
    AutoresetMode.SAME_STEP: _same_step,
}


def _final_items(infos: Mapping[str, Any], slots: Sequence[int]) -> list[Tree]:
    try:
        final = infos["final_obs"]
    except KeyError:
        raise EnvError(
            f"slots {list(slots)} ended under SAME_STEP autoreset, but infos has no 'final_obs': the last "
            "observations are lost; use another autoreset mode"
        ) from None
    return [map_tree(lambda leaf, i=i: leaf[i], final) for i in slots]


def close_failed(env: Any) -> None:
    """Close environments that have raised: closing them may fail as well, which is logged."""
    try:
        env.close()
    except Exception as error:
        logger.warning("environments that have failed can't be closed: %s: %s", type(error).__name__, error)
