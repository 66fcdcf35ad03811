"""Hosts and strangers that break the protocol: they are told so, and the others go on."""

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv
from remote_agents import ONE, SEVERAL, Kind
from remote_hosts import RawHost, hosting, listening
from remote_rollouts import HASTY, check_laws, makers, reset_of, rollout_over, taken_until

from rollflow.nodes import EnvHost
from rollflow.stream import EnvError
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import AgentRows, Refused, Step, encode

AGENTS: Any = {"nested": 0, "agents": 4}
# Two environments of four agents.
ZEROS = np.zeros(8, np.float32)
NOBODY = np.zeros(8, bool)


def agent_rows(request: Any, **changed: Any) -> AgentRows:
    """An answer in which all agents have an observation of zeros, but for what is changed."""
    fields: dict[str, Any] = dict.fromkeys(
        ("rewards", "terminateds", "truncateds", "ended", "ended_truncated", "first_agent_slots", "first_obs")
    )
    if isinstance(request, Step):
        fields |= {"rewards": (ZEROS,), "terminateds": (NOBODY,), "truncateds": (NOBODY,)}
        fields |= {"ended": np.zeros(0, np.int64), "ended_truncated": np.zeros(0, bool)}
    seen = {"agent_slots": (None,), "obs": (np.zeros((8, 5), np.int64),), "infos": (), "first_infos": ()}
    return AgentRows(request.lane, request.number, **fields | seen | changed)


def some(*slots: int) -> dict[str, Any]:
    """Only these agent slots have an observation."""
    return {"agent_slots": (np.array(slots),), "obs": (np.zeros((len(slots), 5), np.int64),)}


def sends(**changed: Any) -> Callable[[RawHost], None]:
    return lambda raw: raw.send(agent_rows(raw.next_of(Step), **changed))


