"""Cost of being watched: rollouts with the stall doctor, a log, a socket or a trace, beside the same without.

Logs write a row each second; Prometheus is scraped each second, by a process of its own. The update logs a value. A
rollout that is looked at gives `rollflow top`, in a process of its own, a snapshot each second.

Environment and module do nothing, so that what a step costs is rollflow's own; and CartPole with a small network. A
trace's aim is of CartPole: a trace takes some 2 µs of a vector step, and one in which nothing is done has 13 µs.

    python -m benchmarks.seeing [--quick]
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.command import run
from benchmarks.envs import NoopEnv
from benchmarks.loop import FRAGMENT_LENGTH
from benchmarks.pairs import Record, Sizes, in_turns, record, steps_per_s
from benchmarks.policies import Mlp, Noop
from rollflow import Forward, Rollout, Watch
from rollflow.stream.observe.run_socket import FOLDER

SLOTS = (1, 64, 1024)
AIM, LOOKED_AT_AIM, TRACE_AIM = 0.99, 0.98, 0.95
PORT = 9127
LOGS = {
    "TensorBoard": "tensorboard:{folder}/runs",
    "JSON lines": "jsonl:{folder}/run.jsonl",
    "Prometheus": f"prometheus:{PORT}",
}
_SCRAPER = """
import time, urllib.request
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:%d/metrics", timeout=5).read()
    except OSError:
        pass  # no rollout is being measured
    time.sleep(1.0)
"""


_SCRAPE = ("-c", _SCRAPER % PORT)
_LOOK = ("-m", "rollflow.cli.main", "top", "--json")


def measure(sizes: Sizes, slots: tuple[int, ...] = SLOTS) -> list[Record]:
    """Two lines for each number of slots and each way of being watched."""
    lines = []
    for count in slots:
        for work, make, trace_aim in (
            ("nothing done", _noop(count), None),
            ("CartPole", _cartpole(count), TRACE_AIM),
        ):
            lines.append(
                _measured(
                    f"stall doctor, {work}", make, count, sizes, {"watch": Watch(stall_after=5.0)}, "without the doctor"
                )
            )
            for kind, log in LOGS.items():
                with TemporaryDirectory() as folder, _beside(_SCRAPE if kind == "Prometheus" else ()):
                    options = {"log": log.format(folder=folder)}
                    lines.append(_measured(f"{kind}, {work}", make, count, sizes, options, "without a log"))
            with TemporaryDirectory() as folder:
                traced = {"watch": Watch(stall_after=None, trace=f"{folder}/run.trace")}
                lines.append(
                    _measured(f"a trace, {work}", make, count, sizes, traced, "without a trace", aim=trace_aim)
                )
            for kind, command, aim in (("a socket", (), AIM), ("looked at", _LOOK, LOOKED_AT_AIM)):
                with TemporaryDirectory() as folder, _beside(command, {FOLDER: folder}):
                    beside = "without a socket"
                    lines.append(_measured(f"{kind}, {work}", make, count, sizes, {}, beside, runs=folder, aim=aim))
    return lines


@contextmanager
def _beside(command: Sequence[str], variables: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Block in which another process runs a command of Python, if there is one, and prints to nowhere."""
    if not command:
        yield
        return
    environment = {**os.environ, **variables}
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _noop(slots: int) -> Callable[..., Rollout]:
    return lambda **options: Rollout(NoopEnv(slots), module=Noop(slots), **options)


def _cartpole(slots: int) -> Callable[..., Rollout]:
    return lambda **options: Rollout("CartPole-v1", num_envs=slots, module=Mlp(), forward=Forward(flat=True), **options)


def _measured(
    workload: str,
    make: Callable[..., Rollout],
    slots: int,
    sizes: Sizes,
    watched: dict[str, Any],
    beside_name: str,
    *,
    runs: str = "",
    aim: float | None = AIM,
) -> Record:
    """Each is opened for its own measurement alone: a watcher looks at nothing but what it watches.

    runs    folder for the socket of the watched one; "": it has none
    """

    def rate(options: dict[str, Any], folder: str) -> float:
        os.environ[FOLDER] = folder
        with make(**{"watch": Watch(stall_after=None), **options}, fragment_length=FRAGMENT_LENGTH, seed=0) as rollout:
            fragments = iter(rollout.fragments())

            def fragment() -> int:
                next(fragments)
                rollout.log("train/loss", 0.5)
                return FRAGMENT_LENGTH * slots

            fragment()
            return steps_per_s(fragment, sizes.seconds)

    pairs = in_turns(lambda: rate(watched, runs), lambda: rate({}, ""), sizes.rounds + 1)
    del pairs[0]  # to warm up
    return record(workload, slots, pairs, aim=aim, beside_name=beside_name)


if __name__ == "__main__":
    run(measure)
