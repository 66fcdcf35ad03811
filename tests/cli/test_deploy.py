"""Files to deploy with: they are what their formats ask for, and the commands work as processes of this machine."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from extras import needs

check_jsonschema, kubernetes_validate = needs("check_jsonschema"), needs("kubernetes_validate")
DockerfileParser, yaml = needs("dockerfile_parse").DockerfileParser, needs("yaml")
Draft7Validator = needs("jsonschema").Draft7Validator

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deploy"
SCHEMA = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
SECRET = "correct horse battery staple"


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def image() -> DockerfileParser:
    return DockerfileParser(fileobj=io.BytesIO((FOLDER / "Dockerfile").read_bytes()))


def last_stage(image: DockerfileParser) -> dict[str, str]:
    """Instruction -> its value where it stands last, of the stage that becomes the image."""
    values: dict[str, str] = {}
    for each in image.structure:
        if each["instruction"] == "FROM":
            values.clear()
        values[each["instruction"]] = each["value"]
    return values


def test_the_image_runs_the_command_as_another_user_than_root(image: DockerfileParser) -> None:
    stage = last_stage(image)
    assert json.loads(stage["ENTRYPOINT"]) == ["rollflow"]
    # Numbers: Kubernetes does not know whom a name stands for, and refuses it.
    assert all(int(number) > 0 for number in stage["USER"].split(":"))


def test_the_image_is_built_from_all_that_the_wheel_needs(image: DockerfileParser) -> None:
    copied = {
        source
        for each in image.structure
        if each["instruction"] == "COPY" and "--from" not in each["value"]
        for source in each["value"].split()[:-1]
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {Path(path).parts[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    texts = {project["project"]["readme"], *project["project"]["license-files"]}
    texts = {each for each in texts if Path(each).parts[0] not in folders}  # others come with their folder
    assert copied == folders | texts | {"pyproject.toml", "constraints.txt"}


def test_the_compose_file_is_one(compose: Any) -> None:
    Draft7Validator(json.loads(SCHEMA.read_text())).validate(compose)
    services = compose["services"]
    replicas = {name: each.get("deploy", {}).get("replicas", 1) for name, each in services.items()}
    assert replicas == {"trainer": 1, "hosts": 2, "server": 1}
    for each in services.values():
        build = each["build"]
        assert (FOLDER / build["context"]).resolve() == ROOT
        assert ROOT / build["dockerfile"] == FOLDER / "Dockerfile"
        assert each["secrets"] == [*compose["secrets"]]


def test_the_manifests_of_kubernetes_are_valid() -> None:
    manifests = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    for each in manifests:
        kubernetes_validate.validate(each, "1.30", strict=True)
    named = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    pods = [each["spec"]["template"] for each in manifests if "template" in each["spec"]]
    assert len(pods) == 3
    for pod in pods:
        [container] = pod["spec"]["containers"]
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
    labels = [pod["metadata"]["labels"] for pod in pods]
    for kind in ("trainer", "server"):
        assert named["Service", f"rollflow-{kind}"]["spec"]["selector"] in labels


def test_the_commands_of_kubernetes_are_those_of_the_compose_file(compose: Any) -> None:
    manifests = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    containers = [each["spec"]["template"]["spec"]["containers"][0] for each in manifests if "template" in each["spec"]]
    trainer, host, server = (each.get("args", each.get("command")) for each in containers)
    services = compose["services"]

    def here(command: list[str]) -> list[str]:
        places = {"//trainer:": "//rollflow-trainer:", "/run/secrets/key": "/run/secrets/rollflow/key"}
        for there, place in places.items():
            command = [part.replace(there, place) for part in command]
        return command

    assert host == here(services["hosts"]["command"])
    assert server == here(services["server"]["command"])
    assert trainer[2:] == here(services["trainer"]["command"])


@pytest.mark.slow
def test_the_slurm_script_trains_with_stand_ins_for_slurm(tmp_path: Path) -> None:
    # The arguments before the program are options; a task for each of --ntasks. The trainer is started, and hosts that
    # print what they would dial.
    stand_ins = {
        "srun": """
            tasks=1
            while [[ $1 == --* ]]; do
              case "$1" in --ntasks=*) tasks=${1#--ntasks=};; esac
              shift
            done
            for ((i = 0; i < tasks; i++)); do "$@" & done
            wait
        """,
        "hostname": "echo 127.0.0.1",
        "python": f'[[ $1 == -c ]] && exec {sys.executable} "$@"; echo "trainer $*"; test -s "$4"',
        "rollflow": 'echo "host $*"',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = FOLDER / "rollflow.sbatch"
    ran = subprocess.run(["bash", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    lines = sorted(ran.stdout.splitlines())
    assert [line.split()[0] for line in lines] == ["host", "host", "trainer"]
    assert all("--connect=tcp://127.0.0.1:7000 --secret-file=" in line for line in lines[:2])
    assert lines[2].startswith("trainer -m deploy.train tcp://0.0.0.0:7000 ")
    assert not list(tmp_path.glob("rollflow-key.*"))


class Layout:
    """The services of the Compose file as processes, with a folder and free ports in place of what containers have."""

    def __init__(self, compose: Any, image: DockerfileParser, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._services, self._entry = compose["services"], json.loads(last_stage(image)["ENTRYPOINT"])
        (folder / "key").write_text(f"{SECRET}\n")
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            trains_at, serves_at = one.getsockname()[1], other.getsockname()[1]
        self.url = f"http://127.0.0.1:{serves_at}/v1/policies/pole/act"
        self._places = {"/run/secrets": str(folder), "/policies": str(folder), "//trainer:": "//127.0.0.1:"}
        self._places |= {":7000": f":{trains_at}", ":8080": f":{serves_at}"}

    def start(self, name: str) -> list["subprocess.Popen[str]"]:
        """Start the containers of a service."""
        service = self._services[name]
        options: dict[str, Any] = {"env": {**os.environ, **service["environment"], "PYTHONUNBUFFERED": "1"}}
        options |= {"cwd": FOLDER.parent, "text": True}
        if "healthcheck" in service:
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started = []
        for _ in range(service.get("deploy", {}).get("replicas", 1)):
            command = self._here([*service.get("entrypoint", self._entry), *service["command"]])
            started.append(self._stack.enter_context(subprocess.Popen(command, **options)))
            self._stack.callback(started[-1].kill)
        return started

    def check_health(self, name: str, process: "subprocess.Popen[str]", line: str) -> None:
        """Check that a service is healthy once its process has written a line, or a part of one."""
        assert process.stdout is not None
        written = []
        while not written or line not in written[-1]:
            written.append(process.stdout.readline())
            assert written[-1], f"{name} has ended: {''.join(written)}"
        kind, *command = self._services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        subprocess.run(self._here(command), check=True)

    def _here(self, command: list[str]) -> list[str]:
        programs = {"python": [sys.executable], "rollflow": [sys.executable, "-m", "rollflow.cli.main"]}
        parts = [*programs.get(command[0], command[:1]), *command[1:]]
        for there, here in self._places.items():
            parts = [part.replace(there, here) for part in parts]
        return parts


@pytest.mark.slow
def test_the_compose_files_commands_train_and_serve(compose: Any, image: DockerfileParser, tmp_path: Path) -> None:
    asked: Any = {"json": {"observation": [0.0, 0.0, 0.0, 0.0]}, "headers": {"Authorization": f"Bearer {SECRET}"}}
    with ExitStack() as stack:
        layout = Layout(compose, image, tmp_path, stack)
        [trainer], hosts = layout.start("trainer"), layout.start("hosts")
        layout.check_health("trainer", trainer, "saved")
        [server] = layout.start("server")
        layout.check_health("server", server, "serving pole at")
        assert httpx.post(layout.url, **asked).json()["action"] in (0, 1)
        assert httpx.post(layout.url, json=asked["json"]).status_code == 401
        for process in (*hosts, server, trainer):
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in (*hosts, server)] == [128 + signal.SIGTERM] * 3
        assert trainer.wait(60) == -signal.SIGTERM
