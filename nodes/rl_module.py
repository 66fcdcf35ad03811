"""The neural network, as a rollout and a learner see it."""

from typing import Any

import gymnasium as gym
import torch

from rollflow.nodes.distribution import DistributionType, distribution_for
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ModuleError
from rollflow.stream.tree import leaves_of

Batch = dict[str, Any]


class RLModule(torch.nn.Module):
    """A torch module with three ways forward; a subclass overrides `setup` and `_forward`, or each way by itself.

        observation_space, action_space    what it sees and what it chooses; a rollout fills in what is None
        model_config                       whatever the subclass makes of it

    A batch is a dict: column -> tensor `any[B, ...]`, to be read only: while acting its observations are the very rows
    that are recorded. The output is one, too, with `actions`, or with
    `action_dist_inputs` (see `rollflow.nodes.distribution` for its shape); `vf_preds`, f32[B], is what value-based
    pieces look for. Everything in it is recorded with the steps.
    """

    framework = "torch"

    def __init__(
        self,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        *,
        inference_only: bool = False,
        model_config: Any = None,
    ) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space
        self.inference_only = inference_only
        self.model_config = {} if model_config is None else model_config
        self._distribution_made: DistributionType | None = None
        self.setup()

    def setup(self) -> None:
        """Make the network's parts; called once, by the constructor."""

    def forward_exploration(self, batch: Batch, **kwargs: Any) -> Batch:
        """For actions that are to be sampled."""
        return self._forward_exploration(batch, **kwargs)

    def forward_inference(self, batch: Batch, **kwargs: Any) -> Batch:
        """For actions that are to be the likeliest."""
        return self._forward_inference(batch, **kwargs)

    def forward_train(self, batch: Batch, **kwargs: Any) -> Batch:
        """For losses."""
        return self._forward_train(batch, **kwargs)

    def forward(self, batch: Batch, **kwargs: Any) -> Batch:
        """`forward_train`, for whoever calls the module."""
        return self.forward_train(batch, **kwargs)

    def _forward_exploration(self, batch: Batch, **kwargs: Any) -> Batch:
        return self._forward(batch, **kwargs)

    def _forward_inference(self, batch: Batch, **kwargs: Any) -> Batch:
        return self._forward(batch, **kwargs)

    def _forward_train(self, batch: Batch, **kwargs: Any) -> Batch:
        return self._forward(batch, **kwargs)

    def _forward(self, batch: Batch, **kwargs: Any) -> Batch:
        raise ModuleError(
            f"{type(self).__name__} does not say how it goes forward: override _forward, or _forward_exploration, "
            "_forward_inference and _forward_train"
        )

    def compute_values(self, batch: Batch, embeddings: Any = None) -> torch.Tensor:
        """f32[B]: what the module expects of each observation; `vf_preds` of `forward_train` unless overridden.

        Raises ModuleError where there are none.
        """
        output = self.forward_train(batch)
        if Columns.VF_PREDS not in output:
            raise ModuleError(
                f"{type(self).__name__}.forward_train gave {sorted(output)}, expected '{Columns.VF_PREDS}' among them: "
                "add it, or override compute_values"
            )
        values: torch.Tensor = output[Columns.VF_PREDS]
        return values

    def is_stateful(self) -> bool:
        """Whether a forward pass needs what the one before left behind."""
        state = self.get_initial_state()
        # What is asked of stateless modules in every vector step is to be quick.
        return state is not None and not (type(state) is dict and not state) and bool(leaves_of(state))

    def get_initial_state(self) -> Any:
        """What a stateful module's first forward pass is given, a tree of arrays or tensors; `{}`: it needs nothing.

        There is no batch axis. What a forward pass gives as `state_out` has the same structure, shapes and dtypes.
        """
        return {}

    def get_exploration_action_dist_cls(self) -> DistributionType:
        """Makes the distribution that explored actions are sampled from."""
        return self._distribution_type()

    def get_inference_action_dist_cls(self) -> DistributionType:
        """Makes the distribution whose likeliest action is taken."""
        return self._distribution_type()

    def get_train_action_dist_cls(self) -> DistributionType:
        """Makes the distribution that losses are worked out with."""
        return self._distribution_type()

    def _distribution_type(self) -> DistributionType:
        space = self.action_space
        if space is None:
            raise ModuleError(f"{type(self).__name__} has no action_space: give it to the constructor, or set it")
        made = self._distribution_made
        if made is None or made.space is not space:
            made = self._distribution_made = distribution_for(space)
        return made
