"""Examples that a saved policy carries: observations, and what each part makes of them, to be compared on loading."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.policies.onnx_policy import difference
from rollflow.stream.data.errors import PolicyError
from rollflow.stream.data.tree import Tree, leaves_of, map_tree, stack_trees, tree_at
from rollflow.stream.fragments.live_episode import LaneEpisodes

if TYPE_CHECKING:
    from rollflow.nodes.policies.policy import Policy

STEPS, SESSIONS, RESET_AT = 8, 8, 4  # 64 observations; half of the sessions begin anew at step 4
CHOSEN = ("module_to_env", "actions")  # parts whose whole numbers rounding may change, where two are about as likely
_LARGE = 1e3  # bounds beyond are as good as none

Arrays = dict[str, NDArray[Any]]


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
    recorder = _Recorder()
    before, after = pipelines
    probed = make(_probed(before, recorder, "env_to_module"), _probed(after, recorder, "module_to_env", "module"))
    count, size = inputs["inputs/rewards"].shape
    for step in range(count):
        if step == RESET_AT:
            for session in range(size // 2):
                probed.reset(session)
        actions = probed.act_batch(observations_at(space, inputs, step), inputs["inputs/rewards"][step])
        recorder.record("actions", {"env": actions})
    return recorder.arrays()


def check_same(saved: Arrays, computed: Arrays, *, exact: bool, skipped: Sequence[str] = ()) -> None:
    """Raise PolicyError for the first part whose results differ from those that were saved with the policy.

    exact      True: to the bit; False: floats within 1e-5
    skipped    beginnings of names that are not compared
    """
    missing, unused = sorted(computed.keys() - saved.keys()), sorted(saved.keys() - computed.keys())
    compared = [name for name in computed if name in saved and not name.startswith(tuple(skipped))]
    faults = [fault for name in compared if (fault := _fault(name, saved[name], computed[name], exact)) is not None]
    if faults:
        _, name, text = min(faults, key=itemgetter(0))
        part, _, column = name.partition(": ")
        raise PolicyError(
            f"the loaded policy does not do what it did when it was saved: {part} is the first part that differs, in "
            f"column {column}: {text}; expected the same packages, pieces and states"
        )
    if missing or unused:
        raise PolicyError(f"the examples have other columns than the policy: missing {missing}, unused {unused}")


def is_same(saved: Arrays, computed: Arrays) -> bool:
    """True if all results are the same to 1e-5."""
    try:
        check_same(saved, computed, exact=False)
    except PolicyError:
        return False
    return True


def _fault(name: str, saved: NDArray[Any], computed: NDArray[Any], exact: bool) -> tuple[int, str, str] | None:
    """The first step at which a column differs, its name, and how it does."""
    if saved.shape != computed.shape or saved.dtype != computed.dtype:
        return 0, name, f"{computed.dtype}{list(computed.shape)}, expected {saved.dtype}{list(saved.shape)}"
    found = difference(saved, computed, exact=exact, close_calls=name.startswith(CHOSEN) and not exact)
    return None if found is None else (found[0] * STEPS // saved.size, name, found[1])


class _Recorder:
    """Collects columns by name, step by step; copies of a pipeline have the same one."""

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[Any]]] = {}

    def __deepcopy__(self, memo: Any) -> "_Recorder":
        return self

    def record(self, part: str, columns: dict[str, Any]) -> None:
        for name, column in columns.items():
            for leaf in leaves_of(column):
                array = leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
                if array.dtype.kind in "biuf":
                    key = f"{part}: {name} {array.dtype}"
                    self._parts.setdefault(key, []).append(np.array(array).reshape(-1))

    def arrays(self) -> Arrays:
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}


class _Probe(ConnectorV2):
    """Piece that records the batch, and the observations of the episodes, as the piece before leaves them."""

    columnar = True
    changes_episodes = False

    def __init__(self, recorder: _Recorder, part: str, number: int, *, sees_episodes: bool) -> None:
        super().__init__()
        self.recorder, self.part, self.sees_episodes = recorder, part, sees_episodes
        self.name = f"probe {number}"

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if self.sees_episodes:
            if isinstance(episodes, LaneEpisodes):
                latest = episodes.observations()
            else:
                latest = [each.get_observations(-1) for each in episodes]
            self.recorder.record(self.part, {"episodes": latest})
        self.recorder.record(self.part, batch)
        return batch


def _probed(
    pipeline: ConnectorPipelineV2, recorder: _Recorder, where: str, before: str | None = None
) -> ConnectorPipelineV2:
    """A pipeline of the same pieces, with a probe behind each; `before` names what the first piece is given."""
    sees = where == "env_to_module"
    pipeline = copy.deepcopy(pipeline)  # a piece is in one pipeline at a time
    numbers = itertools.count()

    def probes() -> Iterator[ConnectorV2]:
        if before is not None:
            yield _Probe(recorder, before, next(numbers), sees_episodes=False)
        for name, piece in zip(pipeline.names, pipeline, strict=True):
            yield piece
            yield _Probe(recorder, f"{where}/{name}", next(numbers), sees_episodes=sees)

    spaces_ = pipeline.input_observation_space, pipeline.input_action_space
    return type(pipeline)(*spaces_, connectors=list(probes()))


def observations_at(space: gym.Space[Any], inputs: Arrays, step: int) -> Tree:
    """The observations of a step of the inputs, any[SESSIONS, ...] by leaf."""
    leaves = iter(
        [inputs[f"inputs/obs/{place}"] for place in range(sum(name.startswith("inputs/obs/") for name in inputs))]
    )
    like = _drawn(space, np.random.default_rng(0))
    return tree_at(map_tree(lambda _: next(leaves), like), step)


def _drawn(space: gym.Space[Any], rng: np.random.Generator) -> Tree:
    """An item of a space, with numbers of a usual size where it has no bounds."""
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
