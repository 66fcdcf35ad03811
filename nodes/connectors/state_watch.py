"""Detection of undeclared state: attributes of a connector piece that change while it runs, by fingerprints."""

import functools
import logging
import os
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from time import perf_counter_ns
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow.stream.data.errors import StateError

Fingerprint = bytes

_MOST_VALUES = 20_000  # in one fingerprint
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_OPAQUE = (
    gym.Space,
    gym.Env,
    gym.vector.VectorEnv,
    logging.Logger,
    random.Random,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
)


def fingerprint(value: Any, *, within: Any = None) -> Fingerprint:
    """A digest of a value, the same in every process: of scalars, text, arrays, tensors, and containers of such.

    within    an object whose attribute the value is: a value that leads back to it is not followed

    Containers and objects count by their contents, of 20,000 values at most. Spaces, environments, modules that act,
    random generators, loggers, functions and rollflow's own objects count by their class alone.
    """
    digest = blake2b(digest_size=16)
    for tokens in islice(_walked(value, {id(within)}), _MOST_VALUES):
        for token in tokens:
            digest.update(b"%d " % len(token))
            digest.update(token)
    return digest.digest()


def _walked(value: Any, around: set[int]) -> Iterator[tuple[bytes | memoryview, ...]]:
    """What is found on a walk through a value, of each value in it: what it is, and the numbers of an array.

    around    ids of the objects that the walk is within
    """
    kind, text = f"{type(value).__module__}.{type(value).__qualname__}", ""
    numbers: memoryview | None = None
    parts: Iterable[Any] | None = None  # that are walked through, within this value
    if isinstance(value, _SCALARS):
        text = repr(value)
    elif isinstance(value, os.PathLike):  # pathlib caches in its objects
        text = repr(os.fspath(value))
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        text, numbers = f"{value.dtype} {value.shape}", np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    elif isinstance(value, torch.Tensor):
        text = f"{value.dtype} {tuple(value.shape)}"
        if value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized:
            plain = value.detach().cpu().resolve_conj().resolve_neg()
            numbers = plain.contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif not _is_opaque(value) and id(value) not in around:
        contents = _contents_of(value)
        text, parts = str(len(contents)), chain(contents, chain.from_iterable(_attributes_of(value)))
    told = f"{kind} {text}".encode(errors="surrogatepass")
    yield (told,) if numbers is None else (told, numbers)
    if parts is not None:
        around.add(id(value))
        for part in parts:
            yield from _walked(part, around)
        around.remove(id(value))


def _contents_of(value: Any) -> list[Any]:
    """The contents of a container; an object's attributes are none of them."""
    if isinstance(value, Mapping):
        return [part for item in list(value.items()) for part in item]
    if isinstance(value, list | tuple | deque):
        return list(value)
    if isinstance(value, np.ndarray | np.generic):
        return [value.shape, *np.asarray(value).ravel().tolist()]
    if isinstance(value, set | frozenset):  # sorted, so that the order is the same in every process
        return [len(value), *(sorted(map(fingerprint, value)) if len(value) <= _MOST_VALUES else ())]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    return [value.__self__] if isinstance(value, types.MethodType) else []


def _is_opaque(value: Any) -> bool:
    """True if a value counts by its class alone: it may change without being learnt."""
    if isinstance(value, _OPAQUE) or hasattr(type(value), "forward_inference"):
        return True
    module = type(value).__module__
    return module.startswith("rollflow.") and not module.startswith("rollflow.nodes.connectors.")


def _attributes_of(value: Any) -> Iterable[tuple[str, Any]]:
    """(name, value) of an object's own attributes, those in slots included."""
    named = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                named[name] = getattr(value, name)
    return named.items()


_COST = 100  # a look takes at most 1/100 of the time since the one before
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, str, bytes)

# Attributes that every piece has, and that are no state.
_BOOKKEEPING = frozenset(
    "_ctor_args _ctor_kwargs _name _state_watch _is_made _spaces_known columnar lookback changes_episodes "
    "replaces_episodes _input_observation_space _input_action_space _observation_space _action_space".split()
)


class StateWatch:
    """Fingerprints of a piece's attributes, taken before and after its first call.

    An attribute that the first call fills, and that stays as it is from then on, is a cache and no state.
    """

    def __init__(self, piece: Any) -> None:
        self._before: dict[str, Fingerprint] | None = _fingerprints(piece, filled_alone=True)
        self._after: dict[str, Fingerprint] = {}
        self._changed: set[str] = set()
        self._looked_ns = self._cost_ns = 0

    def begin(self, piece: Any) -> None:
        """Compare with the attributes as they are now: after the first call, or after an edit from outside."""
        self._after = _fingerprints(piece)
        if self._before is not None:
            self._changed |= {name for name, before in self._before.items() if self._after.get(name) != before}
            self._before = None

    def look(self, piece: Any, *, in_any_case: bool = False) -> None:
        """Note changed attributes; skipped if a look would cost too much so soon, unless `in_any_case`."""
        now = perf_counter_ns()
        if not in_any_case and now - self._looked_ns < _COST * self._cost_ns:
            return
        found = _fingerprints(piece)
        self._changed |= {name for name in {*found, *self._after} if found.get(name) != self._after.get(name)}
        self._looked_ns = perf_counter_ns()
        self._cost_ns = self._looked_ns - now

    def check(self, piece: Any) -> None:
        """Raise StateError if attributes have changed."""
        if self._before is None:
            self.look(piece)
        if self._changed:
            name, names = piece.name, ", ".join(map(repr, sorted(self._changed)))
            raise StateError(
                f"{name} changes {names} while it runs but declares no state, so that would be lost; expected "
                "get_state and set_state, and merge_states where the states of several workers become one; or a "
                "get_state that returns {} where nothing has to last"
            ).see("state")


def check_same(name: str, states: Sequence[Any]) -> None:
    """Raise StateError unless all states are the same: a piece without `merge_states` can't merge different ones."""
    if len(states) > 1 and len({fingerprint(state) for state in states}) > 1:
        raise StateError(
            f"{name} is given {len(states)} different states to merge, but it has no merge_states of its own, so all "
            "but one would be lost; expected a merge_states(states) that returns one state made of all"
        ).see("state")


def _fingerprints(piece: Any, *, filled_alone: bool = False) -> dict[str, Fingerprint]:
    """Name -> fingerprint of a piece's attributes; `filled_alone`: without those that are None or empty containers."""
    return {
        name: fingerprint(value, within=piece)
        for name, value in list(vars(piece).items())
        if name not in _BOOKKEEPING
        and not (filled_alone and (value is None or (isinstance(value, _CONTAINERS) and not value)))
        and not isinstance(getattr(type(piece), name, None), functools.cached_property)  # noqa: TID251 - a piece's own
    }


def checked_state(piece: str, method: str, state: Any) -> Any:
    """Return the state that a piece's method gave. Raises StateError for no dict: a `return` may be missing."""
    if not isinstance(state, dict):
        raise StateError(f"{piece}.{method} returned {type(state).__name__}, expected a dict")
    return state
