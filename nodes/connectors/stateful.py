"""Properties of stateful modules: whether a module is one, and the length of its training rows."""

from typing import Any

from rollflow.nodes.argument_checks import checked_count
from rollflow.stream.data.errors import ModuleError

DEFAULT_MAX_SEQ_LEN = 20


def is_stateful(rl_module: Any) -> bool:
    """True if a module's forward pass takes `state_in`; False for a module without `is_stateful()`."""
    method = getattr(rl_module, "is_stateful", None)
    return method is not None and bool(method())


def max_seq_len_of(rl_module: Any) -> int:
    """Steps in a row of a stateful module's train batch, by its `model_config`. Raises ModuleError unless >= 1."""
    config = getattr(rl_module, "model_config", None)
    length = config.get("max_seq_len") if isinstance(config, dict) else getattr(config, "max_seq_len", None)
    try:
        return checked_count("max_seq_len", DEFAULT_MAX_SEQ_LEN if length is None else length, 1)
    except ValueError as error:
        raise ModuleError(f"model_config of {type(rl_module).__name__}: {error}") from None
