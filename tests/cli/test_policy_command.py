"""`rollflow policy` and `rollflow record`: saved policies are shown, checked, exported, and play into a dataset."""

import signal
import subprocess
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving_process
from command_errors import Says
from drawn_policies import drawn_policy
from extras import needs
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from numbered_module import NumberedEnv, NumberedModule

from rollflow import DatasetSink, DatasetSource, DefaultModelConfig, FrameStacking, MeanStdFilter, Policy, Rollout
from rollflow.cli.main import main
from rollflow.cli.record import record_episodes
from rollflow.policy import OnnxPolicy
from rollflow.stream.data.tree import equal_trees


def save(path: Path, pieces: str = "filter") -> Policy:
    """Save a policy of a rollout over random environments."""
    policy = drawn_policy("box", pieces)
    policy.trained_on = {"policy_version": 1}
    policy.save(path)
    return policy


def test_show_says_what_a_policy_is(tmp_path: Path, shown: Says) -> None:
    save(tmp_path / "p")
    text = shown("policy", "show", tmp_path / "p")
    assert "observations  Box(-2.0, 2.0, (3,), float32)\nactions       Discrete(4)\n" in text
    assert "module        rollflow.DefaultModule\n" in text
    assert "env_to_module MeanStdFilter → AddObservationsFromEpisodesToBatch → " in text
    assert "trained_on    policy_version 1\n" in text


def test_check_loads_a_policy_or_says_why_it_can_not(tmp_path: Path, refused: Says, shown: Says) -> None:
    save(tmp_path / "p", "listed")
    assert "'drawn_policies:shifted' is not allowed to be imported" in refused("policy", "check", tmp_path / "p")
    assert "does what it did when it was saved" in shown("policy", "check", tmp_path / "p", "--allow", "drawn_policies")


