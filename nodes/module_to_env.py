"""The stage after the forward pass: connector pieces turn the module's output into actions."""

from typing import Any

from rollflow.nodes.connectors.module_to_env.module_to_env_pipeline import ModuleToEnvPipeline
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
            with self._threads:
                batch = self.pipeline.run(
                    self._module, lane.batch, lane.episodes, self._explore, lane.shared_data, self._metrics
                )
            if not self.pipeline.columnar:
                batch = {name: stack_trees(x) if isinstance(x, list) else x for name, x in batch.items()}
            lane.batch = batch
            lane.record_actions(batch)
        except Exception as error:
            error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}")
            raise
        return lane
