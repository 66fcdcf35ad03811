"""Layouts as scripts for Slurm and ssh, and as manifests for Kubernetes: text that `rollflow up --print` writes."""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from rollflow.nodes.launch.launcher import NAME, SECRET_VARIABLE
from rollflow.nodes.launch.layout import PROGRAM_NAME, LayoutProgram

_MADE = "python -c 'import secrets; print(secrets.token_hex(32))'"
_SECRET = f'export {SECRET_VARIABLE}="${{{SECRET_VARIABLE}:-$({_MADE})}}"'
_MOST_LETTERS = 63  # of a name in the DNS
_GRACE_S, _SPARE_S = 20, 10  # that hosts take to drain by default; more than that until they are killed


def slurm(name: str, programs: Sequence[LayoutProgram]) -> str:
    """A batch script: a step for each program; those that listen are on the job's first node.

    Raises ValueError for a name that can't stand in its header.
    """
    _check_file_name(name)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --ntasks={sum(program.count for program in programs)}",
        "#SBATCH --requeue",
        f"#SBATCH --signal=TERM@{2 * max(map(_grace_s, programs))}",
        "set -euo pipefail",
        "# srun hands the secret on in the environment.",
        _SECRET,
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export first=${nodes[0]}",
    ]
    for program in programs:
        command = _in_shell(program, programs, lambda _: "${first}", f'"{program.name}-$SLURM_PROCID"')
        place = "" if not program.listens else ' --nodes=1 --nodelist="$first"'
        lines.append(f"srun --exact --ntasks={program.count}{place} bash -c {shlex.quote(f'exec {command}')} &")
        lines += ["main=$!"] if program is programs[0] else []
    return "\n".join([*lines, 'wait "$main"', ""])


def ssh(name: str, programs: Sequence[LayoutProgram]) -> str:
    """A script whose arguments are hosts: those programs that listen run on the first, the others on each in turn.

    What still runs on the hosts when the script ends, or is broken off, goes on. Raises ValueError for a name that
    can't stand in a comment.
    """
    _check_file_name(name)
    lines = [
        "#!/bin/bash",
        f"# Usage: bash {name}.sh HOST... ; this folder, and what it needs, must be on each of them.",
        "set -euo pipefail",
        _SECRET,
        'hosts=("$@")',
        'first=${hosts[0]:?"expected hosts"}',
        "place=0",
        "start() {  # HOST COMMAND: the secret goes over the connection, and stands on no command line",
        f"  printf '%s\\n' \"${SECRET_VARIABLE}\" |",
        f'    ssh "$1" "cd $(printf %q "$PWD") && read -r {SECRET_VARIABLE} && export {SECRET_VARIABLE} && exec $2" &',
        "}",
    ]
    for program in programs:
        for number in range(program.count):
            command = _in_shell(program, programs, lambda _: "${first}", shlex.quote(f"{program.name}-{number}"))
            quoted = '"$first"' if program.listens else '"${hosts[place++ % ${#hosts[@]}]}"'
            lines.append(f'start {quoted} "{_escaped(command)}"')
            lines += ["main=$!"] if program is programs[0] else []
    return "\n".join([*lines, 'wait "$main"', ""])


def kubernetes(name: str, programs: Sequence[LayoutProgram], image: str) -> str:
    """A list of manifests, as JSON: an indexed Job for each program, and a Service for each that listens.

    PodDisruptionBudgets have nodes drained of one host at a time, and of nothing that others dial. The Jobs take the
    secret from the key `secret` of a Secret of the layout's name, which is to be made beforehand. Raises ValueError for
    names that can't stand in the names of manifests, or are too long together.
    """
    if not PROGRAM_NAME.fullmatch(name):  # as a Service's name has to be
        raise ValueError(
            f"the layout's file is called {name!r}, expected small letters, digits and -, from a letter on"
        )
    for program in programs:
        host = f"{name}-{program.name}-{program.count - 1}"  # of the last pod
        if len(host) > _MOST_LETTERS:
            raise ValueError(
                f"a pod's host name is {host}, of {len(host)} letters, expected at most {_MOST_LETTERS}: give the "
                f"layout's file or the program {program.name} a shorter name"
            )
    items: list[dict[str, Any]] = []
    for program in programs:
        full = f"{name}-{program.name}"
        labels = {"app.kubernetes.io/name": full, "app.kubernetes.io/part-of": name}
        items += _service_and_budget(program, full, labels)
        job = {
            "completionMode": "Indexed",
            "completions": program.count,
            "parallelism": program.count,
            "backoffLimit": 1000,
            "template": {"metadata": {"labels": labels}, "spec": _pod(name, program, programs, image)},
        }
        items.append(_manifest("batch/v1", "Job", full, labels, job))
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n"


