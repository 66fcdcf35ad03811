"""The stage after the forward pass: connector pieces turn the module's output into actions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from rollflow.nodes.connectors.common.batches import DEVICE
from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.connectors.module_to_env.action_pieces import slots_with_nan
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import note_own_pieces, slowest_piece
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.modules.rl_module import with_threads
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ConnectorError, noted, shown
from rollflow.stream.data.space import items_in, leaves_within, row_of
from rollflow.stream.data.tree import Tree, map_tree, stack_trees
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.multi_agent.agent_lane import Slots


class ModuleToEnv:
    """A node that runs a module-to-env pipeline over a lane's batch and records the actions that come out.

    pipeline    makes `actions` (and maybe `actions_for_env`) out of the module's output
    env_space   of the environments' actions; the first ones are held against it. None: nothing is
    module      what the pieces see as `rl_module`
    explore     what the pieces see as `explore`
    metrics     what the pieces see as `metrics`
    threads     that torch uses meanwhile; None: as many as it is set to
    before      make the module's batch, for errors
    """

    def __init__(
        self,
        pipeline: ModuleToEnvPipeline,
        module: Any,
        *,
        before: Sequence[EnvToModulePipeline] = (),
        env_space: gym.Space[Any] | None = None,
        explore: bool = True,
        metrics: Any = None,
        threads: int | None = None,
    ) -> None:
        self.pipeline = pipeline
        context = module, explore, metrics
        self._act = with_threads(threads, partial(act, pipeline, before, env_space, context))

    @property
    def slowest_piece(self) -> str:
        """Name of the piece that took most of its time."""
        return slowest_piece([self.pipeline])

    def __call__(self, outputs: Lane) -> Lane:
        """Work out the actions for the lane's environments."""
        lane: Lane = self._act(outputs)
        return lane


def act(
    pipeline: ModuleToEnvPipeline,
    before: Sequence[EnvToModulePipeline],
    env_space: gym.Space[Any] | None,
    context: tuple[Any, bool, Any],
    lane: Any,
) -> Any:
    """Work out the actions for the environments of a lane, or of a `ModuleTurn`, record them, and return it.

    context    what the pieces see as `rl_module`, `explore` and `metrics`

    All else is as for `ModuleToEnv`.
    """
    try:
        chosen = lane.layout.action_space
        batch = lane.batch = acted(pipeline, lane.batch, lane.episodes, lane.shared_data, context)
        if lane.device is not None:
            lane.actions = lane.actions_of(batch, env_space)
        else:
            if lane.is_first:
                check_first_actions(batch, chosen, env_space, lane.episodes.slots)
            lane.actions = convert_actions(batch, chosen, env_space)
        lane.record_actions(batch)
    except Exception as error:
        note_own_pieces(error, *before, pipeline)
        error.add_note(lane.where + lane.whose)
        raise
    return lane


def acted(
    pipeline: ModuleToEnvPipeline,
    output: Any,
    episodes: Any,
    shared_data: dict[str, Any],
    context: tuple[Any, bool, Any],
) -> Batch:
    """Columns that a pipeline makes of a module's output, to be recorded: column -> tree of arrays `any[K, ...]`.

    output     a batch, or a `LaneOutput`
    context    what the pieces see as `rl_module`, `explore` and `metrics`
    """
    module, explore, metrics = context
    if type(output) is tuple:
        joint, rows = output
        made = joint.acted(pipeline, module, explore)
        if made is not None:
            return {name: array[rows] for name, array in made.items()}
        output = {name: map_tree(lambda leaf: leaf[rows], column) for name, column in joint.output.items()}
    batch = pipeline.run(module, output, episodes, explore, shared_data, metrics)
    if Columns.ACTIONS_FOR_ENV in batch:
        batch = pipeline.to_record(batch, shared_data)
    if pipeline.has_own_pieces:
        if not pipeline.columnar:
            batch = {name: stack_trees(x) if isinstance(x, list) else x for name, x in batch.items()}
        if DEVICE not in shared_data:
            _refuse_nan(batch, pipeline)
    return batch


