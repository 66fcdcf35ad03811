"""Encoder of the default module: observations of any of the usual spaces to one vector each.

Each leaf of a Dict or Tuple space is encoded by itself: an image by convolutions, numbers as they are, choices as
one-hot vectors. The results are joined and go through dense layers. An image alone has none: its last convolution is
one.
"""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rollflow.nodes.modules.default_model_config import ACTIVATIONS, ConvFilter, DefaultModelConfig, Extent
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.tree import Tree

_HIDDEN_GAIN = math.sqrt(2.0)
_SUPPORTED = (
    "Discrete, MultiDiscrete, MultiBinary, Box of shape (), (n,) or (height, width, channels), or a Dict or Tuple of "
    "those"
)


class ObservationEncoder(nn.Module):
    """Encoder of observations, any[B, ...] or, with `use_lstm`, any[B, T, ...], to f32[B, width] or f32[B, T, width].

    Raises ModuleError for a space that it can't take, and for observations that are not of the space's shape.
    """

    def __init__(self, space: gym.Space[Any], config: DefaultModelConfig) -> None:
        super().__init__()
        parts = _leaves(space, "obs", ())
        if not parts:
            raise ModuleError(f"observation_space is {space}, expected at least one leaf")
        self._paths = [path for _, path, _ in parts]
        encoders = [LeafEncoder(leaf, where, config) for where, _, leaf in parts]
        self.leaves = nn.ModuleList(encoders)
        joined = sum(encoder.width for encoder in encoders)
        hiddens: Sequence[int] = () if _is_image(space) else config.fcnet_hiddens
        self.layers = nn.Sequential(*dense(joined, hiddens, config.fcnet_activation))
        self.width: int = hiddens[-1] if hiddens else joined

    def forward(self, observations: Tree) -> Tensor:
        encoded = [leaf(_at(observations, path)) for leaf, path in zip(self.leaves, self._paths, strict=True)]
        embeddings: Tensor = self.layers(encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1))
        return embeddings


class LeafEncoder(nn.Module):
    """Encoder of one leaf of the observations, any[*lead, *shape], to f32[*lead, width]."""

    def __init__(self, space: gym.Space[Any], where: str, config: DefaultModelConfig) -> None:
        super().__init__()
        self._where = where
        self._shape = torch.Size(space.shape or ())
        self._lead = 2 if config.use_lstm else 1
        self.layers: OneHot | ImageEncoder | Flat
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            self.layers = OneHot(space)
        elif _is_image(space):
            self.layers = ImageEncoder(space, where, config)
        else:
            self.layers = Flat(self._shape)
        self.width: int = self.layers.width

    def forward(self, leaf: Tensor) -> Tensor:
        shape = leaf.shape
        if shape[self._lead :] != self._shape or len(shape) < self._lead:
            lead = ["B", "T"][: self._lead]
            raise ModuleError(
                f"'{self._where}' has shape {list(shape)}, expected [{', '.join([*lead, *map(str, self._shape)])}]"
            )
        encoded: Tensor = self.layers(leaf)
        return encoded