MISBEHAVIOUR: dict[str, tuple[Kind, Callable[[RawHost], None], str]] = {
    "a NaN reward": (
        ONE,
        lambda raw: raw.send(raw.rows(raw.next_of(Step), rewards=np.array([0.0, np.nan]))),
        "step 2 of lane 1: the reward of slot 1 is nan, expected a finite number",
    ),
    "noise": (ONE, lambda raw: raw.sock.sendall(b"GET / HTTP/1.1\r\n\r\n"), "frame of .* bytes, expected"),
    "agents out of order": (
        SEVERAL,
        sends(**some(1, 0)),
        r"step 2 of lane 1: obs\[0\]: its agent slots are \[1, 0\], expected",
    ),
    "rows of one agent": (
        SEVERAL,
        lambda raw: raw.send(raw.rows(raw.next_of(Step))),
        "rows 2 of lane 1, expected agent_rows or failed 2 of lane 1, the answer to step",
    ),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_host_that_breaks_the_protocol_is_told_so_and_leaves(name: str, tmp_path: Path) -> None:
    kind, misbehave, expected = MISBEHAVIOUR[name]
    envs = listening()
    with hosting(envs.addresses[0], kind.makers(tmp_path, 0, 1)), kind.rollout_over(envs, prefetch=2) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        raw = RawHost(envs.addresses[0], env=NumberedEnv if kind is ONE else partial(NumberedAgents, **AGENTS))
        request = reset_of(raw, fragments, taken)
        raw.connection.answer(request, raw.rows(request) if kind is ONE else agent_rows(request))
        raw.flush()
        misbehave(raw)
        with pytest.raises(WireError, match=expected):
            raise raw.refusal()
        taken += [next(fragments) for _ in range(5)]
        rollout.drain()
        taken += list(fragments)
        of_others = [fragment for fragment in taken if fragment.lane == 0]
        assert kind.slots_of(of_others) == {0, 1}
        assert sum(fragment.num_steps for fragment in taken) == sum(fragment.num_steps for fragment in of_others) > 40
        kind.check_laws(rollout, of_others, tmp_path, 2)


@pytest.mark.parametrize("kind", [ONE, SEVERAL])
def test_an_error_as_rows_are_recorded_names_lane_and_vector_step(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = listening()
    with hosting(envs.addresses[0], kind.makers(tmp_path, 0)), kind.rollout_over(envs) as rollout:

        def record(of_kind: Any, lane: Any, stepped: Any) -> None:
            raise ZeroDivisionError("in recording")

        fragments = iter(rollout.fragments())
        next(fragments)
        monkeypatch.setattr(type(rollout.environments.kind), "record", record)
        with pytest.raises(ZeroDivisionError, match="in recording") as caught:
            list(fragments)
        [step] = [lane.vector_steps for lane in rollout.environments.lanes]
        assert f"lane 0, vector step {step}" in caught.value.__notes__


STRANGERS: dict[str, tuple[Kind, Any, str, str]] = {
    "one agent": (
        SEVERAL,
        partial(NumberedEnv, 5),
        "role",
        "hello.role is 'env', expected 'agents': here are RemoteEnvs of a ",
    ),
    "several agents": (
        ONE,
        partial(NumberedAgents, 5, **AGENTS),
        "role",
        r"hello\.role is 'agents', expected 'env': here are RemoteEnvs of a Rollout, .* of one agent; this host",
    ),
    "other agents": (
        SEVERAL,
        partial(NumberedAgents, 5, nested=0, agents=3),
        "spaces",
        r"hello.agents is \('agent 0', .*\) in parts .*, expected those of",
    ),
    "other spaces": (
        SEVERAL,
        partial(NumberedAgents, 5, nested=1, agents=4),
        "spaces",
        r"hello.observation_space(\[.*\])? of host '.*' is .*, expected that of host '.*', \w+\(.*\)$",
    ),
    "other spaces of one agent": (
        ONE,
        "Acrobot-v1",
        "spaces",
        r"hello.observation_space(\[.*\])? of host '.*' is Box\(.* \.\.\. .*\(6,\), float32\), expected",
    ),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_host_of_another_kind_is_refused_and_the_others_go_on(name: str, tmp_path: Path) -> None:
    kind, env, code, expected = STRANGERS[name]
    envs = listening()
    with hosting(envs.addresses[0], kind.makers(tmp_path, 0)), kind.rollout_over(envs, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        with EnvHost(env) as other, pytest.raises(WireError, match=expected) as caught:
            other.connect(str(envs.addresses[0]))
        assert caught.value.code == code
        next(fragments)


@pytest.mark.slow
def test_half_a_frame_and_silence_is_a_lost_host() -> None:
    envs = listening(limits=HASTY)
    with hosting(envs.addresses[0], makers(0, 1)), rollout_over(envs, prefetch=2) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        raw = RawHost(envs.addresses[0])
        raw.answer(reset_of(raw, fragments, taken))
        for _ in range(3):
            raw.answer(raw.next_of(Step))
        frame = b"".join(encode(raw.rows(raw.next_of(Step))))
        raw.sock.sendall(frame[: len(frame) // 2])
        taken += taken_until(fragments, lambda more: any(f.losses for f in more))
        rollout.drain()
        taken += list(fragments)
        raw.sock.close()
    reasons = {loss.reason for f in taken for loss in f.losses}
    assert any("raw" in reason and "silent for" in reason for reason in reasons)
    check_laws([f for f in taken if f.lane == 0], rollout.lost, slots_lost=4)


@pytest.mark.slow
def test_a_stranger_who_says_nothing_is_shown_the_door() -> None:
    envs = listening(limits=HASTY)
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        with socket.create_connection((envs.addresses[0].host, envs.addresses[0].port)) as stranger:
            stranger.settimeout(10)
            next(fragments)
            assert b"the handshake is not over after 2 s" in b"".join(iter(lambda: stranger.recv(4096), b""))
        next(fragments)


def test_a_wrong_secret_is_told_to_both_and_nobody_else_notices(caplog: pytest.LogCaptureFixture) -> None:
    envs = listening(secret="right")
    with hosting(envs.addresses[0], makers(0), secret="right"), rollout_over(envs, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        with EnvHost(makers(1)) as stranger, pytest.raises(WireError, match="has another secret"):
            stranger.connect(str(envs.addresses[0]), secret="wrong")
        with EnvHost(makers(1)) as stranger, pytest.raises(WireError, match="the gateway asks for a secret"):
            stranger.connect(str(envs.addresses[0]))
        next(fragments)
    assert "has another secret" in caplog.text


def test_what_a_stranger_says_is_no_line_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        raw = RawHost(envs.addresses[0])
        raw.send(Refused("x", "bad\nhost trusted has joined\x1b[31m" + "z" * 1000))
        while "bad" not in caplog.text:
            next(fragments)
        raw.sock.close()
    [line] = [record.getMessage() for record in caplog.records if "bad" in record.getMessage()]
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"versions": (2, 3)}, "hello.versions is 2 to 3, expected some with 1"),
        ({"agents": ("a",), "parts": (0,)}, r"hello.agents is \('a',\) and .*, expected neither with the role 'env'"),
    ],
    ids=["another version", "agents"],
)
def test_a_wrong_hello_is_refused_by_name(said: dict[str, Any], told: str) -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        next(iter(rollout.fragments()))
        with pytest.raises(WireError, match=told):
            raise RawHost(envs.addresses[0], **said).refusal()


class Enumerated(NumberedAgents):
    """Its agents are tuples."""

    def __init__(self) -> None:
        super().__init__(0)
        self.possible_agents = [("a", 1), *self.possible_agents]  # type: ignore[list-item]
        for spaces in (self.observation_spaces, self.action_spaces):
            spaces[self.possible_agents[0]] = spaces["agent 1"]


def test_ids_that_can_not_be_sent_are_refused_by_the_host() -> None:
    with pytest.raises(EnvError, match=r"agent \('a', 1\): its id can't be sent to another host; expected a string or"):
        EnvHost(Enumerated)
