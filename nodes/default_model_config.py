"""What a `DefaultModule` is made of, in RLlib's words."""

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
    """Sizes and activations. Activations are named as in `ACTIVATIONS`.

        fcnet_hiddens            units of each layer that encodes what is no image
        conv_filters             (out_channels, kernel, stride) of each layer that encodes an image, without padding;
                                 kernel and stride are one number, or (height, width). None: chosen by the image's size
        head_fcnet_hiddens       units of each layer between the encoder and the actions, and again before the values
        vf_share_layers          values and actions have one encoder, instead of one each
        free_log_std             a Box's deviations are parameters, the same for every observation
        use_lstm                 an LSTM follows the encoder
        max_seq_len              steps of a sequence to learn from, at most; the module itself takes any number
        lstm_cell_size           width of the LSTM's state and output

    Lists are made tuples. Raises ValueError for what can't be.
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
        for name in ("fcnet_hiddens", "head_fcnet_hiddens"):
            object.__setattr__(self, name, _hiddens(name, getattr(self, name)))
        for name in ("fcnet_activation", "conv_activation", "head_fcnet_activation"):
            activation = getattr(self, name)
            if not isinstance(activation, str) or activation not in ACTIVATIONS:
                raise ValueError(f"{name} is {activation!r}, expected one of: {', '.join(ACTIVATIONS)}")
        for name in ("vf_share_layers", "free_log_std", "use_lstm"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected True or False")
        for name in ("max_seq_len", "lstm_cell_size"):
            if not _is_size(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a whole number, 1 or more")
        if self.conv_filters is not None:
            object.__setattr__(self, "conv_filters", _filters(self.conv_filters))


def model_config_of(given: DefaultModelConfig | Mapping[str, Any] | None) -> DefaultModelConfig:
    """The config itself, or made from a dict of some of its fields. Raises ValueError for anything else."""
    if isinstance(given, DefaultModelConfig):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"model_config is a {type(given).__name__}, expected a DefaultModelConfig or a dict")
    values = dict(given or {})
    names = [field.name for field in fields(DefaultModelConfig)]
    unknown = sorted(str(name) for name in values if name not in names)
    if unknown:
        raise ValueError(f"model_config has unknown fields {unknown}, expected some of: {', '.join(names)}")
    return DefaultModelConfig(**values)


def _hiddens(name: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, list | tuple) or not all(map(_is_size, given)):
        raise ValueError(f"{name} is {given!r}, expected a list of whole numbers, each 1 or more")
    return tuple(given)


def _filters(given: Any) -> tuple[ConvFilter, ...]:
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"conv_filters is {given!r}, expected None or a list of (out_channels, kernel, stride)")
    for at, each in enumerate(given):
        fits = isinstance(each, list | tuple) and len(each) == 3
        if not fits or not (_is_size(each[0]) and _is_extent(each[1]) and _is_extent(each[2])):
            raise ValueError(
                f"conv_filters[{at}] is {each!r}, expected (out_channels, kernel, stride) of whole numbers, each 1 or "
                "more; kernel and stride may be (height, width)"
            )
    return tuple((channels, _frozen(kernel), _frozen(stride)) for channels, kernel, stride in given)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_extent(value: Any) -> bool:
    return _is_size(value) or (isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_size, value)))


def _frozen(extent: Any) -> Extent:
    return extent if isinstance(extent, int) else (extent[0], extent[1])
