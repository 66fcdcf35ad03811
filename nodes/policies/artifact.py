"""A policy as files and back: the manifest, the arrays beside it, and the checks when they are read."""

import copy
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.connectors.common.batches import as_array
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, LambdaConnector
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.modules.policy_weights import Arrays as WeightArrays, from_arrays, to_arrays
from rollflow.nodes.policies import part_records
from rollflow.nodes.policies.artifact_files import MANIFEST, POLICY
from rollflow.nodes.policies.onnx_policy import difference
from rollflow.nodes.policies.space_text import described, space_of
from rollflow.stream.data.errors import PolicyError, shown
from rollflow.stream.data.space import item_of
from rollflow.stream.data.stored_files import array_bytes, checksums
from rollflow.stream.data.tree import Tree, equal_trees, leaves_of, map_tree, stack_trees
from rollflow.stream.fragments.live_episode import LaneEpisodes

if TYPE_CHECKING:
    from rollflow.nodes.policies.policy import Policy

STEPS, SESSIONS, RESET_AT = 8, 8, 4  # 64 observations; half of the sessions begin anew at step 4
CHOSEN = ("module_to_env", "actions")  # parts whose whole numbers rounding may change, where two are about as likely
_LARGE = 1e3  # bounds beyond are as good as none

Arrays = dict[str, NDArray[Any]]
_PIPELINES = ("env_to_module", "module_to_env")
_PACKAGES = ("rollflow", "torch", "numpy", "gymnasium")


_FIELDS = {"kind", "format", "versions", "trained_on", "explore", "observation_space", "action_space"}
_FIELDS |= {"module", "weights", *_PIPELINES, "files"}


@dataclass(frozen=True, slots=True)
class Examples:
    """What a policy was tried on when it was saved.

    inputs, computed    observations, and what each part made of them
    """

    inputs: Arrays = field(default_factory=dict)
    computed: Arrays = field(default_factory=dict)


def files_of(policy: "Policy", examples: Examples, others: Mapping[str, bytes]) -> dict[str, bytes]:
    """Name -> contents of a policy's files, the manifest first.

    others    its ONNX program; {} for a policy without

    Raises PolicyError for a policy with a part that can't be saved.
    """
    arrays: Arrays = {}
    weights = to_arrays(policy.module.state_dict())
    pipelines = {name: part_records.record_of_piece(getattr(policy, name), name, arrays) for name in _PIPELINES}
    content: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
        "trained_on": part_records.to_plain(policy.trained_on, "trained_on", arrays),
        "explore": policy.explore,
        "observation_space": described(policy.observation_space),
        "action_space": described(policy.action_space),
        "module": part_records.record_of_module(policy.module, "module", arrays),
        "weights": {
            "dtypes": dict(sorted(weights.dtypes.items())),
            "others": part_records.to_plain(weights.others, "weights", arrays),
        },
        **pipelines,
    }
    files = {
        "module.safetensors": array_bytes(weights.tensors),
        "state.safetensors": array_bytes(arrays),
        "examples.safetensors": array_bytes({**examples.inputs, **examples.computed}),
        **others,
    }
    return {MANIFEST: POLICY.manifest_bytes({**content, "files": checksums(files)}), **files}


