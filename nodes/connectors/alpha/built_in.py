"""Agent connectors that change or add columns, and action connectors: arrays of tensors, bounds, read-only actions."""

import types
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.alpha.connector import (
    ActionConnector,
    ActionConnectorDataType,
    AgentConnector,
    AgentConnectorDataType,
    AgentConnectorsOutput,
    Connector,
    ConnectorContext,
    PolicyOutputType,
    SampleBatch,
    array_of,
    sample_of,
    without_params,
)
from rollflow.nodes.connectors.env_to_module.mean_std_filter import MeanStdFilter
from rollflow.nodes.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions
from rollflow.nodes.connectors.spaces import Space, check_has_numbers
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError, shown
from rollflow.stream.data.space import flat_size, flatten
from rollflow.stream.data.tree import Tree, map_tree, stack_trees
from rollflow.stream.episodes.single_agent import SingleAgentEpisode

OBSERVATIONS = (SampleBatch.OBS, SampleBatch.NEXT_OBS)
UNFIT = "ObsPreprocessorConnector can't make vectors of observations"


def columns_of(connector: AgentConnector, ac_data: AgentConnectorDataType) -> dict[str, Any]:
    """The columns of an agent's data. Raises ConnectorError where they are the policy's input already."""
    data = ac_data.data
    if not isinstance(data, dict):
        raise ConnectorError(
            f"{type(connector).__name__}: the data of agent {ac_data.agent_id!r} of environment {ac_data.env_id!r} are "
            f"{type(data).__name__}, expected a dict of columns; it stands before ViewRequirementAgentConnector"
        )
    return data


class ObsPreprocessorConnector(AgentConnector):
    """Turns observations in Discrete, MultiDiscrete, Dict and Tuple spaces into vectors, f32[D]; Boxes stay.

    Whole numbers become one-hot vectors. The space is the context's, or the `original_space` of that. Raises
    ConnectorError for a space that has no numbers in it, and for observations that are not in it.
    """

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        space = original_space(self.context, self)
        if isinstance(space, spaces.Box):
            return ac_data
        data = columns_of(self, ac_data)
        for name in OBSERVATIONS:
            if name in data:
                data[name] = self._flat(space, data[name])
        return ac_data

    def observation_space_after(self, observation_space: Space) -> Space:
        if isinstance(observation_space, spaces.Box):
            return observation_space
        check_has_numbers(observation_space, UNFIT)
        return spaces.Box(-np.inf, np.inf, (flat_size(observation_space),), np.float32)

    to_state = without_params

    def _flat(self, space: Space, observation: Any) -> Any:
        check_has_numbers(space, UNFIT)
        try:
            rows = map_tree(lambda leaf: np.asarray(leaf)[None], observation)
            return flatten(space, rows)[0]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ConnectorError(
                f"ObsPreprocessorConnector: an observation is {shown(observation)}, expected one in {space}"
            ) from error


def original_space(ctx: ConnectorContext, connector: AgentConnector) -> Space:
    """The space of the environment's observations. Raises ConnectorError where the context has none."""
    space = ctx.observation_space
    if space is None:
        raise ConnectorError(
            f"{type(connector).__name__}: the context has no observation_space, expected "
            "ConnectorContext(observation_space=…)"
        )
    original: Space = getattr(space, "original_space", space)
    return original


class ClipRewardAgentConnector(AgentConnector):
    """Replaces rewards by their sign, or clips them to -limit … limit; does nothing without either.

    Raises ConnectorError for both, and for a limit that is not more than 0.
    """

    def __init__(self, ctx: ConnectorContext | None = None, sign: bool = False, limit: float | None = None) -> None:
        super().__init__(ctx)
        if sign and limit:
            raise ConnectorError(f"ClipRewardAgentConnector: sign is True and limit is {limit}, expected one of them")
        if limit is not None and not limit > 0:
            raise ConnectorError(f"ClipRewardAgentConnector: limit is {limit}, expected more than 0, or None")
        self.sign, self.limit = sign, limit

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data = columns_of(self, ac_data)
        if SampleBatch.REWARDS in data:
            if self.sign:
                data[SampleBatch.REWARDS] = np.sign(data[SampleBatch.REWARDS])
            elif self.limit is not None:
                data[SampleBatch.REWARDS] = np.clip(data[SampleBatch.REWARDS], -self.limit, self.limit)
        return ac_data

    def to_state(self) -> tuple[str, Any]:
        return "ClipRewardAgentConnector", {"sign": self.sign, "limit": self.limit}


