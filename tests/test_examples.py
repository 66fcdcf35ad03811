"""The programs that a user would write run as they are."""

import runpy
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extras import needs
from served_policies import Sums, policy_of
from websockets.sync.client import connect

from rollflow.policy.serving.items import pack, unpack

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


@pytest.mark.slow
def test_cartpole_runs_at_a_hundredth_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("cartpole")["main"]
    main.__globals__["MAX_UPDATES"] = 4
    main()
    printed = capsys.readouterr().out
    assert printed.startswith("mean return ")
    assert printed.count("\n") == 1  # quiet: this is no terminal


@pytest.mark.slow
def test_cartpole_is_learnt() -> None:
    assert example("cartpole")["main"]() >= 475


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("one_hot_frozen_lake", "reached the goal in "),
        ("last_reward", "did what the last reward called for in "),
        ("stack_observations", "mean return "),
        ("manipulated_logits", "mean return "),
    ],
)
def test_a_connector_of_ones_own_runs_at_a_hundredth_of_its_size(
    name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = example(name)["main"]
    main.__globals__["UPDATES"] = 1
    main()
    assert capsys.readouterr().out.startswith(told)


def test_a_policy_is_adapted_at_a_hundredth_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("adapt_policy")["main"]
    main.__globals__.update(UPDATES=1, EPISODES=1)
    main()
    assert capsys.readouterr().out.startswith("mean return ")


@pytest.mark.slow
def test_an_adapted_policy_plays_as_well_as_it_was_trained() -> None:
    assert example("adapt_policy")["main"]() > 200


@pytest.mark.slow
def test_an_lstm_policy_is_bootstrapped_and_served_at_a_hundredth_of_its_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    main = example("bootstrap_policy")["main"]
    monkeypatch.setitem(main.__globals__["old"].trained.__globals__, "UPDATES", 1)  # of a module that stays imported
    main.__globals__.update(LESSONS=2, UPDATES=2, CLIENTS=2)
    main()
    assert capsys.readouterr().out.startswith("mean return ")


@pytest.mark.slow
def test_an_lstm_policy_that_an_adapted_one_bootstraps_plays_for_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert example("bootstrap_policy")["main"]() > 200


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


def test_the_lstm_runs_at_a_hundredth_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("lstm_cartpole")["main"]
    main.__globals__["MAX_UPDATES"] = 1
    main()
    assert capsys.readouterr().out.startswith("mean return ")


@pytest.mark.slow
def test_two_agents_run_at_a_hundredth_of_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("simple_spread")["main"]
    main.__globals__["UPDATES"] = 1
    assert list(main()) == ["random", "two policies", "shared parameters"]
    assert capsys.readouterr().out.startswith("mean return: random -")


@pytest.mark.slow
def test_self_play_runs_at_a_hundredth_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("self_play")["main"]
    main.__globals__.update(UPDATES=2, UPDATES_PER_OPPONENT=1)
    main()
    assert capsys.readouterr().out.startswith("mean return as either player [")


@pytest.mark.slow
def test_a_host_that_is_killed_is_replaced_by_another(capfd: pytest.CaptureFixture[str]) -> None:
    main = example("remote_hosts")["main"]
    main.__globals__["FRAGMENTS"] = 12
    assert main() == {0, 1, 2, 3, 4, 5}
    told = capfd.readouterr()
    assert "4 lanes × 4 slots, on 2 hosts" in told.out
    assert told.err.count("the rollout said goodbye") == 2


@pytest.mark.slow
def test_rollouts_on_other_hosts_run_at_a_hundredth_of_their_size(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = example("remote_rollouts")["main"]
    main.__globals__["MAX_UPDATES"] = 3
    main()
    told = capfd.readouterr()
    assert "2 lanes × 32 slots, on 2 hosts" in told.out
    assert told.out.splitlines()[-1].endswith("steps, lost: {}")
    assert told.err.count("the rollout said goodbye") == 2


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["server", "client"])
def test_a_game_that_steps_itself_runs_at_a_hundredth_of_its_size(
    inference: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = example("external_env")["main"]
    main.__globals__.update(MAX_UPDATES=2, INFERENCE=inference)
    main()
    told = capfd.readouterr()
    assert told.out.endswith("lost: {}\n")
    assert told.err.count("the rollout has ended") >= 2


@pytest.mark.slow
def test_cartpole_is_learnt_from_a_game_that_steps_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = example("external_env")["main"]
    main.__globals__.update(TARGET_RETURN=150.0)  # by chance about 22; the whole run, of three minutes, gets to 475
    assert main() >= 150


@pytest.mark.slow
def test_cartpole_is_learnt_from_rollouts_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert example("remote_rollouts")["main"]() >= 475


@pytest.mark.slow
def test_a_trainer_in_another_process_runs_at_a_hundredth_of_its_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = example("two_processes")["main"]
    main.__globals__["MAX_UPDATES"] = 3
    assert main() > 0
    assert capsys.readouterr().out.endswith("s: the trainer has ended\n")


@pytest.mark.slow
def test_cartpole_is_learnt_by_a_trainer_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert example("two_processes")["main"]() >= 475


@pytest.mark.slow
def test_two_ranks_of_a_trainer_keep_the_same_weights(tmp_path: Path) -> None:
    program = "import sys, pathlib, ddp_cartpole; ddp_cartpole.main(2, pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT / "examples", check=True, timeout=300)
    one, two = (torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2))
    torch.manual_seed(0)
    begun = example("cartpole")["Policy"]().state_dict()  # rank 0's, which both began with
    assert all(torch.equal(one[name], two[name]) for name in begun)
    assert not any(torch.equal(one[name], value) for name, value in begun.items())


@pytest.mark.slow
def test_connectors_of_ones_own_do_what_they_are_for() -> None:
    assert example("one_hot_frozen_lake")["main"]() == 1.0
    assert example("last_reward")["main"]() > 0.95
    manipulated, stacked = example("manipulated_logits")["main"], example("stack_observations")["main"]
    manipulated.__globals__["UPDATES"] = 100
    assert manipulated() == 0
    stacked.__globals__["TARGET_RETURN"] = 150.0  # the whole run gets to 475
    assert stacked() >= 150  # who sees one observation alone gets to about 45


@pytest.mark.slow
def test_two_agents_learn_to_share_landmarks() -> None:
    main = example("simple_spread")["main"]
    main.__globals__.update(UPDATES=40)  # with all 100 of them both get above -20
    returns = main()
    assert returns["random"] < -35
    assert returns["two policies"] > -30
    assert returns["shared parameters"] > -30


@pytest.mark.slow
def test_tic_tac_toe_is_learnt_by_self_play() -> None:
    main = example("self_play")["main"]
    main.__globals__.update(UPDATES=60, UPDATES_PER_OPPONENT=15)
    first, second = main()  # by chance about 0.3 and -0.3
    assert first > 0.7
    assert second > 0.3


def test_dqn_runs_at_a_hundredth_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("dqn_cartpole")["main"]
    main.__globals__.update(MAX_STEPS=256, MIN_SIZE=128, SAMPLES_PER_INSERT=4.0)
    main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("mean return ")
    assert "samples per insert, 4 asked for" in printed[1]


@pytest.mark.slow
def test_dqn_is_learnt() -> None:
    assert example("dqn_cartpole")["main"]() >= 475


def test_behaviour_is_cloned_at_a_hundredth_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("behaviour_cloning")["main"]
    main.__globals__.update(NUM_ENVS=2, FRAGMENT_LENGTH=20, FRAGMENTS=2, PASSES=2, EPISODES=1)
    main()
    assert capsys.readouterr().out.startswith("mean return ")


@pytest.mark.slow
def test_behaviour_is_cloned_from_a_dataset() -> None:
    assert example("behaviour_cloning")["main"]() >= 475


@pytest.mark.parametrize(
    ("name", "sizes", "told"),
    [
        ("sac_pendulum", {"MIN_SIZE": 32, "SAMPLES_PER_INSERT": 4.0}, "mean return -"),
        ("r2d2_cartpole", {"MIN_SIZE": 256, "SAMPLES_PER_INSERT": 2.0, "SEQUENCES": 4}, "mean return "),
        ("fine_tune", {"MIN_SIZE": 64, "SAMPLES_PER_INSERT": 4.0, "RECORDED": 10}, "the expert "),
    ],
)
def test_learning_from_replay_runs_at_a_hundredth_of_its_size(
    name: str, sizes: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = example(name)["main"]
    main.__globals__.update(MAX_STEPS=128, EPISODES=1, **sizes)
    main()
    assert capsys.readouterr().out.startswith(told)


@pytest.mark.slow
def test_pendulum_is_swung_up_by_sac() -> None:
    assert example("sac_pendulum")["main"]() >= -200


@pytest.mark.slow
def test_cartpole_without_velocities_is_learnt_from_sequences() -> None:
    main = example("r2d2_cartpole")["main"]
    main.__globals__["TARGET_RETURN"] = 120.0  # who remembers nothing gets to about 45; the whole way takes minutes
    assert main() >= 120


@pytest.mark.slow
def test_breakout_of_minatar_is_learnt_by_prioritized_dqn(capsys: pytest.CaptureFixture[str]) -> None:
    needs("minatar")
    main = example("minatar_dqn")["main"]
    main.__globals__.update(MAX_STEPS=20_000, EPISODES=50)
    assert main() >= 1.5  # by chance about 0.4; the whole run gets to about 5
    assert "8 asked for" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_half_offline_data_help_to_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert example("fine_tune")["main"]() >= 475
