"""Default network of a rollout that brings none: for any of the usual spaces.

An `ObservationEncoder` comes first, then an LSTM if `use_lstm` is set. Dense layers lead from there to
`action_dist_inputs`, and others to `vf_preds`, from the same encoder or from one of their own.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rollflow.nodes.argument_checks import checking_constructor
from rollflow.nodes.modules.distribution import ACTION_MASK, distribution_for, mask_logits, mask_width, places_of_inputs
from rollflow.nodes.modules.rl_module import Batch, RLModule
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.space import Leaf, leaves_within
from rollflow.stream.data.tree import Tree, part_at

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}

Extent = int | tuple[int, int]
ConvFilter = tuple[int, Extent, Extent]


@checking_constructor()
@dataclass(frozen=True)
class DefaultModelConfig:
    """Sizes of layers, and activations by their names in `ACTIVATIONS`.

        fcnet_hiddens            units of each layer that encodes anything but an image
        conv_filters             (out_channels, kernel, stride) of each layer that encodes an image, without padding;
                                 kernel and stride are one number, or (height, width). None: chosen by the image's size
        head_fcnet_hiddens       units of each layer between the encoder and the actions, and again before the values
        vf_share_layers          values and actions have one encoder, instead of one each
        free_log_std             a Box's deviations are parameters, the same for every observation
        use_lstm                 an LSTM follows the encoder
        max_seq_len              steps of a sequence to learn from, at most; the module itself takes any number
        lstm_cell_size           width of the LSTM's state and output

    Lists become tuples. Raises ValueError for an invalid value.
    """

    fcnet_hiddens: Sequence[int] = (256, 256)
    fcnet_activation: str = "tanh"
    conv_filters: Sequence[ConvFilter] | None = None
    conv_activation: str = "relu"
    head_fcnet_hiddens: Sequence[int] = ()
    head_fcnet_activation: str = "relu"
    vf_share_layers: bool = True
    free_log_std: bool = False
    use_lstm: bool = False
    max_seq_len: int = 20
    lstm_cell_size: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name.endswith("hiddens"):
                if not isinstance(value, list | tuple) or not all(map(_is_size, value)):
                    raise ValueError(f"{name} is {value!r}, expected a list of whole numbers, each 1 or more")
                object.__setattr__(self, name, tuple(value))
            elif name.endswith("activation") and (not isinstance(value, str) or value not in ACTIVATIONS):
                raise ValueError(f"{name} is {value!r}, expected one of: {', '.join(ACTIVATIONS)}")
            elif field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}, expected True or False")
            elif field.type is int and not _is_size(value):
                raise ValueError(f"{name} is {value!r}, expected a whole number, 1 or more")
            elif name == "conv_filters" and value is not None:
                object.__setattr__(self, name, _filters(value))


def model_config_of(config: DefaultModelConfig | Mapping[str, Any] | None) -> DefaultModelConfig:
    """The config itself, or made from a dict of some of its fields. Raises ValueError for anything else."""
    if isinstance(config, DefaultModelConfig):
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ValueError(f"model_config is a {type(config).__name__}, expected a DefaultModelConfig or a dict")
    values = dict(config or {})
    names = [field.name for field in fields(DefaultModelConfig)]
    unknown = sorted(str(name) for name in values if name not in names)
    if unknown:
        raise ValueError(f"model_config has unknown fields {unknown}, expected some of: {', '.join(names)}")
    return DefaultModelConfig(**values)


def _filters(value: Any) -> tuple[ConvFilter, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"conv_filters is {value!r}, expected None or a list of (out_channels, kernel, stride)")
    for index, each in enumerate(value):
        fits = isinstance(each, list | tuple) and len(each) == 3
        if not fits or not (_is_size(each[0]) and _is_extent(each[1]) and _is_extent(each[2])):
            raise ValueError(
                f"conv_filters[{index}] is {each!r}, expected (out_channels, kernel, stride) of whole numbers, each 1 "
                "or more; kernel and stride may be (height, width)"
            )
    return tuple((channels, _frozen(kernel), _frozen(stride)) for channels, kernel, stride in value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_extent(value: Any) -> bool:
    return _is_size(value) or (isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_size, value)))


def _frozen(extent: Any) -> Extent:
    return extent if isinstance(extent, int) else (extent[0], extent[1])


_HIDDEN_GAIN = math.sqrt(2.0)
_SUPPORTED = (
    "Discrete, MultiDiscrete, MultiBinary, Box of shape (), (n,) or (height, width, channels), or a Dict or Tuple of "
    "those"
)

_log = logging.getLogger(__name__)
_POLICY_GAIN = 0.01  # small: at first all actions are about equally likely
_VALUE_GAIN = 1.0


class ObservationEncoder(nn.Module):
    """Encoder of observations, any[B, ...] or, with `use_lstm`, any[B, T, ...], to f32[B, width] or f32[B, T, width].

    Raises ModuleError for a space that it can't take, and for observations that are not of the space's shape.
    """

    def __init__(self, space: gym.Space[Any], config: DefaultModelConfig) -> None:
        super().__init__()
        parts = _leaves(space)
        self._paths = [leaf.keys for leaf in parts]
        encoders = [LeafEncoder(leaf.space, leaf.path, config) for leaf in parts]
        self.leaves = nn.ModuleList(encoders)
        joined = sum(encoder.width for encoder in encoders)
        hiddens: Sequence[int] = () if _is_image(space) else config.fcnet_hiddens
        self.layers = nn.Sequential(*dense(joined, hiddens, config.fcnet_activation))
        self.width: int = hiddens[-1] if hiddens else joined

    def forward(self, observations: Tree) -> Tensor:
        encoded = [
            leaf(part_at(observations, path, "'obs'", "it to be as the observation space"))
            for leaf, path in zip(self.leaves, self._paths, strict=True)
        ]
        embeddings: Tensor = self.layers(encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1))
        return embeddings


class LeafEncoder(nn.Module):
    """Encoder of one leaf of the observations, any[*lead, *shape], to f32[*lead, width]."""

    def __init__(self, space: gym.Space[Any], where: str, config: DefaultModelConfig) -> None:
        super().__init__()
        self._where = where
        self._shape = torch.Size(space.shape or ())
        self._lead = 2 if config.use_lstm else 1
        self.layers: OneHot | ImageEncoder | None = None  # numbers are flattened
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            self.layers = OneHot(space)
        elif _is_image(space):
            self.layers = ImageEncoder(space, where, config)
        self.width = math.prod(self._shape) if self.layers is None else self.layers.width

    def forward(self, leaf: Tensor) -> Tensor:
        shape = leaf.shape
        if shape[self._lead :] != self._shape or len(shape) < self._lead:
            lead = ["B", "T"][: self._lead]
            raise ModuleError(
                f"'{self._where}' has shape {list(shape)}, expected [{', '.join([*lead, *map(str, self._shape)])}]"
            )
        if self.layers is not None:
            encoded: Tensor = self.layers(leaf)
            return encoded
        ndim = len(self._shape)
        if ndim != 1:
            leaf = leaf.flatten(-ndim) if ndim else leaf.unsqueeze(-1)
        return leaf.float()


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


def _leaves(space: gym.Space[Any]) -> list[Leaf]:
    """The leaves of a space of observations. Raises ModuleError if there are none, or one that has no encoder."""
    leaves = list(leaves_within(space, "obs"))
    if not leaves:
        raise ModuleError(f"observation_space is {space}, expected at least one leaf")
    for leaf in leaves:
        numbers = isinstance(leaf.space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
        box = isinstance(leaf.space, spaces.Box) and len(leaf.shape) in (0, 1, 3)
        if not (numbers or box) or 0 in leaf.shape:
            raise ModuleError(
                f"observation_space has {leaf.space} at '{leaf.path}', expected {_SUPPORTED}: the default module takes "
                "no others; FlattenObservations as an env_to_module_connector makes vectors of them, or give a module "
                "of your own"
            ).see("module")
    return leaves


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


class DefaultModule(RLModule):
    """Policy and value network for two spaces, sized by a `DefaultModelConfig`.

        model_config    a DefaultModelConfig, a dict of some of its fields, or None; once made, always the first

    A Dict space of observations may have `action_mask`, a number for each of Discrete or MultiDiscrete actions. The
    network then sees the rest, and actions whose mask is 0 are ruled out, as `mask_logits` does it.

    Columns that `_forward` takes and gives; with `use_lstm`, `[B, T, ...]` stands for `[B, ...]`:

        obs                   any[B, ...]    as the observation space has it; images uint8 are scaled by 1/255
        state_in              {"h": f32[B, cell], "c": f32[B, cell]}, with `use_lstm` only
        action_dist_inputs    f32[B, D]      see `rollflow.nodes.modules.distribution`
        vf_preds              f32[B]         not with `inference_only`
        state_out             as state_in, after each row's last step; with `use_lstm` only
    """

    config: DefaultModelConfig

    def setup(self) -> None:
        """Make the network. Raises ModuleError for spaces, ValueError for a config that it can't be made for."""
        if self.observation_space is None or self.action_space is None:
            missing = "observation_space" if self.observation_space is None else "action_space"
            raise ModuleError(
                f"{type(self).__name__} got no {missing}, expected a gymnasium space: layers depend on it"
            )
        self.config = config = self.model_config = model_config_of(self.model_config)
        if config.use_lstm and not config.vf_share_layers:
            raise ModuleError(
                "model_config has use_lstm=True and vf_share_layers=False, expected vf_share_layers=True: an LSTM for "
                "the values alone would need a state of its own"
            )
        unmasked = _without_mask(self.observation_space, self.action_space)
        self.masks_actions, encoded_space = unmasked is not None, unmasked or self.observation_space
        self.encoder = ObservationEncoder(encoded_space, config)
        self.lstm = _lstm(self.encoder.width, config.lstm_cell_size) if config.use_lstm else None
        width = config.lstm_cell_size if config.use_lstm else self.encoder.width
        self.policy_head = PolicyHead(width, self.action_space, config)
        if self.inference_only:
            return
        self.value_encoder = None if config.vf_share_layers else ObservationEncoder(encoded_space, config)
        self.value_head = _head(width, 1, _VALUE_GAIN, config)

    def get_initial_state(self) -> dict[str, Tensor]:
        """Zeros, {"h": f32[cell], "c": f32[cell]}; {} without `use_lstm`."""
        return {} if self.lstm is None else {name: torch.zeros(self.config.lstm_cell_size) for name in ("h", "c")}

    def compute_values(self, batch: Batch, embeddings: Tensor | None = None) -> Tensor:
        """Values alone, f32[B] or, with `use_lstm`, f32[B, T].

            embeddings    f32[B, width] of the values' encoder (and LSTM), if they have been computed already

        Raises ModuleError with `inference_only`.
        """
        if self.inference_only:
            raise ModuleError(f"{type(self).__name__} is inference_only, expected inference_only=False for values")
        if embeddings is None:
            encoder = self.value_encoder
            embeddings = self._embedded(batch)[0] if encoder is None else encoder(batch[Columns.OBS])
        return self._values(embeddings)

    def _forward(self, batch: Batch, **kwargs: Any) -> Batch:
        embeddings, output = self._embedded(batch)
        logits = self.policy_head(embeddings)
        output[Columns.ACTION_DIST_INPUTS] = (
            mask_logits(logits, batch[Columns.OBS][ACTION_MASK]) if self.masks_actions else logits
        )
        if not self.inference_only:
            encoder = self.value_encoder
            output[Columns.VF_PREDS] = self._values(embeddings if encoder is None else encoder(batch[Columns.OBS]))
        return output

    def _values(self, embeddings: Tensor) -> Tensor:
        values: Tensor = self.value_head(embeddings).squeeze(-1)
        return values

    def _embedded(self, batch: Batch) -> tuple[Tensor, Batch]:
        """Input of the heads, f32[B, width] or f32[B, T, width], and the column `state_out`, if there is an LSTM."""
        encoded: Tensor = self.encoder(batch[Columns.OBS])
        if self.lstm is None:
            return encoded, {}
        state = batch.get(Columns.STATE_IN)
        if state is None:
            raise ModuleError(
                f"batch has columns {sorted(batch)}, expected '{Columns.STATE_IN}' among them: "
                f"{type(self).__name__} has an LSTM"
            )
        h, c = state["h"], state["c"]
        if encoded.shape[1] == 1:  # as while acting; nn.LSTM takes up to ten times as long for one step
            h, c = torch.lstm_cell(encoded.squeeze(1), (h, c), *self.lstm.parameters())
            return h.unsqueeze(1), {Columns.STATE_OUT: {"h": h, "c": c}}
        embeddings, (h, c) = self.lstm(encoded, (h.unsqueeze(0), c.unsqueeze(0)))
        return embeddings, {Columns.STATE_OUT: {"h": h.squeeze(0), "c": c.squeeze(0)}}


