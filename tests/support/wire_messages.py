"""One message of every kind, as the protocol's documentation has them."""

import hashlib
import hmac
from typing import Any

import numpy as np
from gymnasium import spaces

from rollflow.stream import wire
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.space import describe_space
from rollflow.stream.wire.codec.value import encode_value

SECRET = b"correct horse battery staple"
HOST_NONCE, GATEWAY_NONCE = bytes(range(32)), bytes(range(32, 64))
TOKEN = bytes.fromhex("f0e1d2c3b4a5968778695a4b3c2d1e0f")
OBSERVATION_SPACE = spaces.Box(-1.0, 1.0, (3,), np.float32)
ACTION_SPACE = spaces.Discrete(2)


def lent(columns: Any, *places: tuple[int, int]) -> bytes:
    """Columns as they are lent, each array in its place: the index of a block, and the offset in it."""
    following = iter(places)
    return encode_value(columns, "columns", lambda _: next(following))[0]


def hello(**changed: Any) -> wire.Hello:
    """Two lanes of two environments each, with three numbers as an observation and two actions."""
    fields: dict[str, Any] = {
        "versions": (1, 1),
        "role": "env",
        "software": "example 1.0",
        "name": "sim-1",
        "nonce": HOST_NONCE,
        "session": TOKEN,
        "max_frame": 1 << 26,
        "slots": (2, 2),
        "observation_space": describe_space(OBSERVATION_SPACE),
        "action_space": describe_space(ACTION_SPACE),
        "autoreset": "SAME_STEP",
        "metadata": {"env": "Example-v0"},
    }
    if changed.get("role", "env") not in ("env", "agents"):
        fields["software"] = "rollflow 0.1"
    return wire.Hello(**fields | changed)


def rows(**changed: Any) -> wire.Rows:
    """The answer to a step in which slot 1 ended."""
    fields: dict[str, Any] = {
        "lane": 0,
        "number": 2,
        "obs": np.array([[0, 0.25, 0.5], [0, 0, 0]], np.float32),
        "rewards": np.array([1.0, -1.0]),
        "terminateds": np.array([False, True]),
        "truncateds": np.array([False, False]),
        "final_slots": (1,),
        "final_obs": np.array([[1, 1, 1]], np.float32),
        "infos": {},
        "final_infos": SlotInfos([{}, {"won": True}]),
    }
    return wire.Rows(**fields | changed)


def first_rows(**changed: Any) -> wire.Rows:
    """The answer to a reset."""
    nothing = {"rewards": None, "terminateds": None, "truncateds": None, "final_obs": None}
    return rows(**{"number": 1, "final_slots": (), "final_infos": {}} | nothing | changed)


def agents_hello(**changed: Any) -> wire.Hello:
    """A lane of two environments with the agents "red" and "blue", of the same spaces, and 7, of others."""
    observed, done = (
        describe_space(spaces.Tuple(parts))
        for parts in (
            [spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(4)],
            [spaces.Discrete(3), spaces.Discrete(2)],
        )
    )
    fields: dict[str, Any] = {"role": "agents", "slots": (2,), "agents": ("red", "blue", 7), "parts": (0, 0, 1)}
    return hello(**fields | {"observation_space": observed, "action_space": done, "metadata": {}} | changed)


def agent_step(**changed: Any) -> wire.Step:
    """Everybody acts but agent 7 of the first environment, which has not come yet."""
    fields: dict[str, Any] = {
        "lane": 0,
        "number": 2,
        "actions": [np.array([0, 1, 2, 0]), np.array([1])],
        "agent_slots": (None, np.array([1])),
    }
    return wire.Step(**fields | changed)


