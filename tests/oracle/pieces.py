"""Rows of connector pieces, ours and Ray's, that are called with the same episodes."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray.rllib.connectors.common as ray_common
import ray.rllib.connectors.env_to_module as ray_env_to_module
import ray.rllib.connectors.learner as ray_learner
import ray.rllib.connectors.module_to_env as ray_module_to_env
import torch
from both import Answer, ask, assert_same_answer
from episodes import KINDS, Kind, Pair, Setting, arguments, everything
from hypothesis import strategies as st
from ray.rllib.connectors import connector_v2 as ray_connector_v2
from ray.rllib.connectors.common import frame_stacking as ray_frame_stacking
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.spaces.space_utils import BatchedNdArray

from rollflow import nodes
from rollflow.nodes.connectors.connector_v2 import BatchedArray
from rollflow.nodes.connectors.list_form import is_keyed_by_episode
from rollflow.stream.data.tree import leaves_of, map_tree

# To see its caller, each of Ray's pieces reads the source of the whole stack, which takes longer than all else here.
ray_connector_v2.inspect = SimpleNamespace(
    stack=lambda: [None, SimpleNamespace(frame=sys._getframe(2))], getargvalues=inspect.getargvalues
)

LENGTH = 3
"""Steps in a row of a stateful module's train batch."""


class Module:
    """Module with the attributes that pieces read."""

    framework = "torch"
    model_config: dict[str, Any] = {"max_seq_len": LENGTH}  # noqa: RUF012

    def __init__(self, stateful: bool = False) -> None:
        self.stateful = stateful

    def __contains__(self, module_id: str) -> bool:
        return module_id in ("a", "b", "c")

    def is_stateful(self) -> bool:
        return self.stateful

    def get_initial_state(self) -> dict[str, Any]:
        return {"h": np.array([-1.0, -2.0], np.float32), "c": np.array([-3.0, -4.0], np.float32)}


@dataclass
class Setup:
    """Episodes in both implementations, and what else a piece is called with."""

    setting: Setting
    pairs: list[Pair]
    stateful: bool
    spaces: tuple[Any, Any]

    def run(
        self, ours: list[Any], theirs: list[Any], batch: Any = None, shown: Callable[[Any], Any] | None = None
    ) -> tuple[Answer, Answer]:
        """The batches that a row of our pieces and one of Ray's make, as `shown`, or else in single items."""
        answers = []
        for pieces, episodes in (
            (ours, [pair.ours for pair in self.pairs]),
            (theirs, [pair.theirs for pair in self.pairs]),
        ):

            def run(pieces: list[Any] = pieces, episodes: list[Any] = episodes) -> Any:
                for piece in pieces:  # Ray wants this order
                    piece.input_action_space, piece.input_observation_space = self.spaces[::-1]
                made, shared = copy.deepcopy(batch or {}), {}
                for piece in pieces:
                    made = piece(
                        rl_module=Module(self.stateful), batch=made, episodes=episodes, explore=True, shared_data=shared
                    )
                return (shown or in_items)(made)

            answers.append(ask(run))
        return answers[0], answers[1]

    def check(self, ours: list[Any], theirs: list[Any], batch: Any = None, **how: Any) -> None:
        """The batches are the same, and so are the episodes afterwards."""
        assert_same_answer(*self.run(ours, theirs, batch), [repr(pair.ours) for pair in self.pairs], **how)
        for pair in self.pairs:
            pair.check(lambda episode: {**everything(episode), "id": None})


EITHER, NEVER = st.booleans(), st.just(False)
ids = st.sampled_from(["a", "b", "c"])


@st.composite
def setups(
    draw: st.DrawFn,
    kinds: list[Kind] = KINDS,
    actions: list[Kind] = KINDS,
    numpy: st.SearchStrategy[bool] = EITHER,
    stateful: st.SearchStrategy[bool] = NEVER,
    done: bool = False,
) -> Setup:
    """Some episodes of one or more steps, with a lookback where they go on with an episode."""
    is_stateful, is_numpy = draw(stateful), draw(numpy)  # Ray makes no batch of lists and arrays together
    outputs = draw(st.sampled_from([(), ("action_logp",)])) + (("state_out",) if is_stateful else ())
    setting = Setting(draw(st.sampled_from(kinds)), draw(st.sampled_from(actions)), True, outputs)
    pairs = []
    for place in range(draw(st.integers(1, 3))):
        given_ = draw(arguments(setting, min_steps=1))
        lookback = draw(st.integers(0, len(given_["actions"]) - 1))
        started = lookback and draw(st.integers(lookback, 9))
        given_ |= {"len_lookback_buffer": lookback, "t_started": started}
        if done:
            given_["truncated"] = not given_["terminated"]
        pairs.append(Pair.of(given_, is_numpy, id_=f"e{place}"))
    return Setup(setting, pairs, is_stateful, (setting.observation.space, setting.action.space))