def _service_and_budget(program: LayoutProgram, full: str, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Manifests beside the Job of a program, those of them that it needs."""
    ports = [{"name": key, "port": port} for key, port in (("port", program.port), ("http", program.http)) if port]
    if ports:
        spec: dict[str, Any] = {"clusterIP": "None", "selector": labels, "ports": ports}
        # Who dials tries again until the program listens; who asks over HTTP may not.
        spec |= {} if program.http else {"publishNotReadyAddresses": True}
        yield _manifest("v1", "Service", full, labels, spec)
    if kept := 1 if ports else program.count - 1:
        # Of a Job, Kubernetes takes the number that is kept, and not the one that may go.
        spec = {"minAvailable": kept, "selector": {"matchLabels": labels}}
        spec |= {"unhealthyPodEvictionPolicy": "AlwaysAllow"}
        yield _manifest("policy/v1", "PodDisruptionBudget", full, labels, spec)


def _check_file_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError(f"the layout's file is called {name!r}, expected letters, digits, '_', '.' and '-'")


def _pod(name: str, program: LayoutProgram, programs: Sequence[LayoutProgram], image: str) -> dict[str, Any]:
    # Kubernetes puts variables in the place of $(VARIABLE); $$ stands for a $.
    command = [
        part.replace("$", "$$") for part in program.addressed(_dialled(program, programs, f"{name}-{{}}".format))
    ]
    container = {
        "name": program.name,
        "image": image,
        "command": ["$(NAME)" if part == NAME else part for part in command],
        "env": [
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": {"name": name, "key": "secret"}}},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **_probes(program),
    }
    return {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": _grace_s(program),
        "shareProcessNamespace": True,  # else SIGTERM is lost on a program without a handler, as process 1
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }


def _probes(program: LayoutProgram) -> dict[str, Any]:
    """What Kubernetes asks a program: the policy server over HTTP, and others whether they listen.

    A connection that is accepted says nothing of the program behind it, so only HTTP tells whether one still lives.
    """
    if program.http is not None:
        has_tls = any(part.startswith("--tls-cert") for part in program.command)
        asked = {"port": program.http, "scheme": "HTTPS" if has_tls else "HTTP"}
        health = {"httpGet": {"path": "/health", **asked}, "periodSeconds": 10}
        return {
            "startupProbe": {**health, "failureThreshold": 60},
            "livenessProbe": {**health, "failureThreshold": 6},
            "readinessProbe": {"httpGet": {"path": "/ready", **asked}, "periodSeconds": 5},
        }
    if program.port is not None:
        return {"readinessProbe": {"tcpSocket": {"port": program.port}, "periodSeconds": 5}}
    return {}


def _grace_s(program: LayoutProgram) -> int:
    """Seconds from SIGTERM until a program is killed: more than it takes to drain, by its option `--grace`."""
    grace = _GRACE_S
    for option, value in pairwise([*program.command, ""]):
        name, equals, after = option.partition("=")
        if name == "--grace":
            with suppress(ValueError, OverflowError):  # it says so itself when it starts
                grace = math.ceil(float(after if equals else value))
    return max(0, grace) + _SPARE_S


def _manifest(version: str, kind: str, name: str, labels: Mapping[str, str], spec: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": dict(labels)}, "spec": spec}


def _dialled(
    program: LayoutProgram, programs: Sequence[LayoutProgram], host_of: Callable[[str], str]
) -> Callable[[str], str]:
    """Gives the address of a program: where it listens for itself, and for others what they dial."""
    ports = {each.name: each.port for each in programs}
    return lambda name: f"tcp://{'0.0.0.0' if name == program.name else host_of(name)}:{ports[name]}"


def _in_shell(
    program: LayoutProgram, programs: Sequence[LayoutProgram], host_of: Callable[[str], str], name: str
) -> str:
    """The command as a shell reads it.

    host_of    gives the host of a program; variables in it are the shell's
    name       of the program, as the shell reads it
    """
    mark = "\N{NULL}"
    marked = program.addressed(_dialled(program, programs, lambda _: mark))
    parts = [name if part == NAME else shlex.quote(part) for part in marked]
    return " ".join(part.replace(mark, f"'\"{host_of('')}\"'") if part != name else part for part in parts)


def _escaped(command: str) -> str:
    """A command within double quotes, of which the variable `first` is put in at once."""
    escaped = command.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    return escaped.replace("\\${first}", "${first}")
