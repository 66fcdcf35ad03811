"""How long to wait before something that has failed is tried again."""

FIRST_S = 0.1
_MOST_DOUBLINGS = 16  # 2 ** failures must stay a float


def pause_s(failures: int, longest_s: float) -> float:
    """Seconds to wait after so many failures in a row: twice as long each time, up to `longest_s`."""
    return min(FIRST_S * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest_s)
