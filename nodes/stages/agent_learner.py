"""Train batches out of multi-agent fragments, and a learner pipeline for each module."""

import weakref
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from rollflow.nodes.connectors.learner.train_columns import device_of
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import slowest_piece
from rollflow.nodes.connectors.pipelines.default_pipelines import LearnerConnectorPipeline
from rollflow.nodes.modules.rl_module import is_stateful
from rollflow.nodes.stages.acting import acting_copy, pieces_given
from rollflow.nodes.stages.module_set import ActingModule, AgentsActing
from rollflow.stream.data.errors import ModuleError, noted
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment, parts_by_module

Batch = dict[str, Any]


class AgentLearner:
    """Makes a batch for every module that is trained.

        acting       the modules
        to_train     ids of those that batches are made for; None: all that there are
        connector    `lambda obs_space, act_space: piece or list of pieces`, called for every module
        metrics      what the pieces see as `metrics`
        runner       who runs the pipelines, which can't be edited meanwhile

    Raises ModuleError where there is no module of an id that is to be trained.
    """

    def __init__(
        self,
        acting: AgentsActing,
        to_train: Sequence[Any] | None,
        connector: Any,
        metrics: Any,
        runner: Any = None,
    ) -> None:
        modules = acting.module
        unknown = [] if to_train is None else [module_id for module_id in to_train if module_id not in modules]
        if unknown or isinstance(to_train, str):
            raise ModuleError(f"modules_to_train is {to_train!r}, expected a list of ids among {list(modules)}")
        self.to_train = None if to_train is None else frozenset(to_train)
        self._acting, self._modules = acting.acting, modules
        self._connector, self._metrics = connector, metrics
        self._runner = None if runner is None else weakref.ref(runner)  # it holds this
        self.has_pieces = connector is not None  # beside the default ones
        # Copies, each with its version, with the weights that have been published last; one goes when what acts does.
        self._copies: WeakKeyDictionary[ActingModule, tuple[int, Any]] = WeakKeyDictionary()
        # By what acts, not by id: another that is added under the id, in whichever thread, begins with its own.
        self._pipelines: WeakKeyDictionary[ActingModule, LearnerConnectorPipeline] = WeakKeyDictionary()

    def trains(self, module_id: Any) -> bool:
        """True if batches are made for a module."""
        return module_id in self._modules and module_id in self._acting and self.would_train(module_id)

    def would_train(self, module_id: Any) -> bool:
        """True if batches are made for a module of this id when there is one."""
        return self.to_train is None or module_id in self.to_train

    @property
    def slowest_piece(self) -> str:
        """Name of the piece that took most of its time."""
        return slowest_piece(list(self._pipelines.values()))

    def pipeline_of(self, module_id: Any) -> LearnerConnectorPipeline:
        """The pipeline of one module that acts, made when first asked for."""
        trained, acting = self._modules[module_id], self._acting.get(module_id)
        if acting is None:
            raise ModuleError(f"module '{module_id}' does not act, expected one of {list(self._acting)}")
        return self._pipeline_for(acting, trained)

    def batch_of(self, fragments: Sequence[MultiAgentFragment], *, as_published: bool = False) -> dict[Any, Batch]:
        """Module id -> its train batch, for those that are trained and have made steps in these fragments.

        as_published    pieces see copies of the modules, with the weights published last, and not those that are
                        trained: these may then be trained in another thread meanwhile
        """
        batches = {}
        for module_id, parts in parts_by_module(fragments, self.trains).items():
            acting, module = self._acting.get(module_id), self._modules.get(module_id)
            # It may have been removed in another thread since, and another of its id been added.
            if acting is not None and module is not None and acting is self._acting.get(module_id):
                module = self._published_of(acting, module) if as_published else module
                with noted(f"of module '{module_id}'; modules that are not trained are left out of modules_to_train"):
                    pipeline = self._pipeline_for(acting, module)
                    batches[module_id] = pipeline.of_fragments(parts, module, self._metrics)
        return batches

    def _pipeline_for(self, acting: ActingModule, module: Any) -> LearnerConnectorPipeline:
        made = self._pipelines.get(acting)
        if made is None:
            spaces = module.observation_space, module.action_space
            taught = pieces_given(self._connector, "learner_connector", *spaces)
            made = LearnerConnectorPipeline.default(*spaces, taught, stateful=is_stateful(module))
            runner = None if self._runner is None else self._runner()
            if runner is not None:
                made.refuse_edits_while_run_by(runner)
            self._pipelines[acting] = made
        return made

    def _published_of(self, acting: ActingModule, trained: Any) -> Any:
        """A copy of a module, on the device of the trained one, whose weights stay until the next call.

        Of the one that acts: training may leave in the other what can't be copied. For one thread at a time.
        """
        copied = self._copies.get(acting)
        if copied is None:
            on, wanted = device_of(acting.module), device_of(trained)
            copied = -1, acting_copy(acting.module, None if wanted == on else wanted)
        version, module = copied
        if version != acting.weights.version:
            version, weights = acting.weights.newest(acting.module)
            module.load_state_dict(weights)
        self._copies[acting] = version, module
        return module
