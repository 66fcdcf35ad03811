"""Watcher: the thread in which the stall doctor looks at a run."""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from rollflow.stream.data.errors import StallError
from rollflow.stream.doctor.diagnosis import Diagnosis
from rollflow.stream.doctor.rules import StallRules
from rollflow.stream.doctor.stack_dumps import answering_dumps
from rollflow.stream.doctor.waits import Look, Probe, Sign
from rollflow.stream.doctor.watch import StallWatch

logger = logging.getLogger("rollflow.doctor")


class Watcher:
    """Looks at a run from a daemon thread, and logs what it finds, from `start` to `stop`.

    probe    gives the looks
    rules    when and how it speaks
    end      method that is called with the error that is to end a stalled run, with `on_stall="raise"`

    Both are held weakly. The thread ends when they are gone.
    """

    def __init__(self, probe: Probe, rules: StallRules, end: Callable[[StallError], Any]) -> None:
        self._probe, self._rules, self._end = weakref.ref(probe), rules, weakref.WeakMethod(end)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._answering = ExitStack()
        self._watch = StallWatch(_WeakProbe(probe), rules)

    def start(self) -> None:
        """Start the thread, where the rules want one."""
        if self._rules.after is None or self._thread is not None or self._stopping.is_set():
            return
        self._answering.enter_context(answering_dumps())
        arguments = (self._watch, self._rules, self._stopping, self._probe, self._end)
        self._thread = threading.Thread(target=_work, args=arguments, name="rollflow doctor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and answer no signal of `rollflow doctor` any more; again does nothing. From any thread."""
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        self._answering.close()

    def diagnose(self) -> Diagnosis:
        """What the run waits for right now."""
        return self._watch.diagnose()


class _WeakProbe:
    """A probe that is held weakly."""

    def __init__(self, probe: Probe) -> None:
        self._probe = weakref.ref(probe)

    def look(self) -> Look | None:
        """The look of the probe; None: it is gone."""
        probe = self._probe()
        return None if probe is None else probe.look()

    def signs(self) -> Sequence[Sign]:
        """The silent faults of the probe; none where it is gone."""
        probe = self._probe()
        return () if probe is None else probe.signs()


def _work(
    watch: StallWatch,
    rules: StallRules,
    stopping: threading.Event,
    probe: "weakref.ref[Any]",
    end: "weakref.WeakMethod[Callable[[StallError], Any]]",
) -> None:
    while not stopping.wait(rules.look_s) and probe() is not None:
        try:
            texts, stall = watch.look()
        except Exception:  # the run goes on without its doctor
            logger.exception("the stall doctor has failed, and looks no more")
            return
        for text in texts:
            logger.warning("%s", text)
        ending = end()
        if stall is not None and rules.on_stall == "raise" and ending is not None:
            ending(StallError(str(stall)).see("stall"))
        del ending
    for text in watch.finish():
        logger.warning("%s", text)
