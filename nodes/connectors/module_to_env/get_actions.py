"""Samples actions from the module's output."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.common.by_module import MEMORIZED, module_of
from rollflow.nodes.connectors.common.tensors import array_of, tensor_of
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, SharedData
from rollflow.nodes.connectors.list_form import episode_key, single_agent_episodes
from rollflow.nodes.connectors.spaces import space_of_agent
from rollflow.nodes.modules.distribution import Categorical, DistributionType, distribution_for, without_choice
from rollflow.stream.data.columns import RULED_OUT, Columns
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.tree import Tree, leaves_of
from rollflow.stream.fragments.live_episode import LaneEpisodes

RACES = "races"
"""Key in `shared_data` of the lane's `Races`."""

_OUTPUTS = {Columns.ACTIONS, Columns.ACTION_DIST_INPUTS}


class GetActions(ConnectorV2):
    """Adds `actions`, `any[N, ...]`, and `action_logp`, f32[N], where the module gave `action_dist_inputs` alone.

    With `explore` actions are sampled, else they are the likeliest. Sampling uses the generator in
    `shared_data["generator"]`, or the faster `Races` in `shared_data["races"]` for plain logits of one Discrete action.

    The distribution is that of the module's `get_exploration_action_dist_cls()` or `get_inference_action_dist_cls()`,
    else that of the module's `action_space`, or this piece's. Actions that the module gave itself are passed on.
    `action_dist_inputs` may be tensors or arrays: arrays become tensors for a `DistributionType`, and are passed to a
    distribution from elsewhere as they are. Outputs by module id are handled by `rl_module[module id]`.

    Raises ModuleError when the output has neither `actions` nor `action_dist_inputs`, and when a logit is NaN or +inf,
    or all of a slot's actions are ruled out, by logits of -1e9 or less. So it does for an action of the module that is
    NaN.
    """

    columnar = True
    pipelines = ("module-to-env",)
    changes_episodes = False

    _made: DistributionType | None = None  # of this piece's action space

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: SharedData = None,
        **kwargs: Any,
    ) -> Batch:
        shared_data = {} if shared_data is None else shared_data
        if _OUTPUTS.isdisjoint(batch) and _is_by_module(batch, shared_data):
            rows = _rows_by_module(episodes, shared_data)
            for module_id, output in batch.items():
                module = module_of(rl_module, module_id)
                self._act(module, output, bool(explore), shared_data, rows.get(module_id, []))
        else:
            self._act(rl_module, batch, bool(explore), shared_data, episodes)
        return batch

    def _act(
        self, rl_module: Any, batch: Batch, explore: bool, shared_data: dict[str, Any], episodes: Episodes
    ) -> None:
        if Columns.ACTIONS in batch:
            if slots := slots_with_nan(batch[Columns.ACTIONS]):
                raise _unusable(Columns.ACTIONS, "is NaN", slots, shared_data, episodes, rl_module)
            return
        logits = batch.get(Columns.ACTION_DIST_INPUTS)
        if logits is None:
            raise ModuleError(
                f"the output of {type(rl_module).__name__} has {sorted(batch)}, expected '{Columns.ACTIONS}' or "
                f"'{Columns.ACTION_DIST_INPUTS}'"
            ).see("module")
        array = None if isinstance(logits, torch.Tensor) else _as_array(logits)
        if array is None and not logits.is_cpu:  # generators and environments are on the CPU
            batch[Columns.ACTION_DIST_INPUTS] = logits = logits.cpu()
        agent_id = getattr(episodes[0], "agent_id", None) if isinstance(episodes, list) and episodes else None
        distribution_type = self.distribution_type(rl_module, explore=explore, agent_id=agent_id)
        if array is not None and isinstance(distribution_type, DistributionType):
            floats = array.dtype.kind == "f" and array.dtype.isnative  # other numbers become f32
            logits = tensor_of(array if floats else array.astype(np.float32))
        distribution: Any = distribution_type.from_logits(logits)
        races = shared_data.get(RACES)
        if explore and races is not None and type(distribution) is Categorical and _is_plain(logits):
            actions, logp = distribution.sample_with_logp(races)
            # Where any row's logits are unusable.
            if not np.add.reduce(logp) > -np.inf or (may_mask(rl_module) and rules_all_out(logits.numpy())):
                refuse_unusable(logits, shared_data, episodes, distribution_type, rl_module)
        else:
            refuse_unusable(logits, shared_data, episodes, distribution_type, rl_module)
            if not explore:
                distribution = distribution.to_deterministic()
            if isinstance(distribution_type, DistributionType):
                actions = distribution.sample(shared_data.get("generator"))
            else:  # from elsewhere, without generators
                actions = distribution.sample()
            logp = None
        batch[Columns.ACTIONS] = actions
        if Columns.ACTION_LOGP not in batch:
            batch[Columns.ACTION_LOGP] = distribution.logp(actions) if logp is None else logp

    def distribution_type(self, rl_module: Any, *, explore: bool, agent_id: Any = None) -> Any:
        """The maker of the module's distributions. Raises ModuleError where neither module nor piece has a space.

        agent_id    of one of the module's agents; None: of a single agent
        """
        name = "get_exploration_action_dist_cls" if explore else "get_inference_action_dist_cls"
        get = getattr(rl_module, name, None)
        if get is not None:
            return get()
        own, made = getattr(rl_module, "action_space", None), self._made
        space = own if isinstance(own, gym.Space) else space_of_agent(self.action_space, agent_id)
        if space is None:
            raise ModuleError(f"{type(rl_module).__name__} has no {name}(), and GetActions was given no action space")
        if made is None or made.space is not space:
            made = self._made = distribution_for(space)
        return made