@pytest.mark.slow
def test_export_writes_an_onnx_program(tmp_path: Path, refused: Says, shown: Says) -> None:
    needs("onnx", "onnxruntime", "onnxscript")
    policy = save(tmp_path / "p", "all")
    assert "takes the likeliest actions" in shown("policy", "export", tmp_path / "p", "--onnx", tmp_path / "p.onnx")
    program = OnnxPolicy.load(tmp_path / "p.onnx")
    for step in range(5):
        observation = np.full(3, step / 4, np.float32)
        assert program.act(observation) == policy.act(observation)
    save(tmp_path / "q", "listed")
    command = ["policy", "export", str(tmp_path / "q"), "--onnx", str(tmp_path / "q.onnx"), "--allow", "drawn_policies"]
    assert "has no tensor form" in refused(*command)
    assert not (tmp_path / "q.onnx").exists()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved policy with a memory, and with pieces that have learnt something."""
    path = tmp_path_factory.mktemp("policy") / "cartpole"
    options: Any = {"model_config": DefaultModelConfig(fcnet_hiddens=(8,), use_lstm=True), "seed": 0}
    options["env_to_module_connector"] = lambda env: [MeanStdFilter(), FrameStacking(num_frames=2)]
    with Rollout("CartPole-v1", num_envs=2, fragment_length=32, num_fragments=2, **options) as rollout:
        list(rollout.fragments())
        rollout.save_policy(path)
    return path


def command(policy: Path, out: Path, *options: str, episodes: int = 7) -> list[str]:
    needed = ["--env", "CartPole-v1", "--policy", str(policy), "--episodes", str(episodes), "--out", str(out)]
    return ["record", *needed, *options]


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", ["1", "3", "20"])
def test_so_many_whole_episodes_are_recorded_and_again_by_the_seed(
    num_envs: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "other"):
        assert main(command(policy, tmp_path / name, "--num-envs", num_envs, "--seed", "5")) == 0
    one, other = (list(DatasetSource(tmp_path / name).episodes()) for name in ("one", "other"))
    assert len(one) == len(other) == 7
    for first, second in zip(one, other, strict=True):
        assert first.id_ == second.id_
        assert first.is_done
        assert (first.t_started, first.custom_data) == (0, {})
        assert equal_trees(first.get_observations(), second.get_observations())
        assert equal_trees(first.get_actions(), second.get_actions())
    assert sum(map(len, one)) == DatasetSource(tmp_path / "one").num_steps
    (run,) = DatasetSource(tmp_path / "one").description["runs"]
    assert (run["rollout"]["env"], run["rollout"]["seed"]) == ("CartPole-v1", 5)
    assert run["metadata"]["policy"] == str(policy)
    assert f"{tmp_path}/other has {sum(map(len, other))} steps more, with seed 5" in capsys.readouterr().out


def test_the_policy_acts_as_it_was_saved(policy: Path, tmp_path: Path) -> None:
    assert main(command(policy, tmp_path / "data", "--num-envs", "1", episodes=2)) == 0
    acting = Policy.load(policy)
    piece = next(iter(acting.env_to_module))
    stats = piece.get_state()
    for episode in DatasetSource(tmp_path / "data").episodes():
        logits = episode.get_extra_model_outputs("action_dist_inputs")
        assert episode.get_actions().tolist() == np.argmax(logits, -1).tolist()  # the likeliest
    assert equal_trees(stats, next(iter(Policy.load(policy).env_to_module)).get_state())


@pytest.mark.parametrize("names", [[], ["action_logp", "action_dist_inputs"]])
def test_only_the_named_outputs_are_written(names: list[str], policy: Path, tmp_path: Path) -> None:
    assert main(command(policy, tmp_path / "data", "--extra", *names, episodes=1)) == 0
    always = {"obs", "actions", "rewards", "terminateds", "truncateds", "policy_version"}
    assert DatasetSource(tmp_path / "data").columns.keys() == always | set(names)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_slots_have_equal_shares_of_their_first_episodes(mode: str, tmp_path: Path) -> None:
    makers = [lambda slot=slot: NumberedEnv(slot, lengths=(1, 6)) for slot in range(3)]
    with (
        Rollout(makers, module=NumberedModule(), autoreset_mode=mode, fragment_length=4, seed=0) as rollout,
        DatasetSink(tmp_path) as sink,
    ):
        assert [*record_episodes(rollout, sink, 8)][-1] == 8
    episodes = list(DatasetSource(tmp_path).episodes())
    found = sorted(tuple(episode.get_observations()[0].tolist()) for episode in episodes)
    assert found == [(slot, number, 0) for slot in range(3) for number in range(3) if (slot, number) != (2, 2)]
    for episode in episodes:
        slot, number, _ = episode.get_observations()[0].tolist()
        steps = range(len(episode) + 1)
        assert episode.get_observations().tolist() == [[slot, number, step] for step in steps]
        assert episode.is_done
        assert not episode.custom_data


def test_steps_that_an_environment_that_raises_has_lost_are_told(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = CartPoleVectorEnv.step, count()

    def raises(env: Any, action: Any) -> Any:
        if next(calls) == 150:
            raise ZeroDivisionError("no more")
        return step(env, action)

    monkeypatch.setattr(CartPoleVectorEnv, "step", raises)
    with pytest.raises(ZeroDivisionError):
        main(command(policy, tmp_path / "data", "--num-envs", "2", episodes=1000))
    printed = capsys.readouterr()
    there = DatasetSource(tmp_path / "data").num_steps
    assert f"{tmp_path}/data has {there} steps more" in printed.out
    lost = int(printed.err.split()[0])
    assert f"{lost} steps of the fragment that was being made are not in it" in printed.err
    assert 2 * 140 < there + lost <= 2 * 150  # the others were resets


@pytest.mark.slow
def test_an_interrupt_leaves_what_was_played(policy: Path, tmp_path: Path) -> None:
    arguments = command(policy, tmp_path / "data", "--num-envs", "2", episodes=10**7)
    with serving_process.command(*arguments, stdout=subprocess.PIPE) as process:
        while not list(tmp_path.glob("data/steps/.*.part")):  # a fragment is being written
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    source = DatasetSource(tmp_path / "data")
    assert f"{tmp_path}/data has {source.num_steps} steps more" in printed
    assert sum(map(len, source.episodes())) == source.num_steps > 0
    assert main(["dataset", "check", str(tmp_path / "data")]) == 0
