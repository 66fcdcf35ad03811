"""Policy that acts by an ONNX program: with numpy and onnxruntime alone, without torch (extra `onnx`).

The program is a function of one vector step. Names of its inputs and outputs, N rows each:

    obs…               observations, one input for each leaf of the space: `obs`, or `obs.camera`, `obs.pair.0`
    rewards            f32[N]   for the actions before; if a piece looks back to rewards
    begins             bool[N]  True if an episode begins; if there is a memory
    memory.0, …        any[N, ...]  what the step before gave as `next_memory.0`, …; anything if an episode begins
    actions…           as the environment takes them, one output for each leaf
    action_dist_inputs f32[N, D], if the module gives them
"""

import contextlib
import io
import json
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.policies.artifact_files import ONNX, POLICY, read_files
from rollflow.stream.data.columns import RULED_OUT, Columns
from rollflow.stream.data.errors import ColumnError, PolicyError, refused
from rollflow.stream.data.ranges import check_range
from rollflow.stream.data.system import require_packages

METADATA = "rollflow"
FORMAT = 1
MEMORY, NEXT = "memory.", "next_"
_TOLERANCE = 1e-5  # on another device, with another torch, or by an ONNX program
_MOST_CLOSE_CALLS = 1 / 32  # of whole numbers, where two actions are about as likely
MOST_REMEMBERED = 1 << 26  # numbers, in one session's memory
DEFAULT_SESSION = "default"
_EXTERNAL = b"\x0a\x08location"  # how ONNX names another file that has its weights

Arrays = dict[str, NDArray[Any]]
Tree = Any


