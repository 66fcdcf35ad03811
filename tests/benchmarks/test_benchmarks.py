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
    overhead,
    pairs,
    pixels,
    placement,
    scaling,
    seeing,
    serving,
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "measure",
    [
        lambda: cartpole.measure(TINY, vectorized=(4,), plain=(2,)),
        lambda: overhead.measure(TINY, slots=(1,)),
        lambda: seeing.measure(TINY, slots=(1,)),
        lambda: pixels.measure(TINY, slots=(2,)),
        lambda: stragglers.measure(pairs.Sizes(1, 0.1), places=("threads",)),
        lambda: scaling.measure(TINY, axes={"lanes": (1, 2), "pieces": (1,), "sinks": (2,)}),
        lambda: placement.measure(TINY, cases=(("tiny", plain_cartpole, Mlp, 2, 16, ("inline", "threads")),)),
        lambda: beside_peers.measure(TINY),
        lambda: multi_agent.measure(TINY),
        lambda: serving.measure(TINY, batch=4),
    ],
    ids=[
        "cartpole",
        "overhead",
        "seeing",
        "pixels",
        "stragglers",
        "scaling",
        "placement",
        "beside_peers",
        "multi_agent",
        "serving",
    ],
)
def test_every_line_says_what_was_measured(measure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines = measure()
    pairs.tell(lines)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert told == lines
    assert all(line.keys() >= KEYS for line in lines)


@pytest.mark.slow
def test_workers_and_memory_are_measured() -> None:
    lines = two_cores.measure(TINY, cases=(("tiny", plain_cartpole, Mlp, 4),), aims={2: 0.95, 4: 0.75})
    lines += memory.measure(TINY, steps=20_000)
    pairs.show(lines)
    assert [line["workload"] for line in lines] == [
        "tiny, 2 workers",
        "tiny, 4 workers",
        "tiny, 4 workers beside 2",
        "memory, peak",
        "memory, growth",
    ]
    assert all(line.keys() >= KEYS for line in lines)


@pytest.mark.slow
def test_hosts_that_are_started_are_measured() -> None:
    lines = cluster.measure(TINY, hosts=1, slots=2)
    assert [line["workload"] for line in lines[:2]] == [
        "whole rollouts on hosts by processes",
        "starts of hosts by processes (per 1,000 s)",
    ]
    assert all(line.keys() >= KEYS for line in lines)


@pytest.mark.slow
def test_rollouts_with_few_and_with_more_hosts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_rollout_hosts, "ACTIVE", 1)
    monkeypatch.setattr(many_rollout_hosts, "_GATHERED", 2)
    lines = many_rollout_hosts.measure(TINY, hosts=(1, 3))
    assert [line["workload"] for line in lines] == [
        "fragments of 1 hosts of whole rollouts, 1 at work (per CPU s)",
        "fragments of 3 hosts of whole rollouts, 3 at work (per CPU s)",
        "fragments of 1 hosts of whole rollouts, 1 at work (per CPU s)",
        "fragments of 3 hosts of whole rollouts, 1 at work (per CPU s)",
        "fragments of 1 hosts of environments, 1 at work (per CPU s)",
        "fragments of 3 hosts of environments, 1 at work (per CPU s)",
        "fragments of one host with 2 lanes (per CPU s)",
    ]
    assert all(line.keys() >= KEYS for line in lines)


@pytest.mark.slow
def test_trainers_with_few_and_with_more_rollouts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_hosts, "ACTIVE", 1)
    lines = many_hosts.measure(TINY, hosts=(1, 3), weights=100_000)
    assert [line["workload"] for line in lines] == [
        "messages of 1 hosts, all send (per CPU s)",
        "messages of 3 hosts, all send (per CPU s)",
        "messages of 1 hosts, 1 send (per CPU s)",
        "messages of 3 hosts, 1 send (per CPU s)",
        "weights to 3 hosts (MB/s)",
    ]
    assert all(line.keys() >= KEYS for line in lines)


@pytest.mark.slow
def test_ways_to_a_trainer_are_measured() -> None:
    lines = transport.measure(TINY, {"4 KiB": 1 << 12})
    ways = ["shm", "unix", "tcp"]
    queues = ["mp.Queue", "torch's queue"]
    of_fragments = [*ways, *queues, "mp.Queue, whole"]
    assert [line["where"] for line in lines] == [*ways, "copied here", "ring, new tensors", *queues, *of_fragments]
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


def test_without_matplotlib_the_plots_are_left_out_and_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    scaling.draw(LINES, tmp_path / "plots")
    assert capsys.readouterr().err == "plots: left out, matplotlib is not installed here\n"
    assert not (tmp_path / "plots").exists()


def test_the_table_says_which_aims_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    pairs.show([pairs.record("met", 1, [(3.0, 2.0)], aim=1.5), pairs.record("not met", 1, [(2.0, 2.0)], aim=1.5)])
    table = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")]
    verdicts = [line.split()[-1] for line in table if line.startswith(("met", "not met"))]
    assert verdicts == ["met", "missed"]


def test_a_line_without_an_aim_has_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    pairs.show(LINES)
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("scaling")]
    assert table == [
        ["scaling:", "lanes", str(lanes), "64", "inline", f"{1e6 / (20 + lanes):,.0f}"] for lanes in (1, 2, 4)
    ]


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


def test_what_a_quick_run_has_no_time_for_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_pairs_begin_with_either_one_in_turn() -> None:
    order: list[str] = []

    def rate(name: str) -> float:
        order.append(name)
        return 1.0

    assert pairs.in_turns(lambda: rate("ours"), lambda: rate("other"), 2) == [(1.0, 1.0)] * 2
    assert order == ["other", "ours", "ours", "other"]


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


def test_a_program_that_fails_does_not_end_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