def parts_of(
    manifest: dict[str, Any], files: Mapping[str, bytes], allow: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any], Examples]:
    """What a manifest and its files describe: arguments of `Policy`, its `trained_on`, and its examples.

        allow    packages and modules whose classes and functions may be imported

    Raises PolicyError for anything that does not fit, with its place.
    """
    part_records.check_fields(manifest, _FIELDS, "policy.json")
    states = POLICY.arrays_of(files["state.safetensors"], "state.safetensors")
    examples = POLICY.arrays_of(files["examples.safetensors"], "examples.safetensors")
    spaces = {name: space_of(manifest[name], name) for name in ("observation_space", "action_space")}
    pipelines = {name: _pipeline(manifest[name], name, list(spaces.values()), states, allow) for name in _PIPELINES}
    weights = _weights(
        manifest["weights"], POLICY.arrays_of(files["module.safetensors"], "module.safetensors"), states, allow
    )
    record = manifest["module"]
    part_records.check_fields(record, part_records.MODULE_FIELDS, "module")
    module, initial = part_records.module_of(record, weights, "module", states, allow)
    _check_initial(module, initial)
    trained_on = part_records.from_plain(manifest["trained_on"], "trained_on", states, allow)
    if states:
        raise PolicyError(f"state.safetensors has arrays that nothing uses: {sorted(states)}; expected none")
    if not isinstance(manifest["explore"], bool) or not isinstance(trained_on, dict):
        raise PolicyError("policy.json: explore and trained_on are not as expected: True or False, and a dict")
    if not is_whole(steps := trained_on.get("vector_steps", 0)) or steps < 0:
        raise PolicyError(f"policy.json: vector_steps of trained_on is {shown(steps)}, expected a whole number")
    inputs = {name: array for name, array in examples.items() if name.startswith("inputs/")}
    computed = {name: array for name, array in examples.items() if name not in inputs}
    arguments = {"module": module, **pipelines, **spaces, "explore": manifest["explore"]}
    return arguments, trained_on, Examples(inputs, computed)


def _pipeline(record: Any, name: str, spaces: list[gym.Space[Any]], states: Arrays, allow: Collection[str]) -> Any:
    piece, inner = part_records.piece_of(record, name, states, allow)
    if not isinstance(piece, ConnectorPipelineV2):
        raise PolicyError(f"{name} is a {type(piece).__name__}, expected a pipeline")
    if piece.input_observation_space is None or piece.input_action_space is None:
        piece.set_input_spaces(*spaces)
    part_records.set_states(inner, name)
    return piece


def _weights(record: Any, tensors: Arrays, states: Arrays, allow: Collection[str]) -> dict[str, Any]:
    part_records.check_fields(record, {"dtypes", "others"}, "weights")
    others = part_records.from_plain(record["others"], "weights", states, allow)
    dtypes = record["dtypes"]
    if not isinstance(dtypes, dict) or not isinstance(others, dict) or set(dtypes) - set(tensors):
        raise PolicyError(f"weights: dtypes and others are not as expected; there are tensors {sorted(tensors)[:8]}")
    return from_arrays(WeightArrays(tensors, dtypes, others))


def _check_initial(module: Any, initial: Any) -> None:
    own = module.get_initial_state() if hasattr(module, "get_initial_state") else {}
    own, initial = map_tree(as_array, own), map_tree(as_array, initial)
    if not equal_trees(own, initial):
        raise PolicyError(
            f"module: {type(module).__name__}.get_initial_state() is {_text(own)}, expected {_text(initial)}, as "
            "it was when the policy was saved"
        )


