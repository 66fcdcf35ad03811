"""Config of a `DefaultModule`, with RLlib's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

ACTIVATIONS: dict[str, type[torch.nn.Module]] = {
    "elu": torch.nn.ELU,
    "gelu": torch.nn.GELU,
    "leaky_relu": torch.nn.LeakyReLU,
    "linear": torch.nn.Identity,
    "relu": torch.nn.ReLU,
    "sigmoid": torch.nn.Sigmoid,
    "silu": torch.nn.SiLU,
    "swish": torch.nn.SiLU,
    "tanh": torch.nn.Tanh,
}

Extent = int | tuple[int, int]
ConvFilter = tuple[int, Extent, Extent]


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
