"""The built wheel works outside the checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = """
import sys
import rollflow.cli.main, rollflow.nodes, rollflow.policy, rollflow.sinks, rollflow.stream.wire

for package in (rollflow, rollflow.stream, rollflow.nodes, rollflow.sinks, rollflow.policy):
    assert package.__file__.startswith(sys.argv[1]), package.__file__
    for name in package.__all__:
        getattr(package, name)

with rollflow.nodes.Rollout("CartPole-v1", num_envs=4, where="rollouts", num_fragments=1, seed=0) as rollout:
    print(sum(len(batch["obs"]) for batch in rollout.batches()) > 0)
"""


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(installed), str(source)], check=True, timeout=300)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(installed)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