def in_items(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch whose columns in list form are lists of single items, episode after episode."""
    made = {column: _items(data) if is_keyed_by_episode(data) else data for column, data in batch.items()}
    if isinstance(made.get("rewards"), list):  # f64 here and there
        made["rewards"] = [np.asarray(item, np.float32) for item in made["rewards"]]
    return made


def _items(data: dict[Any, list[Any]]) -> list[Any]:
    """The ids of episodes are left out: Ray adds the place in the list to them, on the way."""
    return [single for items in data.values() for item in items for single in singles_of(item)]


def forms(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the form of each item of a batch in list form: several in one, or one of a shape."""
    return {column: [_form(item) for items in data.values() for item in items] for column, data in batch.items()}


def _form(item: Any) -> str:
    leaf = (leaves_of(item) or [None])[0]
    if isinstance(leaf, BatchedArray | BatchedNdArray):
        return "several in one"
    return "a dict" if leaf is None else str(np.shape(leaf))


def singles_of(item: Any) -> list[Any]:
    """Split items that were added as one into single ones."""
    leaf = leaves_of(item)[0] if leaves_of(item) else None
    if not isinstance(leaf, BatchedArray | BatchedNdArray):
        return [item]
    return [map_tree(lambda each, i=i: np.asarray(each)[i], item) for i in range(len(leaf))]


Named = str | tuple[str, dict[str, Any]]

LEARNS: dict[str, Any] = {"as_learner_connector": True}
LEARNER: list[Named] = [
    ("AddObservationsFromEpisodesToBatch", LEARNS),
    "AddColumnsFromEpisodesToTrainBatch",
    "AddNextObservationsFromEpisodesToTrainBatch",
    "AddInfosFromEpisodesToTrainBatch",
]
STATES: list[Named] = [("AddTimeDimToBatchAndZeroPad", LEARNS), ("AddStatesFromEpisodesToBatch", LEARNS)]
BATCHED: list[Named] = ["BatchIndividualItems", "NumpyToTensor"]

OURS = (nodes,)
RAYS = (ray_common, ray_learner, ray_env_to_module, ray_module_to_env, ray_frame_stacking)


def piece_of(modules: tuple[Any, ...], named: Named, **options: Any) -> Any:
    """A piece of the first of these modules that has one of this name."""
    name, own = (named, options) if isinstance(named, str) else named
    return next(getattr(module, name) for module in modules if hasattr(module, name))(**own)


def rows(*names: Named, **options: Any) -> tuple[list[Any], list[Any]]:
    """Our pieces of these names, and Ray's; the options are of all that are given without their own."""
    ours, theirs = ([piece_of(modules, named, **options) for named in names] for modules in (OURS, RAYS))
    return ours, theirs


def values(batch: dict[str, Any]) -> torch.Tensor:
    return (batch["obs"] * torch.tensor([0.1, 0.3])).sum(-1)


class Values(Module):
    def compute_values(self, batch: dict[str, Any]) -> torch.Tensor:
        return values(batch)


class RayValues(TorchRLModule, ValueFunctionAPI):  # type: ignore[misc]
    def setup(self) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(()))  # tells the device

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        return values(batch)


def ray_modules(names: Iterable[str], observations: Any, actions: Any) -> Any:
    """Ray's modules of these names, which all have values."""
    spaces: dict[str, Any] = {"observation_space": observations, "action_space": actions}
    specs = {name: RLModuleSpec(RayValues, model_config={}, **spaces) for name in names}
    return MultiRLModuleSpec(rl_module_specs=specs).build()


def pieces_named(base: type) -> dict[str, Any]:
    """Four classes of pieces that do nothing, of one base."""

    def passes(self: Any, *, batch: Any, **kwargs: Any) -> Any:
        return batch

    return {name: type(name, (base,), {"__call__": passes}) for name in ("A", "B", "C", "D")}
