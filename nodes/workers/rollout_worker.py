"""A worker process that does whole rollouts, each of one lane: what runs in it."""

import contextlib
import pickle
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rollflow.nodes.env_to_module import EnvToModule
from rollflow.nodes.environments import Environments
from rollflow.nodes.metrics_logger import MetricsLogger
from rollflow.nodes.module_forward import ModuleForward
from rollflow.nodes.module_to_env import ModuleToEnv
from rollflow.nodes.policy_weights import PolicyWeights
from rollflow.nodes.ring import ring_of, seed_lane
from rollflow.nodes.stepping import step_of
from rollflow.nodes.weights_codec import unpack_weights
from rollflow.nodes.workers.env_worker import LaneServer, described, failure, serve_all
from rollflow.nodes.workers.fragment_codec import FragmentWriter
from rollflow.nodes.workers.frames import Frame, Kind, frame, frame_with, receive_frame
from rollflow.nodes.workers.rollout_link import PROGRESS_BYTES
from rollflow.stream.blocks import SharedBlock
from rollflow.stream.errors import RollflowError
from rollflow.stream.inline_run import InlineRun
from rollflow.stream.lane import Lane
from rollflow.stream.packing import pack, unpack

# Lanes of one process do their first forward passes one after the other: where threads call a mathematical library for
# the first time together, one of them may get results of lower accuracy, and no two runs would be the same.
_first_passes = threading.Lock()
_BEAT_S = 0.1  # how often a lane that waits for another's first pass says that it does


class Closed(BaseException):
    """Raised, in the middle of a fragment, when the other process wants no more of this lane, or has gone."""


class Drained(BaseException):
    """Raised, in the middle of a fragment, when the other process wants what there is of it."""


class OneLane(Environments):
    """The environments of one lane, made already."""

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        self._steps = [step_of(env, is_ours=True)]
        return [env]


class Turns:
    """A gate that lets the lane begin a fragment whenever one is wanted."""

    def __init__(self) -> None:
        self.wanted = 0
        self._changed: Any = None

    def admits(self, lane: Lane) -> bool:
        """Whether the lane may take its next step."""
        if not lane.at_start:
            return True
        self.wanted -= 1
        return self.wanted >= 0

    def watch(self, changed: Any) -> None:
        """Take the function to be called when a fragment is wanted."""
        self._changed = changed

    def want(self) -> None:
        """A fragment is wanted."""
        self.wanted = 1
        self._changed()


class WeightsFrom(PolicyWeights):
    """Newly published weights, as they come over a socket between two forward passes."""

    def __init__(self, module: Any, version: int, server: "RolloutServer") -> None:
        super().__init__(module)
        self._version = version
        self._server = server

    def take(self) -> tuple[int, dict[str, Any]] | None:
        """The newest weights, once."""
        self._server.step_is_done()
        return super().take()

    def put(self, version: int, state: dict[str, Any]) -> None:
        """Have the next pass use these."""
        self._version, self._unused = version, (version, state)


