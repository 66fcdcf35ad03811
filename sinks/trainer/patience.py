"""How long a trainer waits."""

from time import monotonic

_LOOK_S = 10.0  # after which it is looked at again, come what may


class Patience:
    """How long somebody is waited for.

    limit    seconds; None: for ever
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._since = self._told = monotonic()

    def restart(self) -> None:
        """Wait as long again."""
        self._since = monotonic()

    @property
    def is_long(self) -> bool:
        """Whether it has been so long that somebody is to be told, since that was asked last."""
        now = monotonic()
        if now - self._told < _LOOK_S:
            return False
        self._told = now
        return True

    @property
    def is_over(self) -> bool:
        """Whether it has been long enough."""
        return self.limit is not None and monotonic() - self._since >= self.limit

    @property
    def left(self) -> float:
        """Seconds to wait before it is looked at again."""
        left = _LOOK_S if self.limit is None else self._since + self.limit - monotonic()
        return min(_LOOK_S, max(left, 0.01))
