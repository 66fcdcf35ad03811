"""Scan of msgpack bytes before they are unpacked.

The unpacker allocates as many entries as a list claims, in up to 1024 nested lists. It also takes 40 KiB of stack for
every nested ext value. So a few bytes can ask for gigabytes, or overflow the stack, which ends the process. Scanned
bytes can't: every count is backed by bytes, and nesting is bounded.
"""

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.limits import MAX_DEPTH, MAX_EXT_DEPTH, MAX_OTHER_KEYS, MAX_VALUES

EXT_CODES = range(1, 6)
ARRAY = 1  # code of an array's description
SHORT = 64  # bytes of a description up to which unpacking is safe

# First byte -> size of the whole value if the first byte fixes it; else 0.
_FIXED = [1] * 0x80 + [0] * 0x20 + [1 + length for length in range(32)] + [0] * 0x20 + [1] * 0x20
for _first, _length in {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9}.items():
    _FIXED[_first] = _length
for _first in range(4):
    _FIXED[0xCC + _first] = _FIXED[0xD0 + _first] = 1 + (1 << _first)

# First byte -> size of the length that follows it.
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_CONTAINERS = {0xDC: (2, False), 0xDD: (4, False), 0xDE: (2, True), 0xDF: (4, True)}  # and whether it is a map
_FIXED_EXTS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}

_IS_STRING = [0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB for first in range(256)]
_CAN_BE_KEY = [bool(_FIXED[first]) or first in _BYTES for first in range(256)]


def scan(data: bytes) -> None:
    """Raise WireError unless `data` is one msgpack value within the limits, to its last byte."""
    try:
        end = _Scan(data).values(0, 1, False, 0, 0)
    except IndexError:
        end = len(data) + 1
    if end != len(data):
        raise WireError(
            f"header: its {len(data)} bytes {'end inside a value' if end > len(data) else 'go on behind the value'}, "
            "expected one msgpack value",
            "frame",
        )


class _Scan:
    """A scanner with counts of values and of keys that are no strings."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._count = 0
        self._other_keys = 0

    def values(self, at: int, count: int, keyed: bool, depth: int, exts: int) -> int:
        """The offset at which `count` values from `at` end; if `keyed`, every other one is a map's key."""
        self._count += count
        if self._count > MAX_VALUES:
            raise WireError(f"header: more than {MAX_VALUES} values", "frame")
        if depth > MAX_DEPTH or exts > MAX_EXT_DEPTH:
            raise WireError(
                f"header: more than {MAX_DEPTH} lists, maps and ext values inside each other, or {MAX_EXT_DEPTH} ext "
                "values",
                "frame",
            )
        data = self._data
        for index in range(count):
            first = data[at]
            if keyed and not index & 1 and not _IS_STRING[first]:
                self._take_key(first)
            size = _FIXED[first]
            at = at + size if size else self._long(at, first, depth, exts)
        return at

    def _take_key(self, first: int) -> None:
        self._other_keys += 1
        if not _CAN_BE_KEY[first]:
            raise WireError(f"header: a map's key begins with byte 0x{first:02x}, expected a plain value", "frame")
        if self._other_keys > MAX_OTHER_KEYS:
            raise WireError(f"header: more than {MAX_OTHER_KEYS} keys of maps are no strings", "frame")

    def _long(self, at: int, first: int, depth: int, exts: int) -> int:
        """The offset at which a value ends that has a length, or contains values; its first byte is before `at`."""
        at += 1
        if first < 0x90:
            return self.values(at, 2 * (first & 15), True, depth + 1, exts)
        if first < 0xA0:
            return self.values(at, first & 15, False, depth + 1, exts)
        if first in _BYTES:
            return self._number(at, _BYTES[first]) + at + _BYTES[first]
        if first in _CONTAINERS:
            width, is_map = _CONTAINERS[first]
            return self.values(at + width, self._number(at, width) * (1 + is_map), is_map, depth + 1, exts)
        if first in _FIXED_EXTS:
            return self._ext(at, _FIXED_EXTS[first], depth, exts)
        if first in _EXTS:
            width = _EXTS[first]
            return self._ext(at + width, self._number(at, width), depth, exts)
        raise WireError(f"header: byte 0x{first:02x} begins no value", "frame")

    def _ext(self, at: int, length: int, depth: int, exts: int) -> int:
        code = self._data[at]
        if code not in EXT_CODES:
            raise WireError(f"header: ext code {code}, expected {EXT_CODES[0]} to {EXT_CODES[-1]}", "frame")
        end = at + 1 + length
        if code == ARRAY and length <= SHORT:
            return end
        if self.values(at + 1, 1, False, depth + 1, exts + 1) != end:
            raise WireError(f"header: an ext value of {length} bytes does not hold one value", "frame")
        return end

    def _number(self, at: int, width: int) -> int:
        return int.from_bytes(self._data[at : at + width])