class WorkerForward(ModuleForward):
    """Forward passes, the first of which waits for that of another lane in this process."""

    def __init__(self, module: Any, weights: PolicyWeights, server: "RolloutServer", **how: Any) -> None:
        super().__init__(module, weights, **how)
        self._server: RolloutServer | None = server

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One pass with one version of the weights."""
        if self._server is None:
            return super().forward(batch)
        with self._server.first_pass():
            output = super().forward(batch)
        self._server = None
        return output


class RolloutServer(LaneServer):
    """Serves one lane's socket: gives a fragment for every turn."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._run: InlineRun | None = None
        self._turns = Turns()
        self._metrics = MetricsLogger()

    def serve(self) -> None:
        """Answer frame after frame."""
        with contextlib.suppress(Closed):
            super().serve()

    @contextlib.contextmanager
    def first_pass(self) -> Iterator[None]:
        """Have this lane alone do a forward pass, and say that steps begin after it."""
        self.step_is_done()
        while not _first_passes.acquire(timeout=_BEAT_S):
            self.step_is_done()
        try:
            yield
        finally:
            _first_passes.release()
        self._sock.sendall(frame(Kind.BEGUN))

    def step_is_done(self) -> None:
        """Say how far the lane has come, and take what has come over the socket meanwhile."""
        self._progress[0] = self._lane.num_steps
        self._progress[1] += 1
        while self._poll.poll(0):
            try:
                asked = receive_frame(self._sock)
            except (EOFError, OSError) as error:
                raise Closed from error
            if asked.kind is Kind.CLOSE:
                raise Closed
            if asked.kind is Kind.DRAIN:
                raise Drained
            answer = self._do(asked)
            if answer:
                self._sock.sendall(answer)

    def _do(self, asked: Frame) -> bytes:
        kind = asked.kind
        if kind is Kind.TURN:
            return self._turn()
        if kind is Kind.FREE:
            self._fragments.free(asked.block)
            return b""
        if kind is Kind.WEIGHTS:
            self._weights.put(*unpack_weights(SharedBlock(asked.number, asked.fd).taken().tobytes()))
            return frame(Kind.TAKEN)
        if kind is Kind.STATES:
            states = unpack(SharedBlock(asked.number, asked.fd).taken().tobytes())
            for pipeline, state in zip((self._env_to_module, self._module_to_env), states, strict=True):
                pipeline.set_state(state)
            return b""
        if kind is Kind.SET_UP:
            block = SharedBlock(asked.number, asked.fd).taken()
            self._progress = block[:16].view(np.int64)
            try:
                return self._set_up(pickle.loads(block[PROGRESS_BYTES:].tobytes()))
            except Exception as error:
                self._run = None
                return failure(error, is_refusal=not _is_of_environment(error))
        if kind is Kind.DRAIN:
            return b""  # there is no fragment in the making
        return super()._do(asked)

    def _set_up(self, told: dict[str, Any]) -> bytes:
        assert self._env is not None
        module, seed = told["module"], told["seed"]
        self._env_to_module, self._module_to_env = told["env_to_module"], told["module_to_env"]
        self._first_sequence, self._fragments = told["first_sequence"], FragmentWriter()
        environments = OneLane(
            self._env,
            fragment_length=told["rows"],
            lookback=told["lookback"],
            seed=seed,
            first_lane=told["lane"],
            first_slot=told["first_slot"],
        )
        [self._lane] = environments.lanes
        seed_lane(self._lane, seed)
        self._weights = WeightsFrom(module, told["version"], self)
        context = {"module": module, "explore": told["explore"], "metrics": self._metrics}
        how = {name: told[name] for name in ("explore", "flat", "threads", "compiled")}
        forward = WorkerForward(module, self._weights, self, **how)
        prepare, act = EnvToModule(self._env_to_module, **context), ModuleToEnv(self._module_to_env, **context)
        self._run = InlineRun(ring_of(environments, prepare, forward, act, self._turns))
        self._run.__enter__()
        return b""

    def _turn(self) -> bytes:
        if self._run is None:
            return b""  # it could not be set up, as the other process has been told
        self._turns.want()
        try:
            [(_, fragment)] = self._run.next_outputs()
        except Drained:
            fragment = self._lane.cut()
        except Exception as error:
            return self._lost(error)
        self._send(fragment)
        return b""

    def _lost(self, error: Exception) -> bytes:
        """Give what the lane has made so far, if it was the environment that failed: only its last step is missing."""
        if not _is_of_environment(error):
            return failure(error, is_refusal=True)
        lost = self._lane.lose(f"{type(error).__name__}: {error}")
        if self._lane.at_start:
            return failure(error, lost_steps=lost)
        self._send(self._lane.cut(), failure=described(error), lost_steps=lost)
        self._run = None
        return b""

    def _close_env(self) -> None:
        if self._run is not None:
            self._progress[0] = self._lane.num_steps
        super()._close_env()

    def _send(self, fragment: Any, **more: Any) -> None:
        assert self._run is not None
        fragment.sequence += self._first_sequence
        known = 0 if self._fragments.pool is None else len(self._fragments.pool.blocks)
        index, told = self._fragments.write(fragment)
        assert self._fragments.pool is not None
        for block in self._fragments.pool.blocks[known:]:
            socket.send_fds(self._sock, [frame(Kind.NEW_BLOCK, index, block.size)], [block.fd])
        told["steps"] = self._lane.num_steps
        told["nodes"] = [[node.name, node.items, node.busy_s] for node in self._run.report().nodes]
        states = self._env_to_module.get_state(), self._module_to_env.get_state()
        if any(states):
            told["states"] = states
        if self._metrics.keys():
            told["metrics"] = self._metrics.get_state()
            self._metrics.reset()
        self._sock.sendall(frame_with(Kind.FRAGMENT, pack(told | more, "fragment"), index))


def _is_of_environment(error: Exception) -> bool:
    return "in node 'env'" in getattr(error, "__notes__", ()) and not isinstance(error, RollflowError)


def main(life: int, lanes: Sequence[int]) -> None:
    """Serve the lanes whose sockets have these descriptors, for as long as the pipe `life` is open."""
    serve_all(life, [RolloutServer(socket.socket(fileno=fd)) for fd in lanes])
