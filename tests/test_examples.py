"""The programs that a user would write run as they are."""

import ast
import importlib
import json
import re
import runpy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from extras import needs
from served_policies import Sums, policy_of
from websockets.sync.client import connect

from rollflow.policy.serving.request import pack, unpack

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _no_false_alarms(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The doctor tells of no stall in an example, but that another process is awaited."""
    yield
    texts = [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.name == "rollflow.doctor" and record.getMessage().startswith("no ")
    ]
    assert [text for text in texts if not any(who in text for who in ("host", "trainer", "client"))] == []


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


class Learns(NamedTuple):
    """An example that ends once it has learnt something.

    least       its result
    prints      a pattern of all that it prints
    settings    of its constants, so that it takes seconds
    """

    least: float
    prints: str
    settings: dict[str, Any]


RETURN = r"mean return [^\n]*\n"
LEARNS = {
    "cartpole": Learns(475, RETURN, {}),  # what README says; one line: this is no terminal
    "one_hot_frozen_lake": Learns(1, "reached the goal in 100% .*", {"UPDATES": 30}),
    "on_device": Learns(150, RETURN, {"TARGET_RETURN": 150.0}),
    "last_reward": Learns(0.95, "did what the last reward called for in .*", {}),
    # Who sees one observation alone gets to about 45, and so does who remembers nothing.
    "stack_observations": Learns(65, RETURN, {"TARGET_RETURN": 65.0}),
    "r2d2_cartpole": Learns(50, "mean return .*", {"TARGET_RETURN": 50.0, "EVALUATE_EVERY": 1_000, "EPISODES": 20}),
    "adapt_policy": Learns(200, RETURN, {"UPDATES": 25}),
    "remote_rollouts": Learns(80, r".*2 lanes × 32 slots, .*on 2 hosts.* steps, lost: {}\n", {"TARGET_RETURN": 80.0}),
    "external_env": Learns(50, r"mean return .*lost: {}\n", {"TARGET_RETURN": 50.0}),
    "external_env that acts itself": Learns(0, r"mean return .*lost: {}\n", {"MAX_UPDATES": 2, "INFERENCE": "client"}),
    "two_processes": Learns(150, r"mean return .*s: the trainer has ended\n", {"TARGET_RETURN": 150.0}),
    "dqn_cartpole": Learns(100, "mean return .*", {"TARGET_RETURN": 100.0, "EVALUATE_EVERY": 1_000, "MIN_SIZE": 500}),
    "behaviour_cloning": Learns(150, RETURN, {"PASSES": 4, "FRAGMENTS": 5, "EPISODES": 10}),
    "sac_pendulum": Learns(  # by chance about -1,200
        -900, "mean return .*", {"TARGET_RETURN": -900.0, "EVALUATE_EVERY": 800, "EPISODES": 10}
    ),
    # The expert has about 70.
    "fine_tune": Learns(100, "the expert .*", {"TARGET_RETURN": 100.0, "EVALUATE_EVERY": 500, "EPISODES": 20}),
    "minatar_dqn": Learns(1, ".*8 asked for.*", {"MAX_STEPS": 8_000, "EPISODES": 50}),  # by chance about 0.4
}
GOODBYES = {"remote_rollouts": ("the rollout said goodbye", 2), "external_env": ("the rollout has ended", 2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNS)
def test_an_example_learns(name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    program, case = name.split()[0], LEARNS[name]
    if program == "minatar_dqn":
        needs("minatar")
    main = example(program)["main"]
    main.__globals__.update(case.settings)
    assert main() >= case.least
    told = capfd.readouterr()
    assert re.fullmatch(case.prints, told.out, re.DOTALL)
    goodbye, count = GOODBYES.get(program, ("", 0))
    assert told.err.count(goodbye) >= count


@pytest.mark.slow
def test_an_lstm_policy_that_an_adapted_one_bootstraps_plays_for_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert example("bootstrap_policy")["main"]() > 200


@pytest.mark.slow
def test_logits_that_are_ruled_out_are_never_chosen() -> None:
    main = example("manipulated_logits")["main"]
    main.__globals__["UPDATES"] = 10
    assert main() == 0


@pytest.mark.slow
def test_two_agents_learn_to_share_landmarks() -> None:
    main = example("simple_spread")["main"]
    main.__globals__.update(UPDATES=30, NUM_ENVS=32, MINIBATCH=200)  # the whole run gets above -20
    returns = main()
    assert returns["random"] < -35
    assert returns["two policies"] > -38
    assert returns["shared parameters"] > -33


@pytest.mark.slow
def test_tic_tac_toe_is_learnt_by_self_play() -> None:
    main = example("self_play")["main"]
    main.__globals__.update(UPDATES=12, UPDATES_PER_OPPONENT=4)
    first, second = main()  # by chance about 0.3 and -0.3
    assert first > 0.5
    assert second > 0


@pytest.mark.slow
def test_a_host_that_is_killed_is_replaced_by_another(capfd: pytest.CaptureFixture[str]) -> None:
    main = example("remote_hosts")["main"]
    main.__globals__["FRAGMENTS"] = 12
    assert main() == {0, 1, 2, 3, 4, 5}
    told = capfd.readouterr()
    assert "4 lanes × 4 slots, on 2 hosts" in told.out
    assert told.err.count("the rollout said goodbye") == 2


@pytest.mark.slow
def test_two_ranks_of_a_trainer_keep_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    importlib.import_module("ddp_cartpole").main(2, tmp_path)
    one, two = (torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2))
    torch.manual_seed(0)
    begun = example("cartpole")["Policy"]().state_dict()  # rank 0's, which both began with
    assert all(torch.equal(one[name], two[name]) for name in begun)
    assert not any(torch.equal(one[name], value) for name, value in begun.items())


def test_every_cell_of_the_notebook_runs_and_shows_its_picture() -> None:
    cells = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    shown: list[Any] = []
    for cell in cells:
        if cell["cell_type"] == "code":
            *before, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(before, []), "cell", "exec"), names)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
            else:
                exec(compile(ast.Module([last], []), "cell", "exec"), names)
    *pictures, lost = [each for each in shown if each is not None]
    assert [type(each).__name__ for each in pictures] == ["Rollout", "Fragment", "SealedEpisode", "Report"]
    assert all("<" in each._repr_html_() for each in pictures)
    assert lost.keys() <= {"closed"}


def test_a_policy_speaks_openpis_protocol() -> None:
    with example("openpi_server")["serving"](policy_of(Sums), 0) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        address = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        with connect(address) as socket:
            assert unpack(socket.recv())["observation"].startswith("Box(")
            sums = []
            for message in ({"state": np.array([1, 0])}, {"state": np.array([2, 0])}, {"state": [5, 0], "reset": True}):
                socket.send(pack(message))
                answer = unpack(socket.recv())
                sums.append(answer["actions"][0])
                assert answer["server_timing"]["infer_ms"] >= 0
            assert sums == [1.0, 3.0, 5.0]
            socket.send(pack({"state": [1, 2, 3]}))
            assert socket.recv() == "RequestError: observation has shape [3], expected float32[2]"
        with connect(address) as socket:  # another connection is another session
            socket.recv()
            socket.send(pack({"state": [1, 0]}))
            assert unpack(socket.recv())["actions"][0] == 1.0
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "settings", "prints"),
    [
        ("adapt_policy", {"UPDATES": 1}, RETURN),
        ("lstm_cartpole", {"MAX_UPDATES": 1}, "mean return .*"),
        (
            "dqn_cartpole",
            {"MAX_STEPS": 256, "MIN_SIZE": 128, "SAMPLES_PER_INSERT": 4.0},
            r"mean return .*\n.*samples per insert, 4 asked for.*",
        ),
        ("behaviour_cloning", {"NUM_ENVS": 2, "FRAGMENT_LENGTH": 20, "FRAGMENTS": 2, "PASSES": 2}, RETURN),
        ("sac_pendulum", {"MAX_STEPS": 128, "MIN_SIZE": 32, "SAMPLES_PER_INSERT": 4.0}, "mean return -.*"),
        (
            "r2d2_cartpole",
            {"MAX_STEPS": 128, "MIN_SIZE": 256, "SAMPLES_PER_INSERT": 2.0, "SEQUENCES": 4},
            "mean return .*",
        ),
        ("fine_tune", {"MAX_STEPS": 128, "MIN_SIZE": 64, "SAMPLES_PER_INSERT": 4.0, "RECORDED": 10}, "the expert .*"),
    ],
)
def test_an_example_runs_at_a_hundredth_of_its_size(
    name: str,
    settings: dict[str, Any],
    prints: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = example(name)["main"]
    main.__globals__.update(EPISODES=1, **settings)
    main()
    assert re.fullmatch(prints, capsys.readouterr().out, re.DOTALL)
