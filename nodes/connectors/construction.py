"""Construction of a connector piece: its spaces are computed by the end of its constructor."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

_SET_BEFORE = "_set_before_spaces"
_OUTPUTS = ("_observation_space", "_action_space")


def completing(constructor: Callable[..., None]) -> Any:
    """Wrap a piece's constructor: the outermost one of a subclass computes the spaces at its end."""

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        is_outermost = not self._under_construction
        self._under_construction = True
        try:
            constructor(self, *args, **kwargs)
        finally:
            if is_outermost:
                del self._under_construction
        if is_outermost:
            _finish_spaces(self)
            # CPython reads attributes much slower once `vars` has been asked for, but not from a dict like this one.
            self.__dict__ = dict(vars(self))

    return __init__


def begin_spaces(piece: Any) -> None:
    """Compute the spaces within the constructor of `ConnectorV2`, as RLlib does, for what a subclass's does next."""
    with contextlib.suppress(Exception):  # attributes may still be missing: an error that lasts is raised at the end
        piece._recompute_spaces()
    vars(piece)[_SET_BEFORE] = dict(vars(piece))


def _finish_spaces(piece: Any) -> None:
    """Compute the spaces again where a constructor has set anything since; output spaces that it has set stay."""
    before = vars(piece).pop(_SET_BEFORE, None)
    if before is None:  # a pipeline, which does this itself
        return
    changed = {name: value for name, value in vars(piece).items() if before.get(name, before) is not value}
    if changed or not piece._spaces_known:
        piece._recompute_spaces()
        vars(piece).update({name: changed[name] for name in _OUTPUTS if name in changed})
