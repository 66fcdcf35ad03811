"""Replay host: a replay that rollouts in other processes write into, and that trainers elsewhere sample from."""

import logging
import ssl
from contextlib import ExitStack
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

from rollflow.nodes.argument_checks import checked_number
from rollflow.nodes.env.remote.remote_envs import Secret, secret_bytes
from rollflow.sinks.replay.checkpoint import CheckpointFolder
from rollflow.sinks.replay.replay import Replay
from rollflow.sinks.replay.sample_server import SampleServer
from rollflow.sinks.trainer.stream import Sources, TrainerStream
from rollflow.stream import wire
from rollflow.stream.data.errors import EnvError, ReplayError, RunError, error_text, shown
from rollflow.stream.graph.node import out_of_group
from rollflow.stream.net.backoff import Reminder
from rollflow.stream.net.transport import check_server_tls

logger = logging.getLogger(__name__)
_LOOK_S = 1.0


class ReplayHost:
    """Serves a replay, in a thread, until its block is left: `with ReplayHost(...) as host: host.wait()`.

        rollouts       where rollouts send their fragments, by `feed` or `TrainerSink`: 'tcp://host:port',
                       'unix:/path', or 'shm:/path'
        trainers       where a `ReplayClient` samples: 'tcp://host:port' or 'unix:/path'
        secret, tls    as for `RemoteEnvs.listen`, of both
        checkpoint     folder of the replay's state; where it has one, the host goes on from it. None: there is none
        every          seconds between two checkpoints
        limits         of frames, times and bytes under way

        rollouts, trainers    addresses, with their ports once the block is entered

    The replay's rate holds across processes: an insert that it holds back is not done with, and its rollout stands
    still; a sample that it holds back is answered later.

    With a checkpoint, a rollout keeps each fragment until a checkpoint has it. After a kill the next host gets what the
    newest checkpoint lacks, each fragment once. Samples and priorities since that checkpoint are not counted. What has
    changed since the last one is copied and written, at first all of it; while it is copied, nothing is inserted and
    nobody is answered. Leaving the block writes one; the rollouts wait for the next host.

    Without a checkpoint, fragments are acknowledged when they are inserted, and the rollouts are told goodbye: what the
    rate still holds back they count as `undelivered`.

    A rollout whose fragments the replay can't take is refused; the others go on. While the host serves the replay, call
    it by a `ReplayClient` alone.

    Raises ValueError for arguments that don't fit, RunError where an address can't be listened on, ReplayError for a
    checkpoint of another replay, and where another host or replay writes to its folder.
    """

    def __init__(
        self,
        replay: Replay,
        *,
        rollouts: str | wire.Address,
        trainers: str | wire.Address,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        checkpoint: str | Path | None = None,
        every: float = 30.0,
        limits: wire.Limits | None = None,
    ) -> None:
        if not isinstance(replay, Replay):
            raise ValueError(f"replay is {shown(replay)}, expected a Replay()")
        every = checked_number("every", every, above=0, most=inf, noun="seconds")
        check_server_tls(tls)
        self.replay = replay
        self.trainers = wire.parse_address(trainers) if isinstance(trainers, str) else trainers
        self._secret, self._tls, self._limits = secret_bytes(secret), tls, limits or wire.Limits()
        wire.check_secret(self.trainers, self._secret)
        self._checkpoint, self._every = None if checkpoint is None else CheckpointFolder(checkpoint), every
        self._stream = TrainerStream(
            rollouts,
            secret=secret,
            tls=tls,
            yields="fragments",
            sources=Sources(None, join_timeout=None),
            ack="auto" if checkpoint is None else "manual",
            limits=limits,
        )
        self._stream.log.holder = type(self).__name__, lambda: str(self.replay.report())
        self.rollouts = self._stream.address
        self._handed = self._stream.state_dict()  # after the last insert
        self._saved: Any = None  # what the newest checkpoint has
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._checkpoint is not None:
                if not self._checkpoint.path.parent.is_dir():
                    text = f"checkpoint is {self._checkpoint.path}, expected a path in a folder that is there"
                    raise ValueError(text)
                stack.enter_context(self._checkpoint.held())
                self._go_on_from(self._checkpoint)
            self._portal = stack.enter_context(start_blocking_portal())
            self._served, self._leaving = self._portal.start_task(self._serve)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        with self._closing:
            if not self._served.done():
                self._portal.call(self._leaving.set)
            failure = self._served.exception()
        if failure is not None and failure is not error:
            raise failure

    def wait(self) -> None:
        """Wait until the host fails, and raise its error; or until a signal's handler raises one."""
        self._served.result()

    # In the thread

    async def _serve(self, *, task_status: TaskStatus[anyio.Event]) -> None:
        with out_of_group(), anyio.CancelScope() as scope:
            async with self._stream:
                await self._serve_with(task_status)
                if self._checkpoint is not None:  # rollouts wait for another host, as after a failure
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()

    async def _serve_with(self, task_status: TaskStatus[anyio.Event]) -> None:
        """Serve with the stream open, until the host is to leave; write a last checkpoint."""
        try:
            server = SampleServer(
                self.replay,
                self.trainers,
                secret=self._secret,
                tls=self._tls,
                limits=self._limits,
                publish=self._stream.publish,
                rollouts=lambda: self._stream.sources,
            )
        except EnvError as error:
            raise RunError(str(error)) from error
        self.rollouts, self.trainers = self._stream.address, server.address
        self.replay.turns.enter_loop()
        leaving = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for part in (
                server.run,
                self.replay.turns.relay,
                self._insert_all,
                self._save_again_and_again,
                self._remind,
            ):
                tasks.start_soon(part)
            task_status.started(leaving)
            await leaving.wait()
            tasks.cancel_scope.cancel()
        await self._save()  # not after an error, which may have come in the middle of an insert

    async def _insert_all(self) -> None:
        async for fragment in self._stream:
            try:
                await self.replay.insert_in_loop(fragment)
            except ReplayError as error:
                self._stream.refuse(str(error))
            except anyio.get_cancelled_exc_class():  # while the rate held it back
                self._stream.put_back()
                raise
            if self._checkpoint is not None:
                self._handed = self._stream.state_dict()
            await anyio.lowlevel.checkpoint()

    async def _remind(self) -> None:
        """Log at growing intervals which side has waited while neither went on."""
        seen, reminder = None, Reminder(monotonic())
        while True:
            await anyio.sleep(_LOOK_S)
            report, now = self.replay.report(), monotonic()
            now_seen = report.waiting, report.inserted, report.sampled
            if now_seen != seen:
                seen, reminder = now_seen, Reminder(now)
            elif report.waiting is not None and reminder.is_due(now):
                names = ", ".join(self._stream.sources) or "none is there"
                logger.warning("waiting for %.0f s: %s; rollouts: %s", now - reminder.since, report, names)

    # Checkpoints

    def _go_on_from(self, folder: CheckpointFolder) -> None:
        if not folder.is_there:
            return
        state = folder.read()
        self.replay.set_state(state)
        self._handed = state.get("stream", self._handed)
        self._stream.load_state_dict(self._handed)
        logger.info("going on from %s: %s", folder.path, self.replay.report())

    async def _save_again_and_again(self) -> None:
        while self._checkpoint is not None:
            await anyio.sleep(self._every)
            await self._save()

    async def _save(self) -> None:
        """Write a checkpoint if there is something new, and acknowledge what it has."""
        report = self.replay.report()
        news = report.inserted, report.sampled, self._handed
        if self._checkpoint is None or news == self._saved:
            return
        handed, folder = self._handed, self._checkpoint
        try:
            state = self.replay.get_state(folder.since()) | {"stream": handed}
            await anyio.to_thread.run_sync(folder.write, state)
        except (OSError, MemoryError) as error:
            text = error_text(error)
            logger.warning("%s can't be written: %s; until it can, nothing is acknowledged", folder.path, text)
            return
        self._saved = news
        self._stream.ack(handed)