class StateBufferConnector(AgentConnector):
    """Adds the last output of the policy: `actions`, `state_out_0` and so on, and what it gave beside.

    At the start of an episode actions are zeros in the context's action space, and states its initial ones. What is
    buffered belongs to episodes under way, and is no part of the saved connector.
    """

    def __init__(self, ctx: ConnectorContext | None = None) -> None:
        super().__init__(ctx)
        self._outputs: dict[str, dict[str, PolicyOutputType]] = {}

    def reset(self, env_id: str) -> None:
        self._outputs.pop(env_id, None)

    def on_policy_output(self, output: ActionConnectorDataType) -> None:
        self._outputs.setdefault(output.env_id, {})[output.agent_id] = output.output

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data = columns_of(self, ac_data)
        output = self._outputs.get(ac_data.env_id, {}).get(ac_data.agent_id)
        if output is None:
            space = self.context.action_space
            actions, states = (None if space is None else sample_of(space)), self.context.initial_states
            fetches: Any = {}
        else:
            actions, states, fetches = output
        if actions is not None:
            data[SampleBatch.ACTIONS] = actions
        data.update({f"state_out_{i}": state for i, state in enumerate(states)})
        data.update(fetches)
        return ac_data

    to_state = without_params


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

    to_state = without_params

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


class MeanStdObservationFilterAgentConnector(AgentConnector):
    """Filters observations, trees of arrays `any[...]`, to f32 ones of the same shapes; in evaluation it counts none.

    demean    True: subtract the mean
    destd     True: divide by the deviation
    clip      clip to -clip … clip; None: don't

    Numbers and states are those of `MeanStdFilter`: states of copies merge, and count each observation once. All
    numbers of an observation are filtered. Raises ConnectorError for observations of another shape than before.
    """

    def __init__(
        self,
        ctx: ConnectorContext | None = None,
        demean: bool = True,
        destd: bool = True,
        clip: float | None = 10.0,
    ) -> None:
        super().__init__(ctx)
        self.demean, self.destd, self.clip = demean, destd, clip
        self._filter: MeanStdFilter | None = None  # made for the first observation, or with a state
        self._shapes: Any = None  # of an observation, as plain data

    @property
    def filter(self) -> MeanStdFilter | None:
        """The piece that counts; None before the first observation."""
        return self._filter

    def __call__(self, acd_list: list[AgentConnectorDataType]) -> list[AgentConnectorDataType]:
        for name in OBSERVATIONS:
            there = [data for data in (columns_of(self, each) for each in acd_list) if name in data]
            if there:
                filtered = self._filtered([data[name] for data in there])
                for data, observation in zip(there, filtered, strict=True):
                    data[name] = observation
        return acd_list

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        return self([ac_data])[0]

    def observation_space_after(self, observation_space: Space) -> Space:
        piece = MeanStdFilter(clip_by_value=self.clip)
        space = _space_of(_shapes_of(sample_of(observation_space)))
        made: Space = piece.recompute_output_observation_space(space, space)
        return made

    # State

    def reset_state(self) -> None:
        """Forget all statistics."""
        if self._filter is not None:
            self._filter.reset_state()

    def to_state(self) -> tuple[str, Any]:
        options = {"demean": self.demean, "destd": self.destd, "clip": self.clip}
        state = map_tree(_plain, self.learnt_state()) if self.learnt_state() else None
        return type(self).__name__, {**options, "state": state}

    @classmethod
    def from_state(cls, ctx: ConnectorContext, params: Any) -> Connector:
        options = dict(params or {})
        state = options.pop("state", None)
        made = cls(ctx, **options)
        if state is not None:
            made.take_learnt_state(state)
        return made

    def learnt_state(self) -> dict[str, Any]:
        state = {} if self._filter is None else self._filter.get_state()
        return {"shapes": self._shapes, "sources": state["sources"]} if state else {}

    def take_learnt_state(self, state: dict[str, Any]) -> None:
        if not {"shapes", "sources"} <= state.keys():
            raise ConnectorError(
                f"{type(self).__name__}: a state with {sorted(map(str, state))}, expected 'shapes' and 'sources'"
            )
        piece = self._made_for(state["shapes"])
        piece.set_state({"space": str(piece.input_observation_space), "sources": state["sources"]})

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """The counts of this filter and of all others."""
        if not states:
            return self.learnt_state()
        piece = self._made_for(states[0]["shapes"])
        for state in states:
            self._made_for(state["shapes"])
        space = str(piece.input_observation_space)
        sources = [{"space": space, "sources": state["sources"]} for state in states]
        return {"shapes": self._shapes, "sources": piece.merge_states(sources)["sources"]}

    # Inside

    def _filtered(self, observations: list[Tree]) -> list[Tree]:
        piece = self._made_for(_shapes_of(observations[0]))
        piece.update_stats = self._is_training
        episodes = [SingleAgentEpisode(observations=[map_tree(np.asarray, each)]) for each in observations]
        piece(batch={}, episodes=episodes)
        return [episode.get_observations(-1) for episode in episodes]

    def _made_for(self, shapes: Any) -> MeanStdFilter:
        """The piece, for observations of these shapes. Raises ConnectorError where it is for others."""
        if self._filter is None:
            self._shapes = shapes
            self._filter = MeanStdFilter(
                _space_of(shapes), de_mean_to_zero=self.demean, de_std_to_one=self.destd, clip_by_value=self.clip
            )
        if shapes != self._shapes:
            raise ConnectorError(
                f"{type(self).__name__}: an observation of shapes {shapes}, expected {self._shapes}, as before"
            )
        return self._filter