class Flat(nn.Module):
    """Flattens numbers, any[..., *shape], to f32[..., width]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._ndim = len(shape)
        self.width = math.prod(shape)

    def forward(self, numbers: Tensor) -> Tensor:
        if self._ndim != 1:
            numbers = numbers.flatten(-self._ndim) if self._ndim else numbers.unsqueeze(-1)
        return numbers.float()


class OneHot(nn.Module):
    """Makes choices, any[..., *shape], one-hot vectors end to end, f32[..., width]; zeros for an invalid choice."""

    numbers: Tensor
    places: Tensor

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        sizes = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec).reshape(-1).tolist()
        starts = np.broadcast_to(np.asarray(space.start).reshape(-1), len(sizes)).tolist()
        numbers = [start + n for start, size in zip(starts, sizes, strict=True) for n in range(size)]
        places = [place for place, size in enumerate(sizes) for _ in range(size)]
        self._ndim = len(space.shape or ())
        self.width = len(numbers)
        # Output j is 1 where the choice places[j] is numbers[j].
        self.register_buffer("numbers", torch.tensor(numbers), persistent=False)
        self.register_buffer("places", torch.tensor(places), persistent=False)

    def forward(self, choices: Tensor) -> Tensor:
        if self._ndim == 0:
            spread = choices.unsqueeze(-1)
        else:
            spread = (choices.flatten(-self._ndim) if self._ndim > 1 else choices).index_select(-1, self.places)
        return (spread == self.numbers).float()


class ImageEncoder(nn.Module):
    """Convolutions over images, any[..., H, W, C], to f32[..., width]."""

    def __init__(self, space: gym.Space[Any], where: str, config: DefaultModelConfig) -> None:
        super().__init__()
        height, width, channels = space.shape or ()
        self._scale = 1.0 / 255.0 if space.dtype == np.uint8 else None
        layers: list[nn.Module] = []
        for out_channels, kernel, stride in config.conv_filters or _filters_for(height, width):
            (tall, wide), (down, across) = _pair(kernel), _pair(stride)
            if tall > height or wide > width:
                raise ModuleError(
                    f"conv_filters has a kernel of {tall}x{wide} where {height}x{width} are left of '{where}', "
                    f"{space}, expected no larger one"
                )
            if (tall, wide) == (height, width):  # the same sum as a convolution's, in less time
                layers += [nn.Flatten(), linear(channels * tall * wide, out_channels, _HIDDEN_GAIN)]
            else:
                layers.append(_conv(channels, out_channels, (tall, wide), (down, across)))
            layers.append(ACTIVATIONS[config.conv_activation]())
            height, width, channels = (height - tall) // down + 1, (width - wide) // across + 1, out_channels
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.width = height * width * channels

    def forward(self, images: Tensor) -> Tensor:
        lead = images.shape[:-3]
        rows = images if len(lead) == 1 else images.flatten(0, -4)
        # The permuted view is torch's channels_last, which convolutions take as it is: no copy but the one that scales.
        channels_first = rows.permute(0, 3, 1, 2)
        scaled = channels_first if self._scale is None else channels_first * self._scale
        encoded: Tensor = self.layers(scaled.float())
        return encoded if len(lead) == 1 else encoded.view(*lead, self.width)


def dense(width: int, hiddens: Sequence[int], activation: str) -> list[nn.Module]:
    """Dense layers of these widths, each with its activation."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip((width, *hiddens), hiddens, strict=False):
        layers += [linear(inputs, outputs, _HIDDEN_GAIN), ACTIVATIONS[activation]()]
    return layers


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A dense layer with orthogonal weights of this gain, and no bias at first."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _conv(inputs: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int]) -> nn.Conv2d:
    """A convolution with orthogonal weights, and no bias at first."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride)
    nn.init.orthogonal_(layer.weight, _HIDDEN_GAIN)
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)  # as images have theirs
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _leaves(
    space: gym.Space[Any], where: str, path: tuple[Any, ...]
) -> list[tuple[str, tuple[Any, ...], gym.Space[Any]]]:
    """Name for messages, path of keys, and space of each leaf."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        return [leaf for key, part in parts for leaf in _leaves(part, f"{where}[{key!r}]", (*path, key))]
    numbers = isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
    box = isinstance(space, spaces.Box) and len(space.shape) in (0, 1, 3)
    if not (numbers or box) or 0 in (space.shape or ()):
        raise ModuleError(
            f"observation_space has {space} at '{where}', expected {_SUPPORTED}: the default module takes no others; "
            "FlattenObservations as an env_to_module_connector makes vectors of them, or give a module of your own"
        ).see("module")
    return [(where, path, space)]


def _at(observations: Tree, path: tuple[Any, ...]) -> Any:
    leaf = observations
    for key in path:
        try:
            leaf = leaf[key]
        except (IndexError, KeyError, TypeError):
            raise ModuleError(
                f"'obs' has nothing at {list(path)}, expected it to be as the observation space"
            ) from None
    return leaf


def _is_image(space: gym.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and len(space.shape) == 3


def _filters_for(height: int, width: int) -> list[ConvFilter]:
    """Filters of the Nature CNN for 84x84, and about as many for other sizes; the last covers what is left."""
    small = min(height, width)
    filters: list[ConvFilter] = []
    if small >= 36:
        filters = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    elif small >= 16:
        filters = [(32, 4, 2), (64, 3, 2), (64, 3, 1)]
    elif small >= 5:
        filters = [(32, 3, 1), (64, 3, 1)]
    elif small >= 3:
        filters = [(32, 2, 1), (64, 2, 1)]
    left = _left(height, width, filters)
    while max(left) > 12 and min(left) >= 3:
        filters.append((64, 3, 2))
        left = _left(height, width, filters)
    return [*filters, (512 if small >= 36 else 256, left, 1)]


def _left(height: int, width: int, filters: list[ConvFilter]) -> tuple[int, int]:
    for _, kernel, stride in filters:
        (tall, wide), (down, across) = _pair(kernel), _pair(stride)
        height, width = (height - tall) // down + 1, (width - wide) // across + 1
    return height, width


def _pair(extent: Extent) -> tuple[int, int]:
    return (extent, extent) if isinstance(extent, int) else extent