def agent_rows(**changed: Any) -> wire.AgentRows:
    """The answer to it: the first environment's episode has ended, and "blue" of the second one waits."""
    fields: dict[str, Any] = {
        "lane": 0,
        "number": 2,
        "agent_slots": (np.array([0, 1, 2]), np.array([1])),
        "obs": (np.array([[1, 1], [1, -1], [0, 0.5]], np.float32), np.array([3])),
        "rewards": (np.array([1, -1, 0.5, 0], np.float32), np.array([0, 2], np.float32)),
        "terminateds": (np.array([True, True, False, False]), np.array([False, False])),
        "truncateds": (np.zeros(4, bool), np.zeros(2, bool)),
        "ended": np.array([0]),
        "ended_truncated": np.array([False]),
        "first_agent_slots": (np.array([0, 1]), np.zeros(0, np.int64)),
        "first_obs": (np.zeros((2, 2), np.float32), np.zeros(0, np.int64)),
        "infos": ([[0, {"won": True}]], []),
        "first_infos": (),
    }
    return wire.AgentRows(**fields | changed)


def first_agent_rows(**changed: Any) -> wire.AgentRows:
    """The answer to a reset."""
    nothing = dict.fromkeys(
        ("rewards", "terminateds", "truncateds", "ended", "ended_truncated", "first_agent_slots", "first_obs")
    )
    first = {"agent_slots": (None, np.array([1])), "obs": (np.zeros((4, 2), np.float32), np.array([2]))}
    return agent_rows(**{"number": 1, "infos": ()} | nothing | first | changed)


HELLO = hello()
CHALLENGE = wire.Challenge(1, "rollflow 0.1", GATEWAY_NONCE, True, 1 << 26, 10.0, 60.0)


def proof_of(who: bytes) -> bytes:
    """Return the proof that the documentation asks of a host or a gateway after this Hello and this Challenge."""
    transcript = hashlib.sha256(b"".join([*wire.encode(HELLO), *wire.encode(CHALLENGE)])).digest()
    return hmac.new(SECRET, who + transcript, hashlib.sha256).digest()


EXAMPLES: dict[str, wire.Message] = {
    "hello": HELLO,
    "challenge": CHALLENGE,
    "proof": wire.Proof(proof_of(b"rollflow host")),
    "welcome": wire.Welcome(
        proof_of(b"rollflow gateway"), TOKEN, False, 0, (wire.LaneGrant(0, 2, 0, 0), wire.LaneGrant(1, 2, 2, 0))
    ),
    "reset": wire.Reset(0, 1, (11, 12), None),
    "step": wire.Step(0, 2, np.array([1, 0])),
    "rows": rows(),
    "first rows": first_rows(),
    "failed": wire.Failed(
        0, 3, "ValueError", "the arm is stuck", ("slot 1",), "Traceback …\nValueError: the arm is stuck"
    ),
    "agents hello": agents_hello(),
    "agents step": agent_step(),
    "agent rows": agent_rows(),
    "first agent rows": first_agent_rows(),
    "ping": wire.Ping(1),
    "pong": wire.Pong(1),
    "goodbye": wire.Goodbye("the run is over"),
    "refused": wire.Refused("secret", "proof.mac: the host has another secret, or somebody has changed what it said"),
    "turn": wire.Turn(0, 1),
    "cut": wire.Cut(0, 1),
    "fragment": wire.Fragment(
        0,
        1,
        {
            "rewards": np.array([[1.0, 0.5], [0.0, 2.0]], np.float32),
            "obs": {"at": np.array([[1, 2], [3, 4]], np.int16)},
        },
        {"sequence": 0, "policy_version": 7},
    ),
    "settings": wire.Settings({"fragment_length": 32, "lookback": 4, "seed": 7}),
    "weights": wire.Weights(
        7,
        {"layer.weight": np.array([[0.5, -0.5]], np.float32), "layer.scale": np.array([0x3F80], np.uint16)},
        {"layer.scale": "bfloat16"},
        {},
    ),
    "states": wire.States({"MeanStdFilter": {"count": 3, "mean": np.array([0.5])}}),
    "done": wire.Done(41, 40, (3, 0, 3)),
    "metrics": wire.Metrics({"episodes": 12, "return_mean": 31.5}),
}
