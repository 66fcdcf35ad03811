"""Which lanes a rollout has, as its trainer is to know them."""

from collections.abc import Callable, Iterable

from rollflow.stream.wire import Aside, Come


class LaneNews:
    """Takes down which lanes come and go, and says so once.

    lanes    that are there at the beginning; None: nobody is to know of any
    ring     called when there is something new, in the thread that the graph runs in

    told     lanes that there are -> None; those that are gone -> number of the last item behind which there is none of
             theirs. Never changed in place: hellos are made in a thread of their own
    """

    def __init__(self, lanes: Iterable[int] | None, ring: Callable[[], None]) -> None:
        self.told: dict[int, int | None] = dict.fromkeys(lanes or ())
        self._is_told = lanes is not None
        self._ring = ring
        self._come: list[int] = []
        self._gone: dict[int, int] = {}  # lane -> how many fragments it gives in all
        self._given: dict[int, int] = {}  # lane -> its fragments that were given

    def see(self, lane: int) -> None:
        """A lane is ready to begin a fragment."""
        if self._is_told and lane not in self.told:
            self.told = self.told | {lane: None}
            self._come.append(lane)
            self._ring()

    def given(self, lane: int) -> int:
        """How many fragments of a lane were given."""
        return self._given.get(lane, 0)

    def give(self, lane: int, sequence: int) -> None:
        """A lane's fragment is given to the trainer, or passed over."""
        self._given[lane] = sequence + 1

    def gone(self, lane: int, fragments: int) -> None:
        """A lane is gone, and gives so many fragments in all, of which some may be on their way."""
        if lane in self.told:
            self._gone[lane] = fragments
            self._ring()

    def take(self, number: int) -> list[Come | Aside]:
        """What is new: lanes that have come, and those that are gone, all of whose fragments are among the items up to
        a number.
        """
        if not (self._come or self._gone):
            return []
        news: list[Come | Aside] = [Come(lane) for lane in self._come]
        self._come.clear()
        over = [lane for lane, fragments in self._gone.items() if self.given(lane) >= fragments]
        for lane in over:
            del self._gone[lane]
            self._given.pop(lane, None)
        self.told = self.told | dict.fromkeys(over, number)
        return news + [Aside(lane, number) for lane in over]

    def forget(self, number: int) -> None:
        """Know no more of lanes that are gone, where nobody wants items again up to a number."""
        if any(last is not None and last <= number for last in self.told.values()):
            self.told = {lane: last for lane, last in self.told.items() if last is None or last > number}
