"""The programs that a user would write run as they are, and the README's do."""

import runpy
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from remote_hosts import hosting
from torch import nn

from rollflow.nodes import EnvHost, RLModule, Rollout, RolloutHost

ROOT = Path(__file__).parent.parent


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def test_cartpole_runs_at_a_hundredth_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("cartpole")["main"]
    main.__globals__["MAX_UPDATES"] = 4
    main()
    printed = capsys.readouterr().out
    assert printed.startswith("mean return ")
    assert printed.count("\n") == 1  # quiet: this is no terminal


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_is_learnt(seed: int) -> None:
    assert example("cartpole")["main"](seed) >= 475


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


def test_the_lstm_runs_at_a_hundredth_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("lstm_cartpole")["main"]
    main.__globals__["MAX_UPDATES"] = 1
    main()
    assert capsys.readouterr().out.startswith("mean return ")


def test_two_agents_run_at_a_hundredth_of_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("simple_spread")["main"]
    main.__globals__["UPDATES"] = 1
    assert list(main()) == ["random", "two policies", "shared parameters"]
    assert capsys.readouterr().out.startswith("mean return: random -")


def test_self_play_runs_at_a_hundredth_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("self_play")["main"]
    main.__globals__.update(UPDATES=2, UPDATES_PER_OPPONENT=1)
    main()
    assert capsys.readouterr().out.startswith("mean return as either player [")


def test_a_host_that_is_killed_is_replaced_by_another(capfd: pytest.CaptureFixture[str]) -> None:
    main = example("remote_hosts")["main"]
    main.__globals__["FRAGMENTS"] = 12
    assert main() == {0, 1, 2, 3, 4, 5}
    told = capfd.readouterr()
    assert "4 lanes × 4 slots, on 2 hosts" in told.out
    assert told.err.count("the rollout said goodbye") == 2


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
def test_cartpole_is_learnt_from_rollouts_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert example("remote_rollouts")["main"]() >= 475