def _is_by_module(batch: Batch, shared_data: dict[str, Any]) -> bool:
    """True for several modules' outputs, by module id, which may be empty where no agent is to act."""
    if not batch:
        return MEMORIZED in shared_data
    return all(isinstance(each, dict) and not _OUTPUTS.isdisjoint(each) for each in batch.values())


def _rows_by_module(episodes: Episodes, shared_data: dict[str, Any]) -> dict[Any, list[Any]]:
    """Module id -> the known episodes of the agents that its rows are of."""
    pairs = {
        (*episode_key(each), None)[:2]: each  # without agents: (episode id, None)
        for each in single_agent_episodes(episodes, stepped_only=True)
    }
    memorized = shared_data.get(MEMORIZED, {})
    return {module: [pairs[row] for row in rows if row in pairs] for module, rows in memorized.items()}


def _as_array(logits: Any) -> NDArray[Any]:
    """Logits that are no tensor as an array. Raises ModuleError for anything but numbers, and without a batch axis."""
    try:
        array = np.asarray(logits)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise ModuleError(
            f"'{Columns.ACTION_DIST_INPUTS}' is {type(logits).__name__}, expected a tensor or an array of numbers with "
            "one row per slot"
        )
    return array


def _is_plain(logits: Any) -> bool:
    """True for a tensor f32[N, n] in main memory."""
    if not isinstance(logits, torch.Tensor) or not logits.is_cpu or logits.ndim != 2:
        return False
    return logits.dtype is torch.float32 and not logits.requires_grad


def may_mask(rl_module: Any) -> bool:
    """False for a module that is known to rule no action out by a finite logit, so that nobody need look for it."""
    return bool(getattr(rl_module, "masks_actions", True))


def rules_all_out(logits: NDArray[Any]) -> bool:
    """True if one of the rows, f32[N, n] of one Discrete action, rules out every action."""
    if np.minimum.reduce(logits, axis=None) > RULED_OUT:  # none is: in a third of the time
        return False
    return not np.minimum.reduce(np.maximum.reduce(logits, axis=-1)) > RULED_OUT


def refuse_unusable(
    logits: Any, shared_data: dict[str, Any], episodes: Episodes, distribution_type: Any, module: Any = None
) -> None:
    """Raise ModuleError for logits that are NaN or +inf, or rule out every action, with the slots.

    logits               any[N, D], a tensor or an array
    distribution_type    of the actions
    module               that gave them; None: it is not known

    The text adds which of these slots' observations are not finite: then the module is not to blame; else which of its
    weights are not.
    """
    array = array_of(logits) if isinstance(logits, torch.Tensor) else np.asarray(logits)
    # The least and the largest are cheap, and NaN if any is; some actions may be ruled out, but not all.
    if float(np.minimum.reduce(array, axis=None)) > RULED_OUT and np.maximum.reduce(array, axis=None) < np.inf:
        return
    rows = array.reshape(len(array), -1)
    space = distribution_type.space if isinstance(distribution_type, DistributionType) else None
    is_nan, no_choice, is_inf = np.isnan(rows).any(1), without_choice(rows, space), rows.max(1) == np.inf
    for fault, bad in (("is NaN", is_nan), ("rules out every action", no_choice), ("is +inf", is_inf)):
        slots = np.flatnonzero(bad).tolist()
        if slots:
            raise _unusable(Columns.ACTION_DIST_INPUTS, fault, slots, shared_data, episodes, module)


def slots_with_nan(actions: Tree) -> list[int]:
    """Slots whose action, in a tree of arrays or tensors any[N, ...], has a NaN."""
    slots: set[int] = set()
    for leaf in leaves_of(actions):
        array = array_of(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
        if array.dtype.kind == "f" and array.ndim and np.isnan(np.add.reduce(array, axis=None)):  # one sum is cheap
            slots.update(np.flatnonzero(np.isnan(array.reshape(len(array), -1)).any(1)).tolist())
    return sorted(slots)


def _unusable(
    column: str, fault: str, slots: list[int], shared_data: dict[str, Any], episodes: Episodes, module: Any
) -> ModuleError:
    return ModuleError(
        f"'{column}' {fault} in lane {shared_data.get('lane', 0)}, vector step {shared_data.get('step', 'unknown')}, "
        f"{_named(episodes, slots)}{_blamed(episodes, slots, module)}"
    ).see("not a number")


def _named(episodes: Episodes, slots: list[int]) -> str:
    """The rows in words: slots, or agents."""
    if isinstance(episodes, LaneEpisodes):
        return episodes.lane.named(episodes.slots[slots].tolist())
    rows = [episodes[slot] for slot in slots if slot < len(episodes)] if isinstance(episodes, list) else []
    agents = [each for each in rows if each.agent_id is not None]
    named = [f"agent '{each.agent_id}' of episode '{each.multi_agent_episode_id}'" for each in agents]
    return ", ".join(named) or f"slot {', '.join(map(str, slots))}"


def _blamed(episodes: Episodes, slots: list[int], module: Any) -> str:
    """The slots, of these, whose observations are not finite, or the module's weights that are not, in words."""
    observed = [slot for slot in slots if slot < len(episodes)]
    bad = [slot for slot in observed if not _is_finite(episodes[slot].get_observations(-1))]
    if not bad:
        weights = module.named_parameters() if isinstance(module, torch.nn.Module) else ()
        names = [name for name, weight in weights if not bool(weight.isfinite().all())]
        return f": weights are not finite: {', '.join(names)}; expected numbers" if names else ""
    return f": the observation itself is not finite in {_named(episodes, bad)}, expected numbers"


def _is_finite(observation: Any) -> bool:
    leaves = [np.asarray(leaf) for leaf in leaves_of(observation)]
    return all(bool(np.isfinite(leaf).all()) for leaf in leaves if leaf.dtype.kind in "fc")