class PolicyHead(nn.Module):
    """Embeddings f32[..., width] to `action_dist_inputs` f32[..., D]."""

    order: Tensor | None

    def __init__(self, width: int, space: gym.Space[Any], config: DefaultModelConfig) -> None:
        super().__init__()
        required = distribution_for(space).required_input_dim  # raises for a space that has no distribution
        boxes = [
            (math.prod(part.shape), begin) for part, begin in places_of_inputs(space) if isinstance(part, spaces.Box)
        ]
        # The places of logarithms of deviations, which are those behind each Box's means.
        deviations = [place for size, begin in boxes for place in range(begin + size, begin + 2 * size)]
        free = deviations if config.free_log_std else []
        if config.free_log_std and not free:
            raise ModuleError(
                f"free_log_std is True for actions in {space}, expected a Box, or a Dict or Tuple with one"
            )
        self.layers = _head(width, required - len(free), _POLICY_GAIN, config)
        self.log_std = nn.Parameter(torch.zeros(len(free))) if free else None
        # The layers' outputs come first, the deviations after them: `order` gives the place of each input there.
        order = np.argsort([*sorted(set(range(required)) - set(free)), *free]).tolist()
        in_place = order == list(range(required))
        self.register_buffer("order", None if in_place else torch.tensor(order), persistent=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        inputs: Tensor = self.layers(embeddings)
        if self.log_std is None:
            return inputs
        inputs = torch.cat([inputs, self.log_std.expand(*inputs.shape[:-1], -1)], -1)
        return inputs if self.order is None else inputs.index_select(-1, self.order)


def _head(width: int, outputs: int, gain: float, config: DefaultModelConfig) -> nn.Sequential:
    hiddens = config.head_fcnet_hiddens
    last = linear(hiddens[-1] if hiddens else width, outputs, gain)
    return nn.Sequential(*dense(width, hiddens, config.head_fcnet_activation), last)


def _lstm(inputs: int, cell: int) -> nn.LSTM:
    """An LSTM over f32[B, T, inputs] with orthogonal weights, and no biases at first."""
    layer = nn.LSTM(inputs, cell, batch_first=True)
    for name, weight in layer.named_parameters():
        if name.startswith("weight"):
            nn.init.orthogonal_(weight)
        else:
            nn.init.zeros_(weight)
    return layer


def _without_mask(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> gym.Space[Any] | None:
    """Dict space of observations without `action_mask`; None if there is no mask that rules anything out.

    Raises ModuleError for a mask that does not have a number for each Discrete action.
    """
    if not isinstance(observation_space, spaces.Dict) or ACTION_MASK not in observation_space.spaces:
        return None
    mask = observation_space[ACTION_MASK]
    fits = isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete) and mask_width(mask) == (
        distribution_for(action_space).required_input_dim
    )
    if len(observation_space.spaces) == 1 or not (fits or isinstance(action_space, spaces.Discrete)):
        _log.warning(
            "observations have '%s' in %s, which the default module heeds beside another observation, with one number "
            "for each of Discrete or MultiDiscrete actions; the action space is %s: the mask is an input like any "
            "other, and rules nothing out",
            ACTION_MASK,
            mask,
            action_space,
        )
        return None
    if isinstance(action_space, spaces.Discrete) and not fits:
        raise ModuleError(
            f"observation_space has '{ACTION_MASK}' in {mask}, expected shape ({action_space.n},): a number for each "
            f"action of {action_space}, 0 where it is ruled out"
        )
    return spaces.Dict({key: space for key, space in observation_space.items() if key != ACTION_MASK})
