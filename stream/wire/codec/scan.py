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

# First byte of other values -> what follows is bytes, a list, a map or an ext value, whose length is in so many bytes,
# or this where there are none.
_BYTES, _LIST, _MAP, _EXT = 0, 1, 2, 3
_LONG = {0x80 + length: (_MAP, 0, length) for length in range(16)}
_LONG |= {0x90 + length: (_LIST, 0, length) for length in range(16)}
_LONG |= {0xD4 + power: (_EXT, 0, 1 << power) for power in range(5)}
_SIZED = {0xC4: (_BYTES, 1), 0xC7: (_EXT, 1), 0xD9: (_BYTES, 1), 0xDC: (_LIST, 2), 0xDE: (_MAP, 2)}  # and least width
for _first, (_kind, _least) in _SIZED.items():
    _LONG |= {_first + place: (_kind, width, 0) for place, width in enumerate((1, 2, 4)[_least - 1 :])}

_IS_STRING = [0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB for first in range(256)]
_CAN_BE_KEY = [bool(_FIXED[first]) or _LONG.get(first, (_MAP,))[0] == _BYTES for first in range(256)]


def scan(data: bytes) -> None:
    """Raise WireError unless `data` is one msgpack value within the limits, to its last byte."""
    try:
        end = _end_of(data)
    except IndexError:
        end = len(data) + 1
    if end != len(data):
        raise _wrong(
            f"its {len(data)} bytes {'end inside a value' if end > len(data) else 'go on behind the value'}, expected "
            "one msgpack value"
        )


def _end_of(data: bytes) -> int:
    """The offset at which the first value ends, with all that is in it. It is called for every message."""
    at, count, other_keys, exts = 0, 1, 0, 0
    left, is_map, stop = 1, False, 0  # values to come of the innermost list, map or ext value, and where an ext ends
    outer: list[tuple[int, bool, int]] = []  # the same of those around it
    while True:
        while not left:
            if stop and at != stop:
                raise _wrong("an ext value does not hold one value up to its end")
            if not outer:
                return at
            exts -= bool(stop)
            left, is_map, stop = outer.pop()
        left -= 1
        first = data[at]
        if is_map and left & 1 and not _IS_STRING[first]:
            other_keys += 1
            if not _CAN_BE_KEY[first]:
                raise _wrong(f"a map's key begins with byte 0x{first:02x}, expected a plain value")
            if other_keys > MAX_OTHER_KEYS:
                raise _wrong(f"more than {MAX_OTHER_KEYS} keys of maps are no strings")
        if size := _FIXED[first]:
            at += size
            continue
        if first not in _LONG:
            raise _wrong(f"byte 0x{first:02x} begins no value")
        kind, width, length = _LONG[first]
        at += 1 + width
        if width:
            length = int.from_bytes(data[at - width : at])
        if kind == _BYTES:
            at += length
            continue
        values, end = length * (1 + (kind == _MAP)), 0
        if kind == _EXT:
            code, at = data[at], at + 1
            if code not in EXT_CODES:
                raise _wrong(f"ext code {code}, expected {EXT_CODES[0]} to {EXT_CODES[-1]}")
            values, end = 1, at + length
            if code == ARRAY and length <= SHORT:
                at = end
                continue
            exts += 1
        outer.append((left, is_map, stop))
        left, is_map, stop = values, kind == _MAP, end
        count += left
        if count > MAX_VALUES:
            raise _wrong(f"more than {MAX_VALUES} values")
        if len(outer) > MAX_DEPTH or exts > MAX_EXT_DEPTH:
            raise _wrong(
                f"more than {MAX_DEPTH} lists, maps and ext values inside each other, or {MAX_EXT_DEPTH} ext values"
            )


def _wrong(text: str) -> WireError:
    return WireError(f"header: {text}", "frame")
