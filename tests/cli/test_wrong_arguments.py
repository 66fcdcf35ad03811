"""What a command can't do is said in a line; nothing is begun then."""

from pathlib import Path

import pytest
from command_errors import Says
from served_policies import Echo, policy_of

from rollflow.stream.observe import run_socket

# Command -> arguments that it has before the wrong ones, the last of which count.
ALWAYS = {
    "check-host": "",
    "dataset": "",
    "doctor": "",
    "env-host": "--env CartPole-v1",
    "record": "--env CartPole-v1 --policy {tmp}/echo --allow served_policies --episodes 1 --out {tmp}/data",
    "replay-host": "--rollouts unix:{tmp}/rollouts --trainers unix:{tmp}/trainers",
    "rollout": "--env CartPole-v1 --trainer unix:/x",
    "rollout-host": "--env CartPole-v1 --connect unix:/x",
    "serve": "--http 127.0.0.1:0 --allow served_policies {tmp}/echo",
    "top": "",
    "view": "",
}
TICTACTOE = "--env pettingzoo.classic.tictactoe.tictactoe:env"

WRONG = [
    # environments
    ("env-host", "--env NoSuch-v0 --connect tcp://127.0.0.1:1", "environment 'NoSuch-v0' can't be made"),
    ("env-host", "--env nosuch.module:Env --connect tcp://127.0.0.1:1", "No module named 'nosuch'"),
    ("rollout", "--workers 2", "workers is 2, but where='inline' has none"),
    ("record", "", "observation_space of the environments is Box("),
    # addresses, secrets, TLS
    ("env-host", "--connect 127.0.0.1:1", "expected 'tcp://host:port'"),
    ("env-host", "--connect tcp://127.0.0.1:1 --retry 0", "not reached for 0 s"),
    ("env-host", "--listen unix:/nowhere/socket", "can't listen on unix:/nowhere/socket"),
    ("env-host", "--connect unix:/x --secret-file /nowhere", "--secret-file /nowhere: No such file or directory, exp"),
    ("env-host", "--connect unix:/x --tls-ca a", "--tls-ca without --tls, expected both"),
    ("env-host", "--listen unix:/x --tls", "expected --tls-cert as well"),
    ("env-host", "--connect unix:/x --grace -1", "--grace is -1, expected seconds from 0"),
    (
        "env-host",
        "--connect tcp://127.0.0.1:1 --tls --tls-cert {tmp}/key",
        "--tls-cert {tmp}/key with --tls-key None: ",
    ),
    ("env-host", "--connect tcp://127.0.0.1:1 --tls --tls-ca nope.pem", "--tls-ca nope.pem: there is no such file"),
    ("rollout", "--trainer tcp://example.org:1", "see docs/how_to/secure_connections.md#a-secret"),
    ("rollout", "--max-frame 0", "--max-frame is 0, expected 1 to 4095"),
    ("view", "--port 70000", "--port is 70000, expected a free port below 65536, or 0 for any"),
    # how actions are computed
    ("rollout", "--module nosuch.module:Policy", "--module nosuch.module:Policy: No module named 'nosuch'"),
    ("rollout", "--module json:Policy", "--module json:Policy: no such callable, expected package.module:callable"),
    ("rollout", "--module a=json:Policy", "--module a= json:Policy: no such callable, expected package.module:call"),
    ("rollout", "--module json:loads --module b=", "--module json:loads: expected another ID= before each"),
    ("rollout", "--module a= --module a=", "--module a=: expected another ID= before each of several"),
    ("rollout", "--module json:loads --module json:loads", "--module json:loads --module json:loads: expected ID="),
    ("rollout-host", "--env-to-module json", "--env-to-module json: no such callable, expected package.module:call"),
    ("rollout-host", f"{TICTACTOE} --agent-to-module json:nothing", "--agent-to-module json:nothing: no such callable"),
    ("rollout-host", "--agent-to-module json:loads", "agent_to_module_mapping_fn is for environments"),
    ("rollout", "--joint json:loads", "joint_connector is for environments with several agents"),
    # policies
    ("record", "--policy nowhere", "there is no policy at nowhere"),
    ("record", "--episodes 0", "--episodes 0 --num-envs 8, expected 1 or more of each"),
    ("serve", "=x", "policy '=x', expected PATH or NAME=PATH"),
    # replays and datasets
    ("replay-host", "--min-size 5", "expected --ratio as well"),
    ("replay-host", "--replay collections:OrderedDict", "has made a OrderedDict, expected a Replay"),
    ("replay-host", "--replay a:b --ratio 1 --capacity 8", "expected it without --capacity, --ratio"),
    ("replay-host", "--checkpoint /nowhere/replay", "expected a path in a folder that is there"),
    ("replay-host", "--every 0", "every is 0.0, expected seconds"),
    ("replay-host", "--rollouts unix:/nowhere/socket", "/nowhere/socket"),
    ("dataset", "check {tmp}/nothing", "there is no dataset at {tmp}/nothing"),
    # runs
    ("doctor", "-- 0", "no process has the id 0"),
    ("doctor", f"-- {1 << 62}", f"no process has the id {1 << 62}"),
    ("top", "1", "process 1 has no run in {tmp}/runs, expected the process id of one"),
    ("top", "unix:/no/such.sock", "expected a process id, or unix:/path of a"),
    ("top", "--every 0", "--every is 0, expected a number of seconds above 0"),
    ("view", "1", "process 1 has no run in {tmp}/runs, expected the process id of one"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved policy, and a file with a secret."""
    folder = tmp_path_factory.mktemp("wrong")
    policy_of(Echo).save(folder / "echo")
    (folder / "key").write_text("of the trainer\n")
    return folder


@pytest.mark.parametrize(("command", "arguments", "told"), WRONG)
def test_what_can_not_be_done_is_said_in_a_line(
    command: str, arguments: str, told: str, folder: Path, refused: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run_socket.FOLDER, str(folder / "runs"))
    words = f"{command} {ALWAYS[command]} {arguments}".replace("{tmp}", str(folder))
    assert told.replace("{tmp}", str(folder)) in refused(*words.split())
    assert not (folder / "data").exists()
