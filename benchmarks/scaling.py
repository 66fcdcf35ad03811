"""What a vector step costs, against everything that it may grow with; drawn as plots where matplotlib is installed.

Environments and modules do nothing, so that what is seen is rollflow's own. `us` is the cost of one vector step of one
lane, in µs.

python -m benchmarks --only scaling [--quick] [--plots FOLDER]
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio

from benchmarks.command import run
from benchmarks.envs import NoopEnv
from benchmarks.pairs import FULL, Record, Sizes, steps_per_s
from benchmarks.policies import Noop
from rollflow import ConnectorV2, Fragment, Graph, Rollout

AXES: dict[str, tuple[int, ...]] = {
    "slots": (1, 4, 16, 64, 256, 1024, 4096),
    "lanes": (1, 2, 4, 8, 16),
    "fragment length": (8, 32, 128, 512),
    "observation size": (1, 16, 256, 4096),
    "pieces": (0, 1, 2, 4, 8),
    "sinks": (1, 2, 4, 8),
}


class Passing(ConnectorV2):
    """A piece for whole columns that does nothing."""

    columnar = True

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        return batch


def measure(sizes: Sizes, axes: dict[str, tuple[int, ...]] = AXES, plots: Path | None = None) -> list[Record]:
    """A line for each point of every plot; the plots go into a folder, if one is given."""
    lines = []
    for axis, points in axes.items():
        for point in points if sizes == FULL else points[:: max(1, len(points) // 3)]:
            us = _cost_us(axis, point, sizes.seconds)
            lines.append(_line(axis, point, us))
    if plots is not None:
        draw(lines, plots)
    return lines


def draw(lines: list[Record], folder: Path) -> None:
    """One PNG for each axis."""
    if importlib.util.find_spec("matplotlib") is None:
        print("plots: left out, matplotlib is not installed here", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for axis in dict.fromkeys(line["axis"] for line in lines):
        points = [(line["point"], line["us"]) for line in lines if line["axis"] == axis]
        figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
        axes.plot(*zip(*points, strict=True), marker="o")
        axes.set(xlabel=axis, ylabel="µs a vector step", ylim=(0, None))
        if points[0][0]:
            axes.set_xscale("log", base=2)
        figure.savefig(folder / f"{axis.replace(' ', '_')}.png", dpi=120)
        pyplot.close(figure)


def _line(axis: str, point: int, us: float) -> Record:
    slots = point if axis == "slots" else 64
    told = {"workload": f"scaling: {axis} {point}", "slots": slots, "where": "inline", "axis": axis, "point": point}
    beside: Record = {"beside": None, "ratio": None, "aim": None}  # there is nothing that this is to be held against
    return told | {"steps_per_s": round(1e6 / us), **beside, "runs": 1, "us": round(us, 1)}


def _cost_us(axis: str, point: int, seconds: float) -> float:
    settings = {"slots": 64, "lanes": 1, "fragment length": 128, "observation size": 4, "pieces": 0} | {axis: point}
    slots, lanes, length, size, pieces = (settings[name] for name in list(settings)[:5])
    envs = [NoopEnv(slots, size) for _ in range(lanes)]
    connector: Any = lambda env: _passing(pieces)  # noqa: E731
    options: Any = {"fragment_length": length, "env_to_module_connector": connector, "seed": 0}
    if axis == "sinks":
        return _cost_with_sinks(Rollout(envs, module=Noop(slots), num_fragments=100, **options), point, 100 * length)
    with Rollout(envs, module=Noop(slots), **options) as rollout:
        fragments = iter(rollout.fragments())

        def step() -> int:
            next(fragments)
            return length

        steps_per_s(step, seconds / 4)
        return 1e6 / steps_per_s(step, seconds)


def _cost_with_sinks(rollout: Rollout, sinks: int, steps: int) -> float:
    graph = Graph("fan-out")
    graph.add(rollout=rollout)
    for number in range(sinks):
        graph.add(**{f"sink{number}": _sink()})
        graph.connect("rollout.fragments", f"sink{number}", capacity=2)

    async def run_through() -> float:
        async with graph.run() as running:
            began = perf_counter()
            await running.wait()
            return (perf_counter() - began) / steps * 1e6

    return anyio.run(run_through)


def _sink() -> Callable[[Fragment], None]:
    def take(fragment: Fragment) -> None:
        fragment.column("rewards").sum()

    return take


def _passing(count: int) -> list[ConnectorV2]:
    pieces: list[ConnectorV2] = [Passing() for _ in range(count)]
    for number, piece in enumerate(pieces):
        piece.name = f"Passing {number}"
    return pieces


if __name__ == "__main__":
    run(measure)
