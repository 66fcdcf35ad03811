"""Examples that a saved policy carries: observations, and what it chose for them, to be compared on loading.

Playing and comparing them takes numpy alone, since `OnnxPolicy` does with it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import gymnasium as gym

STEPS, SESSIONS, RESET_AT = 8, 8, 4  # 64 observations; half of the sessions begin anew at step 4
TOLERANCE = 1e-5  # on another device, or with another torch
MOST_CLOSE_CALLS = 1 / 32  # of whole numbers, which rounding may change where two actions are about as likely
_LARGE = 1e3  # bounds beyond are as good as none

Arrays = dict[str, NDArray[Any]]
Tree = Any


def drawn_inputs(space: "gym.Space[Any]") -> Arrays:
    """Random observations, any[STEPS, SESSIONS, ...] by leaf, and rewards f32[STEPS, SESSIONS]; always the same."""
    from rollflow.stream.data.tree import leaves_of, stack_trees

    rng = np.random.default_rng(0)
    items = [_drawn(space, rng) for _ in range(STEPS * SESSIONS)]
    leaves = leaves_of(stack_trees(items))
    inputs = {
        f"inputs/obs/{place}": leaf.reshape(STEPS, SESSIONS, *leaf.shape[1:]) for place, leaf in enumerate(leaves)
    }
    return {**inputs, "inputs/rewards": rng.normal(size=(STEPS, SESSIONS)).astype(np.float32)}


def played(policy: Any, observations: Sequence[Tree], rewards: NDArray[np.float32]) -> Arrays:
    """The actions that a policy chooses, and their distributions' inputs, in order: name and dtype -> any[n].

    observations    of each step, any[N, ...]
    rewards         f32[STEPS, N]
    """
    columns: dict[str, list[NDArray[Any]]] = {}
    ids = range(rewards.shape[1])
    for step, seen in enumerate(observations):
        for session in ids[: len(ids) // 2] if step == RESET_AT else ():
            policy.reset(session)
        made = [("actions: env", leaf) for leaf in _leaves(policy.act_batch(seen, rewards[step], ids))]
        if (inputs := policy.outputs.get("action_dist_inputs")) is not None:
            made.append(("module: action_dist_inputs", inputs))
        for name, column in made:
            array = np.array(column)
            columns.setdefault(f"{name} {array.dtype}", []).append(array.reshape(-1))
    for session in ids:
        policy.forget(session)
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def difference_of(saved: Arrays, computed: Arrays) -> str:
    """The first column of what was computed that is not, to 1e-5, as it was saved, in words; "": there is none."""
    for name, array in computed.items():
        before = saved.get(name)
        if before is None or before.shape != array.shape:
            return f"{name} has {array.size} numbers, expected {0 if before is None else before.size}"
        if array.dtype.kind == "f":
            same, most = np.isclose(array, before, TOLERANCE, TOLERANCE, equal_nan=True), 0.0
        else:
            same, most = array == before, MOST_CLOSE_CALLS
        if (~same).mean() > most:
            place = int(np.flatnonzero(~same)[0])
            return (
                f"in {name}, number {place} is {array[place]!r}, expected {before[place]!r} "
                f"({int((~same).sum())} of {same.size} differ)"
            )
    return ""


def _leaves(tree: Tree) -> list[Any]:
    """The leaves of a tree, a dict's parts by sorted key."""
    if isinstance(tree, Mapping):
        return [leaf for key in sorted(tree) for leaf in _leaves(tree[key])]
    return [leaf for part in tree for leaf in _leaves(part)] if isinstance(tree, tuple) else [tree]


def observations_at(space: "gym.Space[Any]", inputs: Arrays, step: int) -> Tree:
    """The observations of a step of the inputs, any[SESSIONS, ...] by leaf."""
    from rollflow.stream.data.tree import map_tree, tree_at

    leaves = iter(
        [inputs[f"inputs/obs/{place}"] for place in range(sum(name.startswith("inputs/obs/") for name in inputs))]
    )
    like = _drawn(space, np.random.default_rng(0))
    return tree_at(map_tree(lambda _: next(leaves), like), step)


def _drawn(space: "gym.Space[Any]", rng: np.random.Generator) -> Tree:
    """An item of a space, with numbers of a usual size where it has no bounds."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        items = {key: _drawn(part, rng) for key, part in space.items()}
        mask = items.get("action_mask")
        if isinstance(mask, np.ndarray) and mask.size and not mask.any():
            mask.reshape(-1)[rng.integers(mask.size)] = 1  # environments always allow an action
        return items
    if isinstance(space, spaces.Tuple):
        return tuple(_drawn(part, rng) for part in space)
    if isinstance(space, spaces.Box):
        low, high = (np.asarray(bound, np.float64) for bound in (space.low, space.high))
        bounded = (low >= -_LARGE) & (high <= _LARGE)
        uniform = rng.uniform(np.where(bounded, low, 0.0), np.where(bounded, high, 1.0))
        item = np.where(bounded, uniform, np.clip(rng.normal(size=space.shape), low, high))
        return np.asarray(item).astype(space.dtype)
    space.seed(int(rng.integers(2**31)))
    return np.asarray(space.sample())
