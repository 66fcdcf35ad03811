"""Infos of all slots of a lane: in gymnasium's vector form, or as one dict for each slot.

The vector form is `{"key": values over the slots, "_key": bool[N]}`: the mask says which slots have the key. Values are
arrays, lists, or nested dicts of this form. One slot's dict is made when it is asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.tree import library_of

_PLAIN = frozenset({bool, int, float, str, type(None), *np.sctypeDict.values()})  # types that need no copy


class SlotInfos(Mapping[str, Any]):
    """One info dict for each slot, a copy of the environment's; as a mapping it is empty. False if all dicts are.

    count       number of slots
    of_slots    slot -> its dict, of slots with a dict that is not empty
    """

    __slots__ = ("count", "of_slots")

    def __init__(self, infos: Sequence[Mapping[str, Any]] = (), count: int | None = None) -> None:
        self.count = len(infos) if count is None else count
        self.of_slots: dict[int, dict[str, Any]] = {
            slot: copied(info if type(info) is dict else dict(info)) for slot, info in enumerate(infos) if info
        }

    @property
    def dicts(self) -> list[dict[str, Any]]:
        """The dicts of all slots."""
        return [self.of_slots.get(slot, {}) for slot in range(self.count)]

    def of(self, slot: int) -> dict[str, Any]:
        """A copy of one slot's dict."""
        return dict(self.of_slots.get(slot, {}))

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return any(self.of_slots.values())


def copied(value: Any) -> Any:
    """A deep copy of infos, or of a state, through arrays and tensors any[...], dicts, lists and tuples.

    Whose they are may write over them later.
    """
    if type(value) is dict:
        return {key: part if type(part) in _PLAIN else copied(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        array = value.copy()
        if value.dtype.hasobject:
            for index, part in np.ndenumerate(value):
                array[index] = copied(part)
        return array
    if isinstance(value, dict):
        return copied(dict(value))
    if type(value) is list or type(value) is tuple:
        return type(value)(map(copied, value))
    return value if library_of(value) is np else value.detach().clone()


def info_of(infos: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """The info dict of one slot."""
    if isinstance(infos, SlotInfos):
        return infos.of(slot)
    return {
        key: info_of(value, slot) if isinstance(value, Mapping) else _value_of(value, slot)
        for key, value in infos.items()
        if not _is_mask(infos, key) and _has(infos, key, slot)
    }


def replaced(infos: Mapping[str, Any], others: Mapping[str, Any], slots: NDArray[np.bool_]) -> Mapping[str, Any]:
    """`infos`, with the infos in `others` for the slots in the mask `slots`, bool[N]."""
    if not infos and not others:
        return infos
    return SlotInfos([info_of(others if is_other else infos, slot) for slot, is_other in enumerate(slots.tolist())])


def without(infos: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """`infos` without these keys and their masks."""
    if not any(key in infos for key in keys):
        return infos
    dropped = {*keys, *(f"_{key}" for key in keys)}
    return {key: value for key, value in infos.items() if key not in dropped}


def _is_mask(infos: Mapping[str, Any], key: str) -> bool:
    return key.startswith("_") and key[1:] in infos


def _has(infos: Mapping[str, Any], key: str, slot: int) -> bool:
    mask = infos.get(f"_{key}")
    return mask is None or bool(mask[slot])


def _value_of(value: Any, slot: int) -> Any:
    """One slot's value; a value that is no sequence over the slots belongs to all of them."""
    if isinstance(value, np.ndarray) and not value.ndim:
        return value
    if isinstance(value, np.ndarray | list | tuple) and len(value) > slot:
        return value[slot]
    return value
