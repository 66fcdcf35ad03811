"""`rollflow plan`: it runs, measures, and prints a table or JSON."""

import json
from pathlib import Path

import pytest

from rollflow.cli.main import main

MINE = (
    "from rollflow.nodes import DefaultModule\n"
    "class Small(DefaultModule):\n"
    "    def __init__(self, obs, act):\n"
    "        super().__init__(obs, act, model_config={'fcnet_hiddens': [4]})\n"
)
ARGUMENTS = ["plan", "--env", "CartPole-v1", "--num-envs", "2", "--fragment-length", "8", "--seed", "1"]


@pytest.mark.slow
def test_it_prints_a_table_that_says_what_to_change_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--seconds", "0.2"]) == 0
    head, now, *rows, _, last = capsys.readouterr().out.splitlines()
    assert head.split()[:6] == ["where", "lanes", "workers", "hosts", "Mbit/s", "cores"]
    assert "  now; measured: " in now
    assert {row.split()[0] for row in rows} >= {"inline", "threads", "processes", "rollouts"}
    assert last.startswith("change first: ")


@pytest.mark.slow
def test_it_prints_json_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_to_plan.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = [*ARGUMENTS, "--module", "mine_to_plan:Small", "--lanes", "2", "--seconds", "0.1", "--json"]
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["now"]["setting"]["lanes"] == 2
    assert plan["now"]["steps_per_s"] > 0
    assert plan["measured"] > 0
    assert plan["first"].startswith("change first: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--seconds", "0"], "--seconds is 0, expected more than 0"), (["--num-envs", "0"], "num_envs is 0, expected at")],
)
def test_what_cannot_be_is_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, *arguments]) == 1
    assert f"rollflow: {text}" in capsys.readouterr().err
