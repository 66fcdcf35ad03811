"""Actions out of the module's output."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow.nodes.connectors.agents import episode_key, single_agent_episodes, space_of_agent
from rollflow.nodes.connectors.by_module import module_of
from rollflow.nodes.connectors.common.agent_to_module_mapping import MEMORIZED
from rollflow.nodes.connectors.common.tensor_to_numpy import array_of
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.distribution import Categorical, DistributionType, distribution_for
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ModuleError
from rollflow.stream.multi_agent.agent_episodes import AgentEpisodes
from rollflow.stream.tree import leaves_of

RACES = "races"
"""Where `shared_data` has the lane's `Races`."""

_OUTPUTS = {Columns.ACTIONS, Columns.ACTION_DIST_INPUTS}


class GetActions(ConnectorV2):
    """Adds `actions` and `action_logp`, f32[N], where the module gave `action_dist_inputs` alone.

    With `explore` actions are sampled, by the generator in `shared_data["generator"]` if there is one, or faster, where
    that can be, by the `Races` in `shared_data["races"]`; without it
    they are the likeliest. The distribution is what the module's `get_exploration_action_dist_cls()` or
    `get_inference_action_dist_cls()` names, else the one that goes with the action space. Actions that the module gave
    itself are passed on. A batch of several modules' outputs, by module id, is gone through by `rl_module[module id]`.

    Raises ModuleError when the output has neither `actions` nor `action_dist_inputs`, and when a logit is NaN or +inf,
    or all of a slot's are -inf.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, **kwargs)
        self._made: DistributionType | None = None

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
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
            return
        logits = batch.get(Columns.ACTION_DIST_INPUTS)
        if logits is None:
            raise ModuleError(
                f"the output of {type(rl_module).__name__} has {sorted(batch)}, expected '{Columns.ACTIONS}' or "
                f"'{Columns.ACTION_DIST_INPUTS}'"
            )
        if not logits.is_cpu:  # the generators are in main memory, and the environments are
            batch[Columns.ACTION_DIST_INPUTS] = logits = logits.cpu()
        agent_id = getattr(episodes[0], "agent_id", None) if isinstance(episodes, list) and episodes else None
        distribution_type = self.distribution_type(rl_module, explore=explore, agent_id=agent_id)
        distribution: Any = distribution_type.from_logits(logits)
        races = shared_data.get(RACES)
        if explore and races is not None and type(distribution) is Categorical and _is_plain(logits):
            actions, logp = distribution.sample_with_logp(races)
            if not np.add.reduce(logp) > -np.inf:  # so it is if anything is wrong with one row's logits
                refuse_unusable(logits, shared_data, episodes)
        else:
            refuse_unusable(logits, shared_data, episodes)
            if not explore:
                distribution = distribution.to_deterministic()
            if isinstance(distribution_type, DistributionType):
                actions = distribution.sample(shared_data.get("generator"))
            else:  # from elsewhere: it need not know what a generator is
                actions = distribution.sample()
            logp = None
        batch[Columns.ACTIONS] = actions
        if Columns.ACTION_LOGP not in batch:
            batch[Columns.ACTION_LOGP] = distribution.logp(actions) if logp is None else logp

    def distribution_type(self, rl_module: Any, *, explore: bool, agent_id: Any = None) -> Any:
        """What makes the module's distributions. Raises ModuleError where nobody knows.

        agent_id    of one of the module's agents; None: there is one alone
        """
        name = "get_exploration_action_dist_cls" if explore else "get_inference_action_dist_cls"
        get = getattr(rl_module, name, None)
        if get is not None:
            return get()
        space, made = space_of_agent(self.action_space, agent_id), self._made
        if space is None:
            raise ModuleError(f"{type(rl_module).__name__} has no {name}(), and GetActions was given no action space")
        if made is None or made.space is not space:
            made = self._made = distribution_for(space)
        return made


def _is_by_module(batch: Batch, shared_data: dict[str, Any]) -> bool:
    """Whether it is several modules' outputs, by module id; where no agent is to act there may be none."""
    if not batch:
        return MEMORIZED in shared_data
    return all(isinstance(each, dict) and not _OUTPUTS.isdisjoint(each) for each in batch.values())


def _rows_by_module(episodes: Episodes, shared_data: dict[str, Any]) -> dict[Any, list[Any]]:
    """Module id -> the episodes of the agents that its rows are of, as far as they are known."""
    pairs = {(*episode_key(each), None)[:2]: each for each in single_agent_episodes(episodes, stepped_only=True)}
    memorized = shared_data.get(MEMORIZED, {})
    return {module: [pairs[row] for row in rows if row in pairs] for module, rows in memorized.items()}


def _is_plain(logits: torch.Tensor) -> bool:
    """Whether it is f32[N, n] in main memory."""
    return logits.is_cpu and logits.ndim == 2 and logits.dtype is torch.float32 and not logits.requires_grad


def refuse_unusable(logits: torch.Tensor, shared_data: dict[str, Any], episodes: Episodes) -> None:
    """Raise ModuleError for logits that are NaN or +inf, or rule out every action, with the slots.

    Where observations of theirs are not finite, it says so: it is not the module that is to blame then.
    """
    array = array_of(logits)
    # One sum over all is cheap, and finite if all are; -inf rules actions out, which is right for some but not for all.
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.add.reduce(array, axis=None)
    if -np.inf < total < np.inf:
        return
    rows = array.reshape(len(array), -1)
    is_nan, most = np.isnan(rows).any(1), rows.max(1)
    for told, bad in (("is NaN", is_nan), ("rules out every action", most == -np.inf), ("is +inf", most == np.inf)):
        slots = np.flatnonzero(bad).tolist()
        if slots:
            raise ModuleError(
                f"'{Columns.ACTION_DIST_INPUTS}' {told} in lane {shared_data.get('lane', 0)}, vector step "
                f"{shared_data.get('step', 'unknown')}, {_told(episodes, slots)}{_blamed(episodes, slots)}"
            )


def _told(episodes: Episodes, slots: list[int]) -> str:
    """The rows in words: slots, or agents."""
    if isinstance(episodes, AgentEpisodes):
        return "; ".join(map(episodes.whose, slots))
    rows = [episodes[slot] for slot in slots if slot < len(episodes)] if isinstance(episodes, list) else []
    agents = [each for each in rows if each.agent_id is not None]
    named = [f"agent '{each.agent_id}' of episode '{each.multi_agent_episode_id}'" for each in agents]
    return ", ".join(named) or f"slot {', '.join(map(str, slots))}"


def _blamed(episodes: Episodes, slots: list[int]) -> str:
    """Which of these slots have observations that are not finite, in words."""
    observed = [slot for slot in slots if slot < len(episodes)]
    bad = [slot for slot in observed if not _is_finite(episodes[slot].get_observations(-1))]
    if not bad:
        return ""
    return f": the observation itself is not finite in {_told(episodes, bad)}, expected numbers"


def _is_finite(observation: Any) -> bool:
    leaves = [np.asarray(leaf) for leaf in leaves_of(observation)]
    return all(bool(np.isfinite(leaf).all()) for leaf in leaves if leaf.dtype.kind in "fc")