def _refuse_nan(batch: Batch, pipeline: ModuleToEnvPipeline) -> None:
    """Raise ConnectorError for actions that are NaN: the module's own are refused before, so that a piece made them."""
    for column in (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV):
        if column in batch and (slots := slots_with_nan(batch[column])):
            raise ConnectorError(
                f"'{column}' is NaN in row {', '.join(map(str, slots))} of a lane's batch, behind the connector pieces "
                f"{', '.join(pipeline.names)}; expected numbers: a piece has made them"
            )


def convert_actions(batch: Batch, chosen: gym.Space[Any], env_space: gym.Space[Any] | None) -> Tree:
    """Convert a batch's actions to the dtypes of their spaces, in place; return those that the environments get.

        chosen       in which `actions` are recorded
        env_space    of what the environments get; None: `chosen`

    No later stage converts actions: what is recorded is what the environments get, or `actions_for_env` if a piece
    has made those, or if the two spaces have other dtypes.
    """
    actions, for_env = batch.get(Columns.ACTIONS), batch.get(Columns.ACTIONS_FOR_ENV)
    if actions is not None and not (type(actions) is np.ndarray and actions.dtype is chosen.dtype):
        actions = batch[Columns.ACTIONS] = items_in(chosen, actions)
    if env_space is None or env_space is chosen:
        if for_env is None:
            return actions
        env_space = chosen
    if for_env is None:
        for_env = None if actions is None else items_in(env_space, actions, rounds=True)
        if for_env is not actions:
            batch[Columns.ACTIONS_FOR_ENV] = for_env
    elif not (type(for_env) is np.ndarray and for_env.dtype is env_space.dtype):
        for_env = batch[Columns.ACTIONS_FOR_ENV] = items_in(env_space, for_env, rounds=True)
    return for_env


def check_first_actions(batch: Batch, chosen: gym.Space[Any], env_space: gym.Space[Any] | None, slots: Slots) -> None:
    """Raise ColumnError if a pipeline's actions, of these slots, are in other spaces than they should be.

    chosen       in which `actions` are recorded
    env_space    of what the environments get; None: it is not looked at
    """
    if Columns.ACTIONS not in batch:
        return  # which recording them refuses
    actions = batch[Columns.ACTIONS]
    inputs = batch.get(Columns.ACTION_DIST_INPUTS)
    if isinstance(inputs, np.ndarray) and inputs.shape[:1] != (len(slots),):
        given = f"'{Columns.ACTION_DIST_INPUTS}' has shape {list(inputs.shape)}"
        raise ColumnError(f"{given}, expected [{len(slots)}, D]: a row for each observation").see("distribution")
    with noted(
        f"what the module chooses is recorded in {chosen}; a module with another space than the environments' says so "
        f"by its action_space, and what a piece makes of its choice goes into '{Columns.ACTIONS_FOR_ENV}'"
    ):
        Column.empty(Columns.ACTIONS, row_of(chosen, len(slots)), 1).write(0, actions)
        _check_within(chosen, items_in(chosen, actions), slots)
    if env_space is None:
        return
    with noted(
        f"the environments' actions are in {env_space}; where the module chooses in another space, a module-to-env "
        f"piece makes '{Columns.ACTIONS_FOR_ENV}'"
    ):
        for_env = items_in(env_space, batch.get(Columns.ACTIONS_FOR_ENV, actions), rounds=True)
        Column.empty(Columns.ACTIONS_FOR_ENV, row_of(env_space, len(slots)), 1).write(0, for_env)
        _check_within(env_space, for_env, slots)


def _check_within(space: gym.Space[Any], actions: Tree, slots: Slots) -> None:
    """Raise ColumnError for an action outside a Discrete, MultiDiscrete or MultiBinary space; a Box's are not checked.

    actions    a tree of arrays `any[K, ...]`, of K slots
    """
    for leaf in leaves_within(space, "action"):
        if isinstance(leaf.space, gym.spaces.Box):
            continue
        values, (low, high) = np.asarray(leaf.found(actions)), leaf.bounds()
        rows = values.reshape(len(slots), -1)
        outside = ((rows < low) | (rows > high)).any(1)
        if outside.any():
            row = int(outside.argmax())
            told = f"{leaf.path} of slot {slots[row]} of the lane is {shown(values[row].tolist())}"
            raise ColumnError(f"{told}, expected one in {leaf.space}").see("module")
