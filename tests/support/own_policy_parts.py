"""Connector pieces and modules as a user writes them, which saved policies may name."""

from typing import Any

import numpy as np
import torch

from rollflow import ConnectorV2, RLModule
from rollflow.nodes import DefaultModule


class Doubled(ConnectorV2):
    """Piece whose constructor takes arguments, and that has a state."""

    def __init__(self, factor: float, offsets: Any = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor, self.offsets, self.seen = factor, offsets, 0

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in episodes:
            self.seen += 1
            episode.set_observations(new_data=episode.get_observations(-1) * np.float32(self.factor), at_indices=-1)
        return batch

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"seen": self.seen, "table": np.arange(3), ("a", 1): [float("nan")]}

    def set_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Forgetful(ConnectorV2):
    """Piece that changes as it runs, and has no get_state."""

    count = 0

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.count += 1
        return batch


class OwnModule(RLModule):
    """Module of a user, with a config of its own."""

    def setup(self) -> None:
        self.layer = torch.nn.Linear(3, self.model_config["outputs"])

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.layer(batch["obs"])}


class Gated(DefaultModule):
    """Module of a user over the default network: logits of a table that is no weight, scaled by how many there are."""

    def setup(self) -> None:
        super().setup()
        width = self.get_inference_action_dist_cls().required_input_dim
        self.register_buffer("table", torch.linspace(0.5, 1.5, width), persistent=False)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        output = super()._forward(batch, **kwargs)
        logits = output["action_dist_inputs"]
        output["action_dist_inputs"] = logits * self.table / logits.new_full((), 2.0)
        return output


class Bare(torch.nn.Module):
    """Module that does not say how it is made, and does the same for any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"action_dist_inputs": self.layer(batch["obs"])}

    forward_exploration = forward_inference