def _text(state: Any) -> Any:
    return map_tree(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", state)


# Examples: observations, and what each part makes of them


def drawn_inputs(space: gym.Space[Any]) -> Arrays:
    """Random observations, any[STEPS, SESSIONS, ...] by leaf, and rewards f32[STEPS, SESSIONS]; always the same."""
    rng = np.random.default_rng(0)
    items = [_drawn(space, rng) for _ in range(STEPS * SESSIONS)]
    leaves = leaves_of(stack_trees(items))
    inputs = {
        f"inputs/obs/{place}": leaf.reshape(STEPS, SESSIONS, *leaf.shape[1:]) for place, leaf in enumerate(leaves)
    }
    return {**inputs, "inputs/rewards": rng.normal(size=(STEPS, SESSIONS)).astype(np.float32)}


def traced(
    make: Callable[[ConnectorPipelineV2, ConnectorPipelineV2], "Policy"],
    pipelines: tuple[ConnectorPipelineV2, ConnectorPipelineV2],
    space: gym.Space[Any],
    inputs: Arrays,
) -> Arrays:
    """All that a policy's parts make of the inputs, in order: name of the part and column -> any[n].

    make         makes a policy with pipelines in the place of its own
    pipelines    its own
    space        of the observations
    """
    parts: dict[str, list[NDArray[Any]]] = {}
    before, after = pipelines

    def record(part: str, columns: Batch) -> None:
        for name, column in columns.items():
            for leaf in leaves_of(column):
                array = as_array(leaf)
                if array.dtype.kind in "biuf":
                    parts.setdefault(f"{part}: {name} {array.dtype}", []).append(np.array(array).reshape(-1))

    def probe(part: str, *, sees_episodes: bool) -> ConnectorV2:
        """A piece that records the batch, and the observations of the episodes, as a part leaves them."""

        def saw(batch: Batch, episodes: Any) -> None:
            if sees_episodes:
                is_columnar = isinstance(episodes, LaneEpisodes)
                latest = episodes.observations() if is_columnar else [each.get_observations(-1) for each in episodes]
                record(part, {"episodes": latest})
            record(part, batch)

        return LambdaConnector(saw, name="probe", columnar=True, changes_episodes=False)

    first = [probe("module", sees_episodes=False)]
    probed = make(
        _probed(before, partial(probe, sees_episodes=True), "env_to_module", []),
        _probed(after, partial(probe, sees_episodes=False), "module_to_env", first),
    )
    steps, size = inputs["inputs/rewards"].shape
    for step in range(steps):
        if step == RESET_AT:
            for session in range(size // 2):
                probed.reset(session)
        actions = probed.act_batch(observations_at(space, inputs, step), inputs["inputs/rewards"][step])
        record("actions", {"env": actions})
    return {name: np.concatenate(each) for name, each in parts.items()}


def check_same(saved: Arrays, computed: Arrays, *, skipped: Sequence[str] = ()) -> None:
    """Raise PolicyError for the first part whose results differ by more than 1e-5 from those saved with the policy.

    skipped    beginnings of names that are not compared
    """
    missing, unused = sorted(computed.keys() - saved.keys()), sorted(saved.keys() - computed.keys())
    compared = [name for name in computed if name in saved and not name.startswith(tuple(skipped))]
    faults = [fault for name in compared if (fault := _fault(name, saved[name], computed[name])) is not None]
    if faults:
        _, name, text = min(faults, key=itemgetter(0))
        part, _, column = name.partition(": ")
        raise PolicyError(
            f"the loaded policy does not do what it did when it was saved: {part} is the first part that differs, in "
            f"column {column}: {text}; expected the same packages, pieces and states"
        )
    if missing or unused:
        raise PolicyError(f"the examples have other columns than the policy: missing {missing}, unused {unused}")


def _fault(name: str, saved: NDArray[Any], computed: NDArray[Any]) -> tuple[int, str, str] | None:
    """The first step at which a column differs, its name, and how it does."""
    if saved.shape != computed.shape or saved.dtype != computed.dtype:
        return 0, name, f"{computed.dtype}{list(computed.shape)}, expected {saved.dtype}{list(saved.shape)}"
    found = difference(saved, computed, close_calls=name.startswith(CHOSEN))
    return None if found is None else (found[0] * STEPS // saved.size, name, found[1])


def _probed(
    pipeline: ConnectorPipelineV2, probe: Callable[[str], ConnectorV2], where: str, first: Sequence[ConnectorV2]
) -> ConnectorPipelineV2:
    """A pipeline of the same pieces behind the `first` ones, with a probe behind each of its own."""
    pipeline = copy.deepcopy(pipeline)  # a piece is in one pipeline at a time
    pieces = [*first]
    for name, piece in zip(pipeline.names, pipeline, strict=True):
        pieces += [piece, probe(f"{where}/{name}")]
    return type(pipeline)(pipeline.input_observation_space, pipeline.input_action_space, connectors=pieces)


def observations_at(space: gym.Space[Any], inputs: Arrays, step: int) -> Tree:
    """The observations of a step of the inputs, any[SESSIONS, ...] by leaf."""
    leaves = (inputs[f"inputs/obs/{place}"][step] for place in count())
    return map_tree(lambda _: next(leaves), item_of(space))


def _drawn(space: gym.Space[Any], rng: np.random.Generator) -> Tree:
    """An item of a space, with numbers of a usual size if it has no bounds."""
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