def test_a_trainer_in_another_process_runs_at_a_hundredth_of_its_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = example("two_processes")["main"]
    main.__globals__["MAX_UPDATES"] = 3
    assert main() > 0
    assert capsys.readouterr().out.endswith("s: the trainer has ended\n")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_is_learnt_by_a_trainer_in_another_process(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert example("two_processes")["main"](seed) >= 475


def test_a_script_with_a_data_loader_runs_at_a_hundredth_of_its_size(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = example("dataloader_trainer")["main"]
    main.__globals__["UPDATES"] = 2
    main()
    told = capfd.readouterr()
    assert told.out.splitlines()[-1].endswith("from 2 rollouts")
    assert told.err.count("the trainer said goodbye: the trainer has ended\n") >= 2


@pytest.mark.slow
def test_cartpole_is_learnt_from_a_data_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert example("dataloader_trainer")["main"]() >= 300


@pytest.mark.slow
def test_connectors_of_ones_own_do_what_they_are_for() -> None:
    assert example("one_hot_frozen_lake")["main"]() == 1.0
    assert example("last_reward")["main"]() > 0.95
    assert example("manipulated_logits")["main"]() == 0
    assert example("stack_observations")["main"]() > 200  # who sees one observation alone gets to about 45


@pytest.mark.slow
def test_cartpole_without_velocities_is_learnt_by_an_lstm() -> None:
    assert example("lstm_cartpole")["main"]() >= 475


@pytest.mark.slow
def test_two_agents_learn_to_share_landmarks() -> None:
    returns = example("simple_spread")["main"]()
    assert returns["random"] < -35
    assert returns["two policies"] > -20
    assert returns["shared parameters"] > -20


@pytest.mark.slow
def test_tic_tac_toe_is_learnt_by_self_play() -> None:
    first, second = example("self_play")["main"]()  # by chance about 0.3 and -0.3
    assert first > 0.7
    assert second > 0.3


class Policy(RLModule):
    """For the README's programs, whatever the size of the observation."""

    def setup(self) -> None:
        self.heads = nn.LazyLinear(3)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        output = self.heads(batch["obs"].float())
        return {"action_dist_inputs": output[:, :2], "vf_preds": output[:, 2]}


class Enough(Exception):
    """Raised to leave a program that would go on for ever."""


def readme_programs() -> list[str]:
    text = (ROOT / "README.md").read_text()
    return [block.split("```")[0] for block in text.split("```python\n")[1:]]


@pytest.mark.parametrize(("name", "kind"), [("RemoteEnvs", EnvHost), ("RemoteRollouts", RolloutHost)])
def test_the_readmes_programs_over_other_hosts_run(
    name: str, kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [program] = [program for program in readme_programs() if name in program]
    address = f"unix:{tmp_path}/learner"
    program = program.replace("tcp://0.0.0.0:7010", address).replace("=128", "=8, num_fragments=2")
    (tmp_path / "key").write_text("open sesame\n")
    monkeypatch.chdir(tmp_path)
    with hosting(address, "CartPole-v1", kind=kind, num_envs=4, lanes=2, secret="open sesame"):
        names: dict[str, Any] = {}
        exec(program, names)
    assert 4 * 8 < names["rollout"].num_steps <= 4 * 8 * 2


def test_the_readmes_programs_with_a_trainer_elsewhere_run(tmp_path: Path) -> None:
    [trains], [feeds], [draws] = (
        [program for program in readme_programs() if words in program]
        for words in ("TrainerStream(", "feed(Rollout(", "wait_goodbye")
    )
    policy, batches, rollouts = Policy(), list[Any](), list[Rollout]()
    policy({"obs": torch.zeros(1, 4)})

    def made(env: str = "CartPole-v1", **options: Any) -> Rollout:
        ends = {"num_envs": 4, "fragment_length": 8, "num_fragments": 3}
        rollouts.append(Rollout(env, **{"module": deepcopy(policy), **options, **ends}))
        return rollouts[-1]

    def run(program: str) -> None:
        names = {"secret": "open sesame", "policy": policy, "update": lambda _, batch: batches.append(batch)}
        names |= {"Rollout": made, "Policy": lambda observation_space, action_space: deepcopy(policy)}
        names |= {"rollout": made() if program == draws else None}
        exec(program.replace("tcp://0.0.0.0:7020", address).replace("tcp://trainer:7020", address), names)
        if program == draws:
            anyio.run(names["main"])

    address = f"unix:{tmp_path}/trainer"
    with ThreadPoolExecutor() as threads:
        for program in (feeds, draws):
            feeding = threads.submit(run, program)
            run(trains)
            feeding.result(60)
    assert sum(len(batch["obs"]) for batch in batches) == sum(rollout.num_steps for rollout in rollouts) > 0


def test_the_readmes_programs_with_a_data_loader_and_a_child_run() -> None:
    [loader] = [program for program in readme_programs() if ".loader(" in program]
    [child] = [program for program in readme_programs() if "TrainerProcess" in program]

    def train(stream: Any, policy: Any) -> int:
        batches: list[Any] = []
        exec(loader, {"stream": stream, "policy": policy, "update": lambda policy, batch: batches.append(batch)})
        return len(batches)

    rollout = Rollout("CartPole-v1", num_envs=4, fragment_length=8, num_fragments=3, seed=0)
    names: dict[str, Any] = {"rollout": rollout, "policy": rollout.module, "train": train}
    exec(child, names)
    assert names["trainer"].result == 3


def test_the_readmes_program_with_several_agents_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [program] = [program for program in readme_programs() if "MultiAgentRollout" in program]
    names: dict[str, Any] = {}
    exec(program, names)
    assert {name: len(batch["obs"]) for name, batch in names["batches"].items()} == {
        "agent_0": 16 * 32,
        "default_policy": 2 * 16 * 32,
    }
    assert "torch.Size([512, 18])" in capsys.readouterr().out


@pytest.mark.parametrize("number", range(6))
def test_the_readmes_programs_run(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batches = Policy(), []
    policy({"obs": torch.zeros(1, 4)})
    publish = Rollout.publish

    def publish_thrice(self: Rollout, weights: Any) -> int:
        version = publish(self, weights)
        if version == 3:
            raise Enough
        return version

    def update(given: Any, batch: dict[str, Any]) -> None:
        assert given is policy
        batches.append(batch)

    monkeypatch.setattr(Rollout, "publish", publish_thrice)
    programs = [each for each in readme_programs() if not ("Remote" in each or "MultiAgentRollout" in each)]
    program = programs[number]
    names = {"policy": policy, "update": update} if "update(policy, batch)" in program else {}
    if number == 4:  # which would go on for ever
        program = program.replace("fragment_length=32", "fragment_length=32, num_fragments=3")
    if "publish" in program:
        with pytest.raises(Enough):
            exec(program, names)
    else:
        exec(program, names)
    assert all(len(batch["obs"]) > 0 for batch in batches)
