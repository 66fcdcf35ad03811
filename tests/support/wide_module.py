"""A numbered module with weights that are worth sharing, whose outputs tell whether all are of one version."""

from dataclasses import replace
from itertools import count
from typing import Any

import numbered_module
import pytest
import torch
from numbered_env import NumberedEnv

from rollflow.stream.wire import weights_packing

__all__ = ["WIDE_BYTES", "NumberedEnv", "NumberedModule", "damage_third", "wide_weights"]

_WIDTH = 60_000
WIDE_BYTES = 4 * _WIDTH


class NumberedModule(numbered_module.NumberedModule):
    """A `NumberedModule` with more weights, all of which a test sets to the version that it publishes.

    `least` and `most` are the least and the largest of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wide = torch.nn.Parameter(torch.zeros(_WIDTH))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        out = super()._forward(batch, **kwargs)
        wide = self.wide.detach()
        return out | {
            name: value.expand(len(batch["obs"])) for name, value in (("least", wide.min()), ("most", wide.max()))
        }


def wide_weights(version: int) -> dict[str, Any]:
    """Return weights that are all this number."""
    return {"weight": torch.tensor(float(version)), "wide": torch.full((_WIDTH,), float(version))}


def damage_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the third weights that are packed go out with another checksum than theirs."""
    numbers, pack = count(1), weights_packing._packed

    def packed(*args: Any) -> Any:
        message = pack(*args)
        return replace(message, checksum=message.checksum ^ 1) if next(numbers) == 3 else message

    monkeypatch.setattr(weights_packing, "_packed", packed)
