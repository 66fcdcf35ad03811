"""RunDoctor: the stall doctor of a run on an event loop."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from rollflow.stream.data.errors import StallError
from rollflow.stream.graph.looks import look_of_run
from rollflow.stream.graph.meter import clock
from rollflow.stream.graph.node_errors import ending_quietly
from rollflow.stream.graph.run_snapshot import run_snapshot
from rollflow.stream.graph.tracing import Traceable, Tracing
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.observe.diagnosis import Diagnosis
from rollflow.stream.observe.run_socket import RunSocket
from rollflow.stream.observe.stacks import debugged, stack_lines, stack_of_thread
from rollflow.stream.observe.waits import Look, Sign, Wait
from rollflow.stream.observe.watch import StallRules, Watcher

if TYPE_CHECKING:
    from rollflow.stream.graph.run import Run

_LOOKS = 3  # that find no sign of life: one alone may come late itself
_LOOP = "the event loop"
_REMEDY = "all its tasks stand still; await there, or do it in a thread, by anyio.to_thread.run_sync"


class RunDoctor:
    """Watches a run from a thread, ends it where it is stalled and the rules say so, and shows it to who asks.

    run        that is watched
    rules      when and how it speaks
    watches    whether it has a thread that looks, and a socket; without them it only ends the run when it is asked to

    trace_to   file for a trace, to be set before the start; None: there is one only when it is asked for
    """

    def __init__(self, run: "Run", rules: StallRules, *, watches: bool) -> None:
        self._run: Run = weakref.proxy(run)  # it holds its doctor
        self._rules, self._watches = rules, watches
        self._watcher = Watcher(self, rules, self.end_stalled)
        self.trace_to: str | PathLike[str] | None = None
        self._tracing = Tracing(self._with_reader)
        self._socket = RunSocket(self.snapshot, self._tracing.serve)
        self._bell: Wakeup | None = None
        self._error: StallError | None = None
        self._asked, self._answered = 1, 0  # signs of life of the event loop; the first is that it begins
        self._asked_at, self._looks = 0, 0  # when it was asked for the last one, in ns, and looks since then
        self._looked_at = 0  # when the last of these was, in ns
        self._holders: list[str] = []  # asynchronous nodes that ran at that look

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Begin, with the run's tasks. In the event loop."""
        if self._rules.after is not None:
            self._bell = Wakeup()
            tasks.start_soon(ending_quietly, partial(self._answer, self._bell))
        self._tracing.begin(self.trace_to)
        if self._watches:
            self._watcher.start()
            self._socket.start()

    def stop(self) -> None:
        """End the thread. Once the tasks have ended."""
        self._socket.stop()
        self._watcher.stop()
        self._tracing.end()
        if self._bell is not None:
            self._bell.close()
        self._error = None  # whose traceback refers to this

    def look(self) -> Look | None:
        """What every task does right now; None: the run has ended."""
        if self._run.has_ended:
            return None
        self._listen()
        look = look_of_run(self._run)
        return self._behind_loop(look) if self._looks > 1 else look

    def signs(self) -> Sequence[Sign]:
        """Silent faults of composite nodes, and of the event loop."""
        found = [(prefix, each) for prefix, whole in self._wholes("signs") for each in whole.signs()]
        of_nodes = [Sign(f"{prefix} {sign.kind}", f"{prefix}: {sign.text}") for prefix, sign in found]
        return *of_nodes, *self._signs_of_loop()

    def diagnose(self) -> Diagnosis:
        """What the run waits for right now."""
        return self._watcher.diagnose()

    def snapshot(self) -> dict[str, Any]:
        """What there is to see of the run, with a part for each composite node that shows itself."""
        graph = self._run.graph
        return {
            "kind": "graph",
            "name": graph.name,
            **run_snapshot(graph, self._run.report(), self.look(), self.diagnose()),
            "parts": {name: whole.snapshot() for name, whole in self._wholes("snapshot")},
        }

    def end_stalled(self, error: StallError) -> None:
        """Have the run end with this error, as soon as its event loop comes to it. From any thread."""
        if self._bell is not None:
            self._error = error
            self._bell.ring()

    @property
    def traceable(self) -> Traceable:
        """Graph, meters of its nodes and chains, for a trace."""
        return Traceable(self._run.graph, self._run.meters.values(), self._run.chains)

    def _with_reader(self) -> Traceable:
        found = self.traceable
        return found._replace(meters=[*found.meters, self._run.caller])

    def _wholes(self, method: str) -> list[tuple[str, Any]]:
        """The composite nodes that have a method, by their names."""
        wholes = self._run.graph.wholes.items()
        return [(prefix.rstrip("/"), whole) for prefix, whole in wholes if hasattr(whole, method)]

    def _listen(self) -> None:
        """Count a look at which the event loop has given no sign of life; ask it for the next one where it has.

        Nodes that are functions, and a reader that works, may hold it up: those who wait for them are watched for
        stalls.
        """
        now, run = clock(), self._run
        if self._bell is None or now - self._looked_at < self._rules.look_s * 5e8:  # another thread's diagnosis
            return
        self._looked_at = now
        self._holders = [name for name, at in run.at.copy().items() if getattr(at, "cr_running", False)]
        may_hold = any(chain.mark[1] >= 0 for chain in run.chains) or (
            bool(run.graph.outputs) and not self._holders and not run.caller.is_waiting
        )
        if not may_hold and self._answered not in (0, self._asked):
            self._looks += 1
            return
        self._asked_at, self._looks = now, 0
        if self._answered == self._asked:
            self._asked += 1
            self._bell.ring()

    @property
    def _holder(self) -> str:
        """What holds up the event loop, in words."""
        return ", ".join(self._holders) or "a task or a callback"

    def _behind_loop(self, look: Look) -> Look:
        """The look of a run whose event loop is held up: whoever waits at an exit waits for that."""
        held = Wait(
            _LOOP,
            "call",
            f"is held up by {self._holder}",
            mark=self._asked_at,
            age_s=(clock() - self._asked_at) / 1e9,
            calls=self._answered,
            remedy=_REMEDY,
            stack=partial(stack_of_thread, self._run.thread),
        )
        behind = {
            each.party: replace(look.waits[each.party], on=(_LOOP,))
            for each in look.exits
            if each.waits and look.waits[each.party].kind == "waits"
        }
        return replace(look, waits={**look.waits, **behind, _LOOP: held})

    def _signs_of_loop(self) -> Iterator[Sign]:
        """Code that holds up the event loop."""
        held_s = (clock() - self._asked_at) / 1e9
        if self._looks >= _LOOKS and self._rules.after is not None and held_s >= self._rules.after / 2:
            stack = stack_of_thread(self._run.thread)
            if not debugged([stack]):
                text = f"{self._holder} holds up the event loop since {held_s:.1f} s"
                yield Sign("event loop", "\n".join([f"{text}: {_REMEDY}", *stack_lines(stack)]))

    async def _answer(self, bell: Wakeup) -> None:
        """Give signs of life, until a stall is to end the run."""
        while self._error is None:
            self._answered = self._asked
            await anyio.wait_readable(bell.fileno())
            bell.silence()
        self._run.fail(self._error)
        raise self._error
