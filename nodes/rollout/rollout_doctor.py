"""RolloutDoctor: the stall doctor of a rollout, with its reader and the learner pipeline in the reader's thread."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Protocol

from rollflow.stream.data.errors import StallError
from rollflow.stream.doctor.diagnosis import Diagnosis
from rollflow.stream.doctor.rules import StallRules
from rollflow.stream.doctor.stacks import stack_of_thread
from rollflow.stream.doctor.waits import READER, Exit, Look, Sign, Wait
from rollflow.stream.doctor.watcher import Watcher
from rollflow.stream.graph.meter import NodeMeter, clock

_KEPT = 101  # times of the reader


class Watched(Protocol):
    """A driver, as the doctor sees it."""

    def look(self) -> Look | None:
        """What every stage does right now; None: it does not run."""
        ...

    def end_stalled(self, error: StallError) -> None:
        """Have the run end with this error. From any thread."""
        ...


class RolloutDoctor:
    """Watches a rollout's ring, its learner pipeline and its reader.

    rules      when and how it speaks
    learner    meter of the learner pipeline
    signs      gives silent faults
    """

    def __init__(self, rules: StallRules, learner: NodeMeter, signs: Callable[[], Sequence[Sign]]) -> None:
        self.rules = rules
        self._learner, self._signs = learner, signs
        self._drive: Watched | None = None
        self._watcher = Watcher(self, rules, self._end_stalled)
        self._times: deque[float] = deque(maxlen=_KEPT)  # seconds for which the reader had each of its last rounds
        self._given = 0  # time when it got the last one, in ns
        self._reader = 0  # its thread

    def begin(self, drive: Watched) -> None:
        """Watch a driver, from before its start on."""
        self._drive, self._reader = drive, get_ident()
        self._watcher.start()

    def end(self) -> None:
        """Watch no more; again does nothing."""
        self._watcher.stop()
        self._drive = None

    def reader_asks(self) -> None:
        """Take note that the reader asks for the next round, in its thread."""
        self._reader = get_ident()
        if self._given:
            self._times.append((clock() - self._given) / 1e9)

    def reader_gets(self) -> None:
        """Take note that the reader gets a round."""
        self._given = clock()

    def diagnose(self) -> Diagnosis:
        """What the rollout waits for right now."""
        return self._watcher.diagnose()

    def look(self) -> Look | None:
        """The look of the driver, with the learner pipeline before the reader; None: it does not run."""
        drive = self._drive
        look = None if drive is None else drive.look()
        if look is None:
            return None
        look = replace(look, noun="fragment", reader=tuple(self._times), notes=tuple(self._signs()))
        since, reader = self._learner.works_since, look.waits[READER]
        if since is None:
            age_s = (clock() - self._given) / 1e9 if self._given and reader.kind == "works" else 0.0
            reader = replace(reader, age_s=age_s, stack=partial(stack_of_thread, self._reader))
            return replace(look, waits={**look.waits, READER: reader})
        learner = Wait(
            self._learner.name,
            "call",
            "makes a batch",
            mark=since,
            age_s=(clock() - since) / 1e9,
            calls=self._learner.items,
            remedy="look at the learner connectors: rollout.learner_pipeline.timers() has the time of each piece",
            stack=partial(stack_of_thread, self._reader),
        )
        reader = replace(reader, kind="waits", doing="waits", on=(learner.name,), mark=since)
        exits = tuple(Exit(READER, each.items, waits=True) if each.party == READER else each for each in look.exits)
        return replace(look, exits=exits, waits={**look.waits, READER: reader, learner.name: learner})

    def _end_stalled(self, error: StallError) -> None:
        if self._drive is not None:
            self._drive.end_stalled(error)
