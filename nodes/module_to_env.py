"""The stage after the forward pass: connector pieces turn the module's output into actions."""

from typing import Any

from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.connectors.module_to_env.module_to_env_pipeline import ModuleToEnvPipeline
from rollflow.nodes.joint_output import Part
from rollflow.nodes.torch_threads import TorchThreads
from rollflow.stream.lane import Lane
from rollflow.stream.tree import stack_trees


class ModuleToEnv:
    """A node that runs a module-to-env pipeline over a lane's batch and records the actions that come out.

    pipeline    makes `actions` (and maybe `actions_for_env`) out of the module's output
    module      what the pieces see as `rl_module`
    explore     what the pieces see as `explore`
    metrics     what the pieces see as `metrics`
    threads     that torch uses meanwhile; None: as many as it is set to
    """

    def __init__(
        self,
        pipeline: ModuleToEnvPipeline,
        module: Any,
        *,
        explore: bool = True,
        metrics: Any = None,
        threads: int | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._threads = TorchThreads(threads)
        self._module, self._explore, self._metrics = module, explore, metrics

    def __call__(self, outputs: Lane) -> Lane:
        """Work out the actions for the lane's environments."""
        lane = outputs
        try:
            lane.batch = batch = self._acted(lane)
            lane.record_actions(batch)
        except Exception as error:
            error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}")
            raise
        return lane

    def _acted(self, lane: Lane) -> Batch:
        given, pipeline = lane.batch, self.pipeline
        with self._threads:
            if type(given) is Part:
                batch = given.acted(pipeline, self._module, self._explore)
                if batch is not None:
                    return batch
                given = given.rows()
            batch = pipeline.run(self._module, given, lane.episodes, self._explore, lane.shared_data, self._metrics)
        if pipeline.columnar:
            return batch
        return {name: stack_trees(x) if isinstance(x, list) else x for name, x in batch.items()}
