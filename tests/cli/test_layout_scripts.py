"""Scripts and manifests of a layout: what they start, with stand-ins for what a cluster has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest

from rollflow.cli.main import main

LAYOUT = """
[first-one]
command = "python tell.py {first-one}"
port = 7000

[others]
command = "python tell.py {first-one} {name} 'a b' \\"$x 'y' `z`\\""
count = 2
"""
TELL = """
import json, os, pathlib, sys
said = [*sys.argv[1:], len(os.environ["ROLLFLOW_SECRET"])]
pathlib.Path(f"said {os.getpid()}").write_text(json.dumps(said))
"""
LAST = ["a b", "$x 'y' `z`", 64]
STAND_INS = {
    # The arguments before `bash` are options, which are written down.
    "srun": """
        tasks=1
        while [ "$1" != bash ]; do
          case "$1" in --ntasks=*) tasks=${1#--ntasks=};; esac
          echo "$1" >> srun-options; shift
        done
        for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@" & done
        wait
    """,
    "scontrol": "echo node1; echo node2",
    "ssh": 'echo "$1" >> ssh-hosts; exec bash -c "$2"',
    "python": f'exec {sys.executable} "$@"',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A layout, and a PATH with stand-ins."""
    (tmp_path / "two-of.toml").write_text(LAYOUT)
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.delenv("ROLLFLOW_SECRET", raising=False)
    return tmp_path


def printed(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["up", str(folder / "two-of.toml"), "--print", *options]) == 0
    return capsys.readouterr().out


def said_by(script: str, folder: Path, *arguments: str) -> list[list[object]]:
    """Run a script; what the programs say that it starts, each of which has ended then."""
    (folder / "script.sh").write_text(script + "wait\n")
    ran = subprocess.run(["bash", "script.sh", *arguments], cwd=folder, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    return sorted((json.loads(path.read_text()) for path in folder.glob("said *")), key=repr)


def test_a_batch_script_has_a_step_for_each_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(folder, capsys, "slurm")
    assert "#SBATCH --job-name=two-of\n#SBATCH --ntasks=3\n" in script
    assert said_by(script, folder) == [
        ["tcp://0.0.0.0:7000", 64],
        ["tcp://node1:7000", "others-0", *LAST],
        ["tcp://node1:7000", "others-1", *LAST],
    ]
    options = (folder / "srun-options").read_text().split()
    assert sorted(options) == ["--exact", "--exact", "--nodelist=node1", "--nodes=1", "--ntasks=1", "--ntasks=2"]


def test_a_script_starts_programs_on_hosts_by_ssh(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(folder, capsys, "ssh")
    assert said_by(script, folder, "here", "there") == [
        ["tcp://0.0.0.0:7000", 64],
        ["tcp://here:7000", "others-0", *LAST],
        ["tcp://here:7000", "others-1", *LAST],
    ]
    assert sorted((folder / "ssh-hosts").read_text().split()) == ["here", "here", "there"]


def test_a_program_that_answers_over_http_alone_is_on_the_first_node(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "two-of.toml").write_text(LAYOUT + '[server]\ncommand = "python tell.py serves"\nhttp = 8080\n')
    said_by(printed(folder, capsys, "slurm"), folder)
    assert (folder / "srun-options").read_text().count("--nodelist=node1") == 2
    said_by(printed(folder, capsys, "ssh"), folder, "here", "there")
    assert sorted((folder / "ssh-hosts").read_text().split()) == ["here", "here", "here", "there"]


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_no_secret_is_in_a_script_or_on_a_command_line(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLFLOW_SECRET", "open sesame")
    script = printed(folder, capsys, kind)
    assert "sesame" not in script
    (folder / "bin" / "python").write_text(f'#!/bin/bash\necho "$@" >> commands; exec {sys.executable} "$@"\n')
    assert [each[-1] for each in said_by(script, folder, "here")] == [len("open sesame")] * 3
    assert "sesame" not in (folder / "commands").read_text()


def test_manifests_are_what_kubernetes_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifests = json.loads(printed(folder, capsys, "kubernetes", "--image", "registry.example/rollflow:1"))
    service, first_budget, first, budget, others = manifests["items"]
    for each in manifests["items"]:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    kinds = ["Service", "PodDisruptionBudget", "Job", "PodDisruptionBudget", "Job"]
    assert [each["kind"] for each in manifests["items"]] == kinds
    for kept, job in ((first_budget, first), (budget, others)):
        assert kept["spec"]["selector"]["matchLabels"] == job["spec"]["template"]["metadata"]["labels"]
        assert kept["spec"]["minAvailable"] == 1  # one of two others may go, and none of those that listen
    assert service["metadata"]["name"] == "two-of-first-one"
    assert service["spec"]["selector"] == first["spec"]["template"]["metadata"]["labels"]
    pod = others["spec"]["template"]["spec"]
    assert (pod["securityContext"]["runAsNonRoot"], pod["terminationGracePeriodSeconds"]) == (True, 30)
    assert pod["shareProcessNamespace"]  # SIGTERM reaches a program without a handler
    [container] = pod["containers"]
    assert not any(key.endswith("Probe") for key in container)
    assert others["spec"]["completions"] == 2
    assert container["command"] == [
        *("python", "tell.py", "tcp://two-of-first-one:7000", "$(NAME)"),
        *("a b", "$$x 'y' `z`"),
    ]
    [container] = first["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "tell.py", "tcp://0.0.0.0:7000"]
    assert container["readinessProbe"]["tcpSocket"] == {"port": 7000}
    assert "livenessProbe" not in container


SERVED = """
[server]
command = "rollflow serve policy --listen {{server}} --http 0.0.0.0:80 {options}"
port = 7000
http = 80
"""


@pytest.mark.parametrize(
    ("options", "scheme", "grace_s"),
    [
        ("", "HTTP", 30),
        ("--tls-cert=cert.pem --grace 40", "HTTPS", 50),
        ("--grace=0.5", "HTTP", 11),
        ("--grace x", "HTTP", 30),
        ("--grace", "HTTP", 30),
    ],
)
def test_a_server_is_asked_over_http_and_has_the_time_to_drain_that_its_command_says(
    options: str, scheme: str, grace_s: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "two-of.toml").write_text(SERVED.format(options=options))
    items = json.loads(printed(folder, capsys, "kubernetes", "--image", "a"))["items"]
    for each in items:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    service, _, job = items
    assert [port["port"] for port in service["spec"]["ports"]] == [7000, 80]
    assert "publishNotReadyAddresses" not in service["spec"]  # who is not ready is asked by nobody
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == grace_s
    probes = {key: probe["httpGet"] for key, probe in pod["containers"][0].items() if key.endswith("Probe")}
    assert probes == {
        "startupProbe": {"path": "/health", "port": 80, "scheme": scheme},
        "livenessProbe": {"path": "/health", "port": 80, "scheme": scheme},
        "readinessProbe": {"path": "/ready", "port": 80, "scheme": scheme},
    }


def test_what_can_not_be_printed_is_said_in_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = folder / "two-of.toml"
    assert main(["up", str(layout), "--print", "kubernetes"]) == 1
    assert "--print kubernetes needs --image IMAGE" in capsys.readouterr().err
    assert main(["up", str(layout), "--print", "slurm", "--image", "a"]) == 1
    assert "--image goes with --print kubernetes alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("kubernetes", "Two_of", "is called 'Two_of', expected small letters, digits and -, from a letter on"),
        ("kubernetes", "2-of", "is called '2-of', expected small letters, digits and -, from a letter on"),
        (
            "kubernetes",
            "a" * 53,
            f"a pod's host name is {'a' * 53}-first-one-0, of 65 letters, expected at most 63: give the layout's file "
            "or the program first-one a shorter name",
        ),
        ("slurm", "my run", "is called 'my run', expected letters, digits, '_', '.' and '-'"),
        ("ssh", "a\nreboot #", "is called 'a\\nreboot #', expected letters, digits, '_', '.' and '-'"),
    ],
)
def test_names_that_would_break_what_is_printed_are_refused(
    kind: str, name: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = (folder / "two-of.toml").rename(folder / f"{name}.toml")
    image = ["--image", "a"] if kind == "kubernetes" else []
    assert main(["up", str(layout), "--print", kind, *image]) == 1
    assert text in capsys.readouterr().err


def test_names_may_be_as_long_as_a_host_name_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = (folder / "two-of.toml").rename(folder / f"{'a' * 51}.toml")
    assert main(["up", str(layout), "--print", "kubernetes", "--image", "a"]) == 0
    for each in json.loads(capsys.readouterr().out)["items"]:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
