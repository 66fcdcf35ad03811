"""One lane whose whole rollout is in a worker process, seen from here."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.rollouts_elsewhere import Turns
from rollflow.nodes.workers.fragment_codec import FragmentReader
from rollflow.nodes.workers.frames import Frame, Kind, frame
from rollflow.nodes.workers.lane_link import LaneLink, State
from rollflow.nodes.workers.watch import At
from rollflow.stream.blocks import SharedBlock
from rollflow.stream.fragment import Fragment, FragmentLayout
from rollflow.stream.packing import unpack

# At the head of what a worker is set up with, i64 each:
#   how many transitions it has made
#   how often it has got on with something, which is what tells it from one that hangs
#   the number of its fragment in the making, times one more than a fragment's rows, plus the rows that there are: one
#   number, so that no half of it is ever seen. -1 where none can be seen
PROGRESS_BYTES = 64


class News(NamedTuple):
    """Published weights, packed."""

    version: int
    block: SharedBlock


class RolloutLink(LaneLink):
    """The socket to a lane's worker.

    steps      transitions in the fragments that have come
    stages     what the worker's stages have counted: [name, items, busy seconds]
    version    of the weights that were sent last
    untaken    weights that were sent and that the worker has not taken over yet
    lost       why the worker before was lost, until the first fragment of the one after it; None: it was not
    has_told   whether the last fragment of the worker that is being lost says itself why
    """

    def __init__(self, index: int, maker: bytes) -> None:
        super().__init__(index, maker)
        self.remote: Turns | None = None
        self.steps = 0
        self.version = self.untaken = 0
        self.lost: str | None = None
        self.has_told = False
        self.stages: list[list[Any]] = []
        self._reported = 0  # by the worker as it is now
        self._progress: NDArray[np.int64] | None = None
        self._reader_of_fragments: FragmentReader | None = None

    def set_up(self, told: bytes, version: int, layout: FragmentLayout, *, hands_on: bool) -> None:
        """Have the rollout built out of what was pickled, weights of this version among it.

        hands_on    whether other processes may be handed what its fragments lie in
        """
        block = SharedBlock(PROGRESS_BYTES + len(told))
        block.write(told, PROGRESS_BYTES)
        self._progress = block.array()[:PROGRESS_BYTES].view(np.int64)
        self._reported = 0
        self._reader_of_fragments = FragmentReader(layout, self.index, hands_on=hands_on)
        self.version, self.untaken = version, 0
        self.send(frame(Kind.SET_UP, number=block.size), block.fd)
        block.close()
        self.starts += 1

    def turn(self, news: News | None, states: SharedBlock | None) -> None:
        """Have the next fragment made, with these weights, and with what connectors elsewhere have learnt."""
        assert self._reader_of_fragments is not None
        freed = self._reader_of_fragments.freed
        while freed:
            self.send(frame(Kind.FREE, freed.popleft()))
        if states is not None:
            self.send(frame(Kind.STATES, number=states.size), states.fd)
        self._send_news(news)
        self.send(frame(Kind.TURN))
        self.state = State.RESETTING if self.state is State.MADE else State.STEPPING

    def begin(self) -> None:
        """The environments have been reset: from now on they make steps."""
        self.state = State.STEPPING

    def offer(self, news: News | None) -> None:
        """Have weights used in the fragment that is being made, unless some are under way: then those come first."""
        if self.state in (State.RESETTING, State.STEPPING) and not self.untaken:
            self._send_news(news)

    def _send_news(self, news: News | None) -> None:
        if news is not None and news.version > self.version:
            self.send(frame(Kind.WEIGHTS, number=news.block.size), news.block.fd)
            self.version, self.untaken = news.version, self.untaken + 1

    def map(self, answer: Frame) -> None:
        """Take a block that the worker has made."""
        assert self._reader_of_fragments is not None
        self._reader_of_fragments.map(answer.block, SharedBlock(answer.number, answer.fd))

    def fill(self, answer: Frame) -> None:
        """Take what the worker says of a fragment in the making."""
        assert self._reader_of_fragments is not None
        self._reader_of_fragments.begin(unpack(answer.payload))

    def read(self, answer: Frame) -> dict[str, Any]:
        """Take the fragment that has come; what else the worker says with it."""
        assert self._reader_of_fragments is not None
        assert self.remote is not None
        told: dict[str, Any] = unpack(answer.payload)
        self._take(self._reader_of_fragments.read(answer.block, told))
        self.steps += told["steps"] - self._reported
        self._reported, self.stages = told["steps"], told["nodes"]
        self.state = State.READY
        if "failure" not in told:
            self.failures = 0
        return told

    @property
    def unreported(self) -> int:
        """Transitions that the worker has made and that are in no fragment that has come."""
        return 0 if self._progress is None else max(0, int(self._progress[0]) - self._reported)

    def give_up(self, reason: str) -> int:
        """The worker is lost: how many transitions are lost with it, the step that was under way among them.

        What it had made of its fragment is taken, where that can be seen.
        """
        assert self.remote is not None
        if self._progress is None:
            return 0
        if not self._rescue(reason):
            self.lost = reason
        lost = self.unreported + (self.remote.num_slots if self.pulse else 0)
        self.forget_progress()
        return lost

    def forget_progress(self) -> None:
        """What the worker has made and not given is not counted any more."""
        self._progress = None

    @property
    def at(self) -> At:
        """How often the worker has got on with something, and what it is at."""
        turns, doing = super().at
        return turns + self.pulse, doing

    @property
    def pulse(self) -> int:
        """How often the worker has got on with something: first when its environments have been reset."""
        return 0 if self._progress is None else int(self._progress[1])

    def _rescue(self, reason: str) -> bool:
        assert self.remote is not None
        assert self._progress is not None
        if self._reader_of_fragments is None:
            return False
        sequence, rows = divmod(int(self._progress[2]), self._reader_of_fragments.num_rows + 1)
        if sequence != self.remote.sequence:
            return False
        fragment = self._reader_of_fragments.rescue(sequence, rows, reason)
        if fragment is None:
            return False
        self._take(fragment)
        self.steps += fragment.num_steps
        self._reported += fragment.num_steps
        return True

    def _take(self, fragment: Fragment) -> None:
        assert self.remote is not None
        if self.lost is not None:
            fragment.begin_after_loss(self.lost)
            self.lost = None
        self.remote.fragment, self.remote.sequence = fragment, fragment.sequence + 1
