"""The policy's input, made of the columns of several steps."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollflow.nodes.connectors.alpha.agent_connectors import columns_of
from rollflow.nodes.connectors.alpha.connector import AgentConnector, ConnectorContext
from rollflow.nodes.connectors.alpha.probing import sample_of
from rollflow.nodes.connectors.alpha.records import AgentConnectorDataType, AgentConnectorsOutput, SampleBatch
from rollflow.nodes.connectors.alpha.registry import register_connector
from rollflow.nodes.connectors.spaces import Space
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import Tree, map_tree, stack_trees

# Columns that are there when the policy is to choose; of all others it knows the step before.
_OF_THIS_STEP = {
    SampleBatch.OBS,
    SampleBatch.INFOS,
    SampleBatch.T,
    SampleBatch.EPS_ID,
    SampleBatch.ENV_ID,
    SampleBatch.AGENT_INDEX,
}


@dataclass(frozen=True)
class ViewRequirement:
    """A column of the policy's input, as a view of a column of the steps so far.

        data_col                    the column that is viewed; None: that of the same name
        space                       of one item, for zeros where there is no such step; None: zeros like the items
        shift                       steps from the one that the policy chooses for: 0 or less; or a range "-3:0", both
                                    ends included, for several
        used_for_compute_actions    False: not in the policy's input
        used_for_training           False: not needed for training; it is kept all the same

    `obs`, `infos`, `t` and ids are there at shift 0. Actions, rewards, states and others begin at -1.
    """

    data_col: str | None = None
    space: Space | None = None
    shift: int | str = 0
    used_for_compute_actions: bool = True
    used_for_training: bool = True

    @property
    def shifts(self) -> tuple[int, int]:
        """The first and the last shift. Raises ConnectorError for anything but a number or a range "a:b"."""
        try:
            first, _, last = str(self.shift).partition(":")
            span = int(first), int(last or first)
        except ValueError:
            raise ConnectorError(f"shift is {self.shift!r}, expected a number such as -1, or a range '-3:0'") from None
        if span[0] > span[1]:
            raise ConnectorError(f"shift is {self.shift!r}, expected the earlier step first, such as '-3:0'")
        return span


class ViewRequirementAgentConnector(AgentConnector):
    """Makes the policy's input of the columns of the steps so far: `AgentConnectorsOutput`.

    Each column of the context's `view_requirements` becomes any[1, ...], or any[1, k, ...] for a range of k steps. None
    of them: `obs`, and `state_in_0` and so on for a recurrent policy. Steps before the episode are zeros; states before
    it are the context's initial ones.

    Raises ConnectorError for data without `new_obs`, and for a view of a step that is yet to come.
    """

    def __init__(self, ctx: ConnectorContext | None = None) -> None:
        super().__init__(ctx)
        self._steps: dict[str, dict[str, deque[dict[str, Any]]]] = {}  # newest last, by environment and agent
        self._views: dict[str, ViewRequirement] | None = None

    def reset(self, env_id: str) -> None:
        self._steps.pop(env_id, None)

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data, env_id, agent_id = columns_of(self, ac_data), ac_data.env_id, ac_data.agent_id
        if SampleBatch.NEXT_OBS not in data:
            raise ConnectorError(
                f"ViewRequirementAgentConnector: the data of agent {agent_id!r} of environment {env_id!r} have no "
                f"'new_obs', expected one; columns: {', '.join(map(str, data)) or 'none'}"
            )
        views = self._checked_views()
        length = 1 - min((view.shifts[0] for view in views.values()), default=0)
        steps = self._steps.setdefault(env_id, {}).setdefault(agent_id, deque(maxlen=length))
        steps.append({**data, SampleBatch.OBS: data[SampleBatch.NEXT_OBS]})
        columns = {name: self._viewed(view, view.data_col or name, steps) for name, view in views.items()}
        batch = SampleBatch({name: map_tree(lambda leaf: leaf[None], tree) for name, tree in columns.items()})
        for_training = data if self._is_training else {}
        return AgentConnectorDataType(env_id, agent_id, AgentConnectorsOutput(data, batch, for_training))

    def observation_space_after(self, observation_space: Space) -> Space:
        return observation_space

    def to_state(self) -> tuple[str, Any]:
        return "ViewRequirementAgentConnector", None

    def _checked_views(self) -> dict[str, ViewRequirement]:
        if self._views is not None:
            return self._views
        ctx = self.context
        declared: Mapping[str, ViewRequirement] | None = ctx.view_requirements
        if declared is None:
            states = {
                f"state_in_{i}": ViewRequirement(f"state_out_{i}", shift=-1) for i in range(len(ctx.initial_states))
            }
            declared = {SampleBatch.OBS: ViewRequirement(), **states}
        views = {name: view for name, view in declared.items() if view.used_for_compute_actions}
        for name, view in views.items():
            column = view.data_col or name
            latest = 0 if column in _OF_THIS_STEP else -1
            if view.shifts[1] > latest:
                raise ConnectorError(
                    f"view '{name}' of column '{column}' has shift {view.shift!r}, expected {latest} or less: the "
                    "policy can't see what is yet to come; a view for training alone has used_for_compute_actions=False"
                )
        self._views = views
        return views

    def _viewed(self, view: ViewRequirement, column: str, steps: deque[dict[str, Any]]) -> Tree:
        offset = 1 if column in _OF_THIS_STEP else 0
        first, last = view.shifts
        places = [len(steps) - 1 + shift + (1 - offset) for shift in range(first, last + 1)]
        items = [steps[place].get(column) if place >= 0 else None for place in places]
        self._check_there(column, [place for place, item in zip(places, items, strict=True) if item is None], steps)
        there = next((step[column] for step in steps if step.get(column) is not None), None)
        blank = self._blank(view, column, there)
        if column == SampleBatch.INFOS:
            items = [np.array({} if item is None else item, object) for item in items]
        arrays = [map_tree(_array_of, blank if item is None else item) for item in items]
        return arrays[0] if isinstance(view.shift, int) else stack_trees(arrays)

    def _check_there(self, column: str, missing: list[int], steps: deque[dict[str, Any]]) -> None:
        """Raise ConnectorError where a step that follows another one has no value in a column."""
        if any(place > 0 for place in missing):
            remedy = {
                SampleBatch.REWARDS: "expected the reward of each step, such as local_policy_inference(…, reward=1.0)",
                SampleBatch.ACTIONS: "expected StateBufferConnector before ViewRequirementAgentConnector",
            }
            raise ConnectorError(
                f"ViewRequirementAgentConnector: a step has no '{column}', which a view of the policy's input needs; "
                f"{remedy.get(column, f'columns: {sorted(map(str, steps[-1]))}')}"
            )

    def _blank(self, view: ViewRequirement, column: str, like: Tree | None) -> Tree:
        """The item of a step that does not exist."""
        name, _, number = column.rpartition("_")
        if name == "state_out" and number.isdigit() and int(number) < len(self.context.initial_states):
            return self.context.initial_states[int(number)]
        if view.space is not None:
            return map_tree(np.zeros_like, sample_of(view.space))
        if like is not None:
            return map_tree(lambda leaf: np.zeros_like(np.asarray(leaf)), like)
        if column == SampleBatch.ACTIONS and self.context.action_space is not None:
            return map_tree(np.zeros_like, sample_of(self.context.action_space))
        return np.float32(0.0)


def _array_of(leaf: Any) -> Any:
    return np.float32(leaf) if isinstance(leaf, float) else np.asarray(leaf)


register_connector("ViewRequirementAgentConnector", ViewRequirementAgentConnector)