class OnnxPolicy:
    """A policy's ONNX program, with a memory for each environment that it acts in. It takes the likeliest action.

        model      bytes of the program
        threads    of onnxruntime

    Public attributes:

        observation_space, action_space    plain descriptions, as `policy.json` has them
        outputs                            all outputs of the last pass by name, any[N, ...]

    Sessions are as those of `Policy`: one environment each, as long as it lasts.

    Raises PolicyError for what is no such program.
    """

    def __init__(self, model: bytes, *, threads: int = 1) -> None:
        if _EXTERNAL in model:
            raise PolicyError("the ONNX program takes weights from other files, expected one that has its own")
        self._session = _session(model, threads)
        facts, inputs, self._outputs = _described(self._session)
        self.observation_space, self.action_space = facts.get("observation_space"), facts.get("action_space")
        self.outputs: Arrays = {}
        self._leaves = dict(named_spaces(self.observation_space, "obs"))
        self._memory = sorted(name for name in inputs if name.startswith(MEMORY))
        self._like = {name: _like(name, *inputs[name]) for name in self._memory}
        self._takes_rewards, self._takes_begins = "rewards" in inputs, "begins" in inputs
        expected = {*self._leaves, *self._memory} | {each for each in ("rewards", "begins") if each in inputs}
        missing = {name for name, _ in named_spaces(self.action_space, "actions")} - set(self._outputs)
        missing |= {f"{NEXT}{name}" for name in self._memory} - set(self._outputs)
        if inputs.keys() != expected or missing:
            raise PolicyError(
                f"the ONNX program takes {sorted(inputs)}, expected {sorted(expected)}; outputs {sorted(missing)} are "
                "missing"
            )
        self._homes: dict[Hashable, tuple[Arrays, int]] = {}  # memory after the last step, and the row in it

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, threads: int = 1) -> Self:
        """The policy of an artifact that has an ONNX program, or of an `.onnx` file.

        An artifact's program first does on the saved examples what the policy did. Raises PolicyError if it does
        not, if anything is missing or altered, and for an artifact without a program.
        """
        place = Path(path)
        if place.suffix == ".onnx":
            if not place.is_file():
                raise PolicyError(f"there is no file at {place}, expected an ONNX program")
            return cls(place.read_bytes(), threads=threads)
        manifest, files = read_files(place)
        if ONNX not in files:
            raise PolicyError(f"{place} has no {ONNX}, expected a policy saved with onnx=True")
        policy = cls(files[ONNX], threads=threads)
        for name in ("observation_space", "action_space"):
            if getattr(policy, name) != manifest.get(name):
                raise PolicyError(f"{ONNX} and policy.json have different {name}s, expected those of one policy")
        with refused("the examples can't be played"):
            policy.check(POLICY.arrays_of(files["examples.safetensors"], "examples.safetensors"))
        return policy

    # Acting

    def act(self, observation: Tree, reward: float | None = None, session: Hashable = DEFAULT_SESSION) -> Any:
        """The action for one observation, any[...], of one environment; see `act_batch`."""
        rewards = None if reward is None else np.array([reward], np.float32)
        actions = self._acted(observation, rewards, (session,), single=True)
        return self._tree_of(actions, 0)

    def act_batch(self, observations: Tree, rewards: Any = None, sessions: Sequence[Hashable] | None = None) -> Tree:
        """The actions, any[N, ...], for one observation each of N environments, in one pass.

            observations    any[N, ...]   a tree, as the environment's space has it
            rewards         f32[N]        for each session's action before; None: there are none
            sessions        N of them; None: 0 … N - 1

        Raises PolicyError for what does not fit, or gives NaN; every session then is as it was.
        """
        first = next(iter(_leaf_arrays(self.observation_space, observations, "obs").values()))
        ids = tuple(range(len(first) if first.ndim else 0)) if sessions is None else tuple(sessions)
        return self._tree_of(self._acted(observations, rewards, ids, single=False), slice(None))

    def reset(self, session: Hashable = DEFAULT_SESSION) -> None:
        """Begin a new episode with the session's next observation."""
        self._homes.pop(session, None)

    forget = reset
    """Release the memory of a session whose environment is gone."""

    @property
    def sessions(self) -> tuple[Hashable, ...]:
        """The sessions that have a memory."""
        return tuple(self._homes)

    def check(self, examples: Arrays) -> None:
        """Raise PolicyError if the program does not do, to 1e-5, what the policy did on its examples."""
        computed: dict[str, list[NDArray[Any]]] = {}
        for name, array in self._played(examples):
            computed.setdefault(name, []).append(array.reshape(-1))
        for name, parts in computed.items():
            made, saved = np.concatenate(parts), examples.get(name)
            if saved is None or saved.shape != made.shape:
                raise PolicyError(f"the ONNX program gives {name}, {list(made.shape)}, which the examples do not have")
            if (found := difference(saved, made, close_calls=True)) is not None:
                raise PolicyError(f"the ONNX program does not do what the policy does: in {name}, {found[1]}")

    # Inside

    def _played(self, examples: Arrays) -> Iterator[tuple[str, NDArray[Any]]]:
        """(name as the examples have it, outputs) of each step of the examples."""
        names = sorted_names(self.observation_space, "obs")
        rewards = examples["inputs/rewards"]
        for step in range(len(rewards)):
            ids = [("example", session) for session in range(rewards.shape[1])]
            if step == len(rewards) // 2:  # as the examples were made
                for session in ids[: len(ids) // 2]:
                    self.reset(session)
            leaves = {name: examples[f"inputs/obs/{place}"][step] for place, name in enumerate(names)}
            actions = self._acted(_tree(self.observation_space, leaves, "obs"), rewards[step], ids, single=False)
            for name in sorted_names(self.action_space, "actions"):
                yield f"actions: env {actions[name].dtype}", actions[name]
            if "action_dist_inputs" in actions:
                yield f"module: action_dist_inputs {actions['action_dist_inputs'].dtype}", actions["action_dist_inputs"]
        for session in ids:
            self.forget(session)

    def _acted(self, observations: Tree, rewards: Any, ids: Sequence[Hashable], *, single: bool) -> Arrays:
        count = len(ids)
        if len(set(ids)) < count or not count:
            raise PolicyError(f"sessions are {list(ids)[:8]}, expected at least one, and each once")
        leaves = _leaf_arrays(self.observation_space, observations, "obs")
        given = {name: self._checked(name, leaf[None] if single else leaf, count) for name, leaf in leaves.items()}
        begins = np.array([session not in self._homes for session in ids])
        if self._takes_rewards:
            earned = rewards_of(rewards, count)
            if earned is None and not begins.all():
                raise PolicyError("the policy looks back to rewards, expected that of each session's action before")
            given["rewards"] = np.zeros(count, np.float32) if earned is None else earned
        if self._takes_begins:
            given["begins"] = begins
            given |= self._remembered(ids)
        with refused("the ONNX program fails"):
            made = dict(zip(self._outputs, self._session.run(None, given), strict=True))
        for name, column in made.items():
            if column.dtype.kind == "f" and not name.startswith(NEXT) and np.isnan(column).any():
                raise PolicyError(f"'{name}' is NaN, expected numbers: are the observations finite?")
        sizes = _choices(self.action_space)
        if Columns.ACTION_DIST_INPUTS in made and sizes:
            begins_at = np.cumsum([0, *sizes[:-1]])
            most = np.maximum.reduceat(made[Columns.ACTION_DIST_INPUTS].reshape(count, -1), begins_at, axis=1)
            for row in np.flatnonzero((most <= RULED_OUT).any(1))[:1]:
                raise PolicyError(
                    f"'{Columns.ACTION_DIST_INPUTS}' rules out every action of session {ids[row]!r}, expected one that "
                    "is allowed"
                )
        memory = {name: made[f"{NEXT}{name}"] for name in self._memory}
        for row, session in enumerate(ids):
            self._homes[session] = memory, row
        self.outputs = made
        return made

    def _remembered(self, ids: Sequence[Hashable]) -> Arrays:
        homes = [self._homes.get(session) for session in ids]
        first = homes[0]
        together = first is not None and all(
            home is not None and home[0] is first[0] and home[1] == row for row, home in enumerate(homes)
        )
        if first is not None and together and all(len(each) == len(ids) for each in first[0].values()):
            return first[0]
        memory = {name: np.zeros((len(ids), *shape), dtype) for name, (dtype, shape) in self._like.items()}
        for row, home in enumerate(homes):
            if home is not None:
                for name, column in memory.items():
                    column[row] = home[0][name][home[1]]
        return memory

    def _checked(self, name: str, leaf: NDArray[Any], count: int) -> NDArray[Any]:
        dtype, shape = self._leaves[name]
        if leaf.shape != (count, *shape) or not np.can_cast(leaf.dtype, dtype, "same_kind"):
            raise PolicyError(
                f"'{name}' is {leaf.dtype}{list(leaf.shape)}, expected {dtype}{[count, *shape]}, as the space has it"
            )
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            raise PolicyError(f"'{name}' is not finite, expected numbers")
        try:
            check_range(leaf, dtype, f"'{name}'")
        except ColumnError as error:
            raise PolicyError(str(error)) from None
        return np.ascontiguousarray(leaf, dtype)

    def _tree_of(self, actions: Arrays, where: Any) -> Tree:
        return _tree(self.action_space, {name: column[where] for name, column in actions.items()}, "actions")


def _session(model: bytes, threads: int) -> Any:
    require_packages("an ONNX program", "onnx", "onnxruntime", error=PolicyError)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 4
    with refused("the ONNX program can't be read"), contextlib.redirect_stdout(io.StringIO()):  # it prints errors
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _described(session: Any) -> tuple[dict[str, Any], dict[str, tuple[str, list[Any]]], list[str]]:
    """What a program says of itself, the types and shapes of its inputs by name, and the names of its outputs."""
    with refused("the ONNX program can't be read"):  # names that are no text, and others of onnxruntime's
        text = session.get_modelmeta().custom_metadata_map.get(METADATA, "")
        inputs = {each.name: (each.type, each.shape) for each in session.get_inputs()}
        outputs = [each.name for each in session.get_outputs()]
    if not text:
        raise PolicyError("the ONNX program says nothing of its spaces, expected one that rollflow wrote")
    facts = POLICY.json_of(text.encode(), "the ONNX program")
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise PolicyError(f"the ONNX program says {str(facts)[:80]}, expected format {FORMAT}")
    return facts, inputs, outputs


def rewards_of(rewards: Any, count: int) -> NDArray[np.float32] | None:
    """The rewards of a call as an array f32[count]; None: none came. Raises PolicyError for another shape."""
    if rewards is None:
        return None
    array = np.asarray(rewards, np.float32)
    if array.shape != (count,):
        raise PolicyError(f"rewards are f32{list(array.shape)}, expected f32[{count}], one for each session")
    return array


def difference(saved: NDArray[Any], computed: NDArray[Any], *, close_calls: bool = False) -> tuple[int, str] | None:
    """The place of the first number of computed arrays any[n] that differs from the saved one, and how; None: none.

    Floats may differ by 1e-5.

    close_calls    True: a few whole numbers may differ, if two actions are about as likely
    """
    is_whole = saved.dtype.kind != "f"
    same = saved == computed if is_whole else np.isclose(computed, saved, _TOLERANCE, _TOLERANCE, equal_nan=True)
    if same.all() or (close_calls and is_whole and (~same).mean() <= _MOST_CLOSE_CALLS):
        return None
    place = int(np.flatnonzero(~same)[0])
    count = f"{int((~same).sum())} of {same.size} differ"
    return place, f"number {place} is {computed[place]!r}, expected {saved[place]!r} ({count})"


# Spaces as plain descriptions


def _parts(description: Any) -> list[tuple[Any, Any]] | None:
    """(key or place, description) of each part of a described Dict or Tuple; None: it is a leaf."""
    if description["type"] == "Dict":
        return [(key, part) for key, part in description["spaces"]]
    return list(enumerate(description["spaces"])) if description["type"] == "Tuple" else None


def named_spaces(description: Any, name: str) -> Iterator[tuple[str, tuple[np.dtype[Any], tuple[int, ...]]]]:
    """(name, (dtype, shape)) of each leaf of a described space, a Dict's parts by sorted key, as trees have them.

    Raises PolicyError for what is no space.
    """
    try:
        if (parts := _parts(description)) is not None:
            for key, part in sorted(parts, key=itemgetter(0)):
                yield from named_spaces(part, f"{name}.{key}")
        elif description["type"] == "MultiBinary":
            size = description["n"]
            yield name, (np.dtype(np.int8), tuple(size) if isinstance(size, list) else (size,))
        else:
            yield name, (np.dtype(description["dtype"]), tuple(description.get("shape", ())))
    except (KeyError, TypeError, ValueError):
        raise PolicyError(f"'{name}' is described by {str(description)[:80]}, expected a space") from None


def sorted_names(description: Any, name: str) -> list[str]:
    """The names of the leaves, in the order of `named_spaces`."""
    return [each for each, _ in named_spaces(description, name)]


def _leaf_arrays(description: Any, tree: Tree, name: str) -> Arrays:
    """Name -> array of each leaf. Raises PolicyError for a tree of another structure."""
    if (parts := _parts(description)) is None:
        try:
            return {name: np.asarray(tree)}
        except ValueError as error:
            raise PolicyError(f"'{name}' is no array: {error}") from None
    keys = [key for key, _ in parts]
    if description["type"] == "Dict":
        fits, expected = isinstance(tree, Mapping) and set(tree) == set(keys), f"a dict with {sorted(keys)}"
    else:
        fits, expected = isinstance(tree, tuple | list) and len(tree) == len(keys), f"a tuple of {len(keys)}"
    if not fits:
        raise PolicyError(f"'{name}' is {_outline(tree)}, expected {expected}")
    found = [_leaf_arrays(part, tree[key], f"{name}.{key}") for key, part in parts]
    return {key: leaf for each in found for key, leaf in each.items()}


def _tree(description: Any, leaves: Mapping[str, Any], name: str) -> Tree:
    if (parts := _parts(description)) is None:
        return leaves[name]
    made = {key: _tree(part, leaves, f"{name}.{key}") for key, part in parts}
    return made if description["type"] == "Dict" else tuple(made.values())


def _outline(tree: Any) -> str:
    return f"a dict with {sorted(map(str, tree))}" if isinstance(tree, Mapping) else type(tree).__name__


def _like(name: str, kind: str, shape: Sequence[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of what is remembered, by onnxruntime's `tensor(float)` and the like."""
    plain = kind.removeprefix("tensor(").removesuffix(")")
    sizes = shape[1:]
    try:
        dtype = np.dtype({"float": "float32", "double": "float64"}.get(plain, plain))
    except TypeError:
        dtype = np.dtype(object)
    bounded = all(type(size) is int and size >= 0 for size in sizes) and math.prod(sizes) <= MOST_REMEMBERED
    if dtype.kind not in "biuf" or not bounded:
        raise PolicyError(f"the ONNX program's '{name}' is {kind}{list(shape)}, expected numbers of a fixed shape")
    return dtype, tuple(sizes)


def _choices(description: Any) -> list[int]:
    """Actions that each number of a Discrete or MultiDiscrete space chooses from; none for another space."""
    if description["type"] == "MultiDiscrete":  # one number stands for all where they are the same
        return [int(size) for size in np.broadcast_to(description["nvec"], math.prod(description["shape"]))]
    return [description["n"]] if description["type"] == "Discrete" else []


def facts_text(observation_space: Any, action_space: Any) -> str:
    """What a program says of itself: JSON, for its metadata."""
    facts = {"format": FORMAT, "observation_space": observation_space, "action_space": action_space}
    return json.dumps(facts, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
