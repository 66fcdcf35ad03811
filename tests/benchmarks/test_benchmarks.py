"""The benchmarks run, and say what they promise to say; how fast anything is is not looked at."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # they are not installed

from benchmarks import (
    __main__ as command,
    beside_peers,
    cartpole,
    cluster,
    many_hosts,
    many_rollout_hosts,
    memory,
    multi_agent,
    on_device,
    overhead,
    pairs,
    pixels,
    placement,
    scaling,
    seeing,
    serving,
    sources,
    stragglers,
    transport,
    two_cores,
)
from benchmarks.envs import plain_cartpole
from benchmarks.loop import FRAGMENT_LENGTH, Loop, side_by_side
from benchmarks.policies import Mlp
from rollflow import Rollout

TINY = pairs.Sizes(1, 0.01)
KEYS = {"workload", "slots", "where", "steps_per_s", "beside", "ratio", "aim", "runs"}


MEASURES: dict[str, Any] = {
    "beside_peers": lambda: beside_peers.measure(TINY),
    "cartpole": lambda: cartpole.measure(TINY, vectorized=(4,), plain=(2,)),
    "cluster": lambda: cluster.measure(TINY, hosts=1, slots=2),
    "many_hosts": lambda: many_hosts.measure(TINY, hosts=(1, 3), weights=100_000),
    "many_rollout_hosts": lambda: many_rollout_hosts.measure(TINY, hosts=(1, 3)),
    "memory": lambda: memory.measure(TINY, steps=20_000),
    "multi_agent": lambda: multi_agent.measure(TINY),
    "on_device": lambda: on_device.measure(TINY, slots=(8,)),
    "overhead": lambda: overhead.measure(TINY, slots=(1,)),
    "pixels": lambda: pixels.measure(TINY, slots=(2,)),
    "placement": lambda: placement.measure(TINY, cases=(("tiny", plain_cartpole, Mlp, 2, 16, ("inline", "threads")),)),
    "scaling": lambda: scaling.measure(TINY, axes={"lanes": (1, 2), "pieces": (1,), "sinks": (2,)}),
    "seeing": lambda: seeing.measure(TINY, slots=(1,)),
    "serving": lambda: serving.measure(TINY, batch=4),
    "sources": lambda: sources.measure(TINY),
    "stragglers": lambda: stragglers.measure(pairs.Sizes(1, 0.1), places=("threads",)),
    "transport": lambda: transport.measure(TINY, {"4 KiB": 1 << 12}, schemes=["unix"]),
    "two_cores": lambda: two_cores.measure(TINY, cases=(("tiny", plain_cartpole, Mlp, 4),), aims={2: 0.95, 4: 0.75}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURES)
def test_every_line_says_what_was_measured(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (many_hosts, many_rollout_hosts):
        monkeypatch.setattr(module, "ACTIVE", 1)
    monkeypatch.setattr(many_rollout_hosts, "_GATHERED", 2)
    lines = MEASURES[name]()
    pairs.tell(lines)
    pairs.show(lines)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert told == lines
    assert all(line.keys() >= KEYS for line in lines)


@pytest.mark.slow
def test_the_loop_and_rollflow_make_batches_of_one_shape() -> None:
    loop = Loop(side_by_side(plain_cartpole, 3), Mlp())
    assert loop.fragment() == 3 * FRAGMENT_LENGTH
    with Rollout(plain_cartpole, module=Mlp(), num_envs=3, fragment_length=FRAGMENT_LENGTH, seed=0) as rollout:
        batch = next(iter(rollout.batches()))
    names = {"logp": "action_logp", "values": "vf_preds"}
    for name, column in loop.batch.items():
        ours = batch[names.get(name, name)]
        assert (ours.shape, ours.dtype) == (column.shape, column.dtype), name


LINES = [scaling._line("lanes", lanes, 20.0 + lanes) for lanes in (1, 2, 4)]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib, of the extra bench, is not installed")
def test_plots_are_drawn_where_matplotlib_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaling.draw(LINES, tmp_path / "plots")
    [drawn] = (tmp_path / "plots").iterdir()
    assert drawn.name == "lanes.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == ""


def test_the_table_says_which_aims_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    pairs.show([pairs.record("met", 1, [(3.0, 2.0)], aim=1.5), pairs.record("not met", 1, [(2.0, 2.0)], aim=1.5)])
    table = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")]
    verdicts = [line.split()[-1] for line in table if line.startswith(("met", "not met"))]
    assert verdicts == ["met", "missed"]


def test_the_command_measures_what_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(scaling, "measure", lambda sizes, plots: asked.append((sizes, plots)) or [])
    command.main(["--quick", "--only", "scaling", "--plots", str(tmp_path)])
    assert asked == [(pairs.QUICK, tmp_path)]
    with pytest.raises(SystemExit):
        command.main(["--only", "sclaing"])
    assert "no such benchmark: sclaing; expected cartpole" in capsys.readouterr().err


def test_what_a_quick_run_skips_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def takes_long(sizes: Any) -> Any:
        now[0] += command.QUICK_BEGIN_S + 1
        return [LINES[0]]

    monkeypatch.setattr(command, "monotonic", lambda: now[0])
    for program in (pixels, overhead):
        monkeypatch.setattr(program, "measure", takes_long)
    command.main(["--quick", "--only", "pixels,overhead"])
    assert "left out, 360 s were over: overhead" in capsys.readouterr().err
    command.main(["--only", "pixels,overhead"])
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize("dropped", [0, 3])
def test_the_first_batches_of_a_rollout_are_not_counted(dropped: int) -> None:
    given: list[int] = []

    class Counted:
        def batches(self) -> Any:
            for number in range(100):
                given.append(number)
                yield {"obs": [0] * 5}

    assert pairs.in_steady_state(Counted(), 0.0, dropped=dropped) == 0.0  # type: ignore[arg-type]
    assert len(given) == dropped


def test_a_failing_program_ends_no_others(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(sizes: Any) -> Any:
        raise ZeroDivisionError("no figures")

    monkeypatch.setattr(pixels, "measure", fails)
    monkeypatch.setattr(overhead, "measure", lambda sizes: [LINES[0]])
    with pytest.raises(SystemExit, match="failed: pixels"):
        command.main(["--quick", "--only", "pixels,overhead"])
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[0]) == LINES[0]
    assert "no figures" in told.err
    assert "overhead took" in told.err


def test_rollouts_on_a_device_wait_for_nothing_and_give_what_those_of_arrays_do() -> None:
    assert on_device.check("cpu", slots=4, rows=4)