def _shapes_of(observation: Tree) -> Any:
    """The shapes of an observation's arrays, as plain data that JSON can carry."""
    if isinstance(observation, dict):
        return {"dict": {key: _shapes_of(part) for key, part in observation.items()}}
    return (
        {"tuple": list(map(_shapes_of, observation))} if isinstance(observation, tuple) else list(np.shape(observation))
    )


def _space_of(shapes: Any) -> Space:
    """The space of observations of these shapes, without bounds. Raises ConnectorError for anything else."""
    if isinstance(shapes, dict) and shapes.keys() == {"dict"}:
        return spaces.Dict({key: _space_of(part) for key, part in shapes["dict"].items()})
    if isinstance(shapes, dict) and shapes.keys() == {"tuple"}:
        return spaces.Tuple([_space_of(part) for part in shapes["tuple"]])
    if not isinstance(shapes, list | tuple):
        raise ConnectorError(f"shapes of an observation are {shown(shapes)}, expected lists of numbers")
    return spaces.Box(-np.inf, np.inf, tuple(shapes), np.float32)


def _plain(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, np.ndarray | np.generic) else leaf


class ConvertToNumpyConnector(ActionConnector):
    """Turns tensors among actions and states into arrays; fetches stay as they are."""

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        actions, states, fetches = ac_data.output
        output = (map_tree(array_of, actions), [map_tree(array_of, state) for state in states], fetches)
        return replace(ac_data, output=output)

    to_state = without_params


class _BoundedActions(ActionConnector):
    """Brings actions into the bounds of the context's action space, with the piece that rollouts use."""

    normalize_actions = False
    _piece: NormalizeAndClipActions | None = None

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        if self._piece is None:
            space, normalizes = self.context.action_space, self.normalize_actions
            if space is None:
                raise ConnectorError(
                    f"{type(self).__name__}: the context has no action_space, expected ConnectorContext(action_space=…)"
                )
            self._piece = NormalizeAndClipActions(
                None, space, normalize_actions=normalizes, clip_actions=not normalizes
            )
        batch = self._piece(batch={Columns.ACTIONS: [ac_data.output[0]]})
        return replace(ac_data, output=(batch[Columns.ACTIONS_FOR_ENV][0], *ac_data.output[1:]))

    def action_space_after(self, action_space: Space) -> Space:
        return action_space

    to_state = without_params


class NormalizeActionsConnector(_BoundedActions):
    """Scales actions from -1 … 1 to low … high of Boxes that are bounded on all sides."""

    normalize_actions = True


class ClipActionsConnector(_BoundedActions):
    """Clips actions to the bounds that Boxes have."""


class ImmutableActionsConnector(ActionConnector):
    """Makes actions read-only: arrays, and dicts of them; so nobody changes what has been recorded."""

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        return replace(ac_data, output=(_read_only(ac_data.output[0]), *ac_data.output[1:]))

    def action_space_after(self, action_space: Space) -> Space:
        return action_space

    to_state = without_params


def _read_only(actions: Tree) -> Any:
    if isinstance(actions, np.ndarray):
        view = actions.view()
        view.flags.writeable = False
        return view
    if isinstance(actions, dict):
        return types.MappingProxyType({key: _read_only(part) for key, part in actions.items()})
    if isinstance(actions, list | tuple):
        return tuple(map(_read_only, actions))
    return actions
