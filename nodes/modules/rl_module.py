"""Neural network as a rollout and a learner see it, with the interface of RLlib's `RLModule`."""

from typing import Any

import gymnasium as gym
import torch

from rollflow.nodes.modules.distribution import DistributionType, distribution_for
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.tree import leaves_of

Batch = dict[str, Any]


class RLModule(torch.nn.Module):
    """Torch module with three forward passes; a subclass overrides `setup` and `_forward`, or each pass by itself.

        observation_space, action_space    of the environment; a rollout fills in what is None
        model_config                       free for the subclass to use

    A batch is a dict, column -> tensor `any[B, ...]`, to be read only: while acting its observations are the very rows
    that are recorded. The output is a dict with `actions`, or with `action_dist_inputs` f32[B, D], whose width `D`
    `rollflow.nodes.modules.distribution` gives. Value-based pieces look for `vf_preds`, f32[B]. All of the output is
    recorded with the steps.
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
        """Forward pass for actions that are sampled."""
        return self._forward_exploration(batch, **kwargs)

    def forward_inference(self, batch: Batch, **kwargs: Any) -> Batch:
        """Forward pass for the likeliest actions."""
        return self._forward_inference(batch, **kwargs)

    def forward_train(self, batch: Batch, **kwargs: Any) -> Batch:
        """Forward pass for losses."""
        return self._forward_train(batch, **kwargs)

    def forward(self, batch: Batch, **kwargs: Any) -> Batch:
        """`forward_train`, for callers of the module itself."""
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
        ).see("module")

    def compute_values(self, batch: Batch, embeddings: Any = None) -> torch.Tensor:
        """Value of each observation, f32[B]; `vf_preds` of `forward_train` unless overridden.

        Raises ModuleError where there are none.
        """
        output = self.forward_train(batch)
        if Columns.VF_PREDS not in output:
            raise ModuleError(
                f"{type(self).__name__}.forward_train gave {sorted(output)}, expected '{Columns.VF_PREDS}' among them: "
                "add it, or override compute_values"
            ).see("module")
        values: torch.Tensor = output[Columns.VF_PREDS]
        return values

    def is_stateful(self) -> bool:
        """True if a forward pass needs state that the one before returned."""
        state = self.get_initial_state()
        # Called for stateless modules in every vector step, so it has to be quick.
        return state is not None and not (type(state) is dict and not state) and bool(leaves_of(state))

    def get_initial_state(self) -> Any:
        """Initial state: a tree of arrays or tensors any[...] without a batch axis; `{}` for a stateless module.

        A forward pass's `state_out` has the same structure, shapes and dtypes, with a batch axis first.
        """
        return {}

    def get_exploration_action_dist_cls(self) -> DistributionType:
        """Type of the distribution that explored actions are sampled from."""
        return self._distribution_type()

    def get_inference_action_dist_cls(self) -> DistributionType:
        """Type of the distribution whose likeliest action is taken."""
        return self._distribution_type()

    def get_train_action_dist_cls(self) -> DistributionType:
        """Type of the distribution that losses are computed with."""
        return self._distribution_type()

    def _distribution_type(self) -> DistributionType:
        space = self.action_space
        if space is None:
            raise ModuleError(f"{type(self).__name__} has no action_space: give it to the constructor, or set it")
        made = self._distribution_made
        if made is None or made.space is not space:
            made = self._distribution_made = distribution_for(space)
        return made
