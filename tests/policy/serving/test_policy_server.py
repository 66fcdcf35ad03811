"""Serving by rollflow's own protocol: sessions, refusals, and connections, clients and servers that come and go."""

import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_envs import await_that
from mpe2 import simple_spread_v3
from remote_hosts import BrokenWire
from served_policies import ACTIONS, Echo, Held, Sums, policy_of

from rollflow.nodes import MultiAgentRollout, ParallelPettingZooEnv
from rollflow.policy import PolicyClient
from rollflow.policy.serving import BatchOptions, PolicyServer, Shelf
from rollflow.policy.serving.policy_server import SERVING_LIMITS
from rollflow.policy.serving.request import (
    ClosedError,
    OverloadedError,
    PartlyActedError,
    RequestError,
    ServingError,
    SessionLostError,
    UnansweredError,
    UnknownPolicyError,
)
from rollflow.stream.data.errors import WireError
from rollflow.stream.net import backoff
from rollflow.stream.wire import (
    Act,
    Acted,
    ClientConnection,
    ClientSession,
    ConnectionBroken,
    Hello,
    TcpAddress,
    Welcome,
    parse_address,
)

SECRET = "correct horse battery staple"


@contextmanager
def served(*policies: Any, options: BatchOptions | None = None, **others: Any) -> Iterator[tuple[Shelf, PolicyServer]]:
    """A server with policies under the names "a", "b", …."""
    shelf = Shelf(options)
    for name, policy in zip("abc", policies, strict=False):
        shelf.put(name, policy, "1")
    with PolicyServer(shelf, "tcp://127.0.0.1:0", secret=SECRET, **others) as server:
        yield shelf, server
    shelf.close()


def client_of(address: str, **options: Any) -> PolicyClient:
    return PolicyClient(address, **{"secret": SECRET, "timeout": 30.0, **options})


def test_each_session_of_each_client_has_its_own_memory() -> None:
    with (
        served(policy_of(Sums, 2.0)) as (_, server),
        client_of(server.address) as one,
        client_of(server.address) as two,
    ):
        assert one.act([3, 0]).tolist() == [3.0, 2.0]
        assert one.act([4, 0]).tolist() == [7.0, 2.0]
        assert one.act([1, 0], session="other").tolist() == [1.0, 2.0]
        assert two.act([5, 0]).tolist() == [5.0, 2.0]  # another client's session of the same name
        one.reset()
        assert one.act([1, 0]).tolist() == [1.0, 2.0]
        assert one.act([1, 0], session=None).tolist() == [1.0, 2.0]
        assert one.act([1, 0], session=None).tolist() == [1.0, 2.0]
        assert one.action_space == ACTIONS
        assert one.policies["a"].has_memory


def test_a_batch_is_one_request_and_its_sessions_go_on() -> None:
    with served(policy_of(Sums)) as (shelf, server), client_of(server.address) as client:
        observations = np.arange(6, dtype=np.float64).reshape(3, 2)
        assert client.act_batch(observations)[:, 0].tolist() == [0.0, 2.0, 4.0]
        assert client.act_batch(observations[::-1], sessions=[2, 1, 0])[:, 0].tolist() == [8.0, 4.0, 0.0]
        client.forget(1)
        assert client.act_batch(observations[1:], sessions=[1, 2])[:, 0].tolist() == [2.0, 12.0]
        assert shelf.newest("a").num_sessions == 3


def test_policies_are_asked_for_by_name_as_agents_have_them() -> None:
    with served(policy_of(Echo, 1.0), policy_of(Sums, 2.0)) as (_, server):
        with client_of(server.address) as client:
            assert sorted(client.policies) == ["a", "b"]
            for _ in range(2):
                assert client.act([3, 0], session="env 1", policy="a").tolist() == [3.0, 1.0]
            assert client.act([3, 0], session="env 1", policy="b").tolist() == [3.0, 2.0]
            assert client.act([3, 0], session="env 1", policy="b").tolist() == [6.0, 2.0]
            with pytest.raises(UnknownPolicyError, match="policy is None, expected one of those that are served: a, b"):
                client.act([3, 0])
        with client_of(server.address, policy="c") as client, pytest.raises(UnknownPolicyError, match="no policy 'c'"):
            client.act([3, 0])


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ([1, 2, 3], r"observation has shape \[3\], expected float32\[2\]"),
        ([np.nan, 0], "observation has NaN"),
        ({"a": 1}, r"observation is an object, expected float32\[2\]"),
        ("xy", "observation is a text"),
    ],
)
def test_bad_input_is_refused_by_its_field_and_nothing_is_disturbed(observation: Any, text: str) -> None:
    with served(policy_of(Sums)) as (_, server), client_of(server.address) as client:
        client.act([3, 0])
        with pytest.raises(RequestError, match=text):
            client.act(observation)
        assert client.act([4, 0]).tolist() == [7.0, 0.0]


class RawClient:
    """A client made by hand: it sends any request, and gives the answers one by one."""

    def __init__(self, address: str, token: bytes = bytes(16)) -> None:
        target = parse_address(address)
        assert isinstance(target, TcpAddress)
        self.sock = socket.create_connection((target.host, target.port))
        self.session = ClientSession(token)
        hello = Hello((1, 1), "client", "raw", "raw", bytes(32), token, 1 << 20, (1,), {}, {}, "DISABLED", {})
        secret = SECRET.encode()
        self.connection = ClientConnection(hello, self.session, secret=secret, limits=SERVING_LIMITS, now=0.0)
        self._events: list[Any] = []
        self.welcome = self.event(Welcome)

    def event(self, kind: type[Any]) -> Any:
        """The next event of this kind; None: the server has hung up."""
        while True:
            for buffer in self.connection.outgoing():
                self.sock.sendall(buffer)
            for event in self._events:
                if isinstance(event, kind):
                    self._events.remove(event)
                    return event
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._events += self.connection.receive(data, 0.0)

    def act(self, number: int, **changed: Any) -> Act:
        """A request with one observation of the session "x"."""
        fields = {"policy": "a", "version": None, "sessions": ("x",), "begins": np.array([number == 1])}
        fields |= {"rewards": None, "obs": np.array([[number, 0]], np.float32), "done": 0}
        return Act(number=number, **fields | changed)


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"obs": np.zeros((1, 3), np.float32)}, [None, 422, "obs is an array <f4[1, 3], expected an array <f4[1, 2]"]),
        ({"obs": np.zeros((1, 2))}, [None, 422, "obs is an array <f8[1, 2], expected an array <f4[1, 2]"]),
        ({"obs": np.full((1, 2), np.nan, np.float32)}, [None, 422, "obs of observation 0 has a NaN, expected numbers"]),
        ({"begins": np.zeros(2, bool)}, [None, 422, "begins has 2 entries, expected 1, one for each session"]),
        (
            {"rewards": np.array([np.inf], np.float32)},
            [None, 422, "rewards has an infinite one, expected finite numbers, or NaN for none"],
        ),
        ({"policy": "z"}, [None, 404, "no policy 'z' is served; served: a"]),
        ({"version": "9"}, [None, 404, "policy 'a' has no version '9'; served: 1"]),
        (
            {"begins": np.array([False])},
            [
                None,
                410,
                "session 'x' has no memory here: it never began, or it was forgotten; expected 'begins': true with its "
                "next observation",
            ],
        ),
    ],
)
def test_the_server_looks_at_every_field(changed: dict[str, Any], refused: list[Any]) -> None:
    with served(policy_of(Sums)) as (_, server):
        client = RawClient(server.address)
        client.connection.ask(client.act(1, **changed))
        assert client.event(Acted).refused == (refused,)
        client.connection.ask(client.act(2, begins=np.array([True])))
        assert client.event(Acted).actions.tolist() == [[2.0, 0.0]]
        client.sock.close()


def test_a_request_that_comes_again_is_answered_as_it_was_and_not_acted_on_again() -> None:
    with served(policy_of(Sums)) as (_, server):
        first = RawClient(server.address)
        first.connection.ask(first.act(1))
        assert first.event(Acted).actions.tolist() == [[1.0, 0.0]]
        again = RawClient(server.address)  # as if the answer had never come
        assert again.welcome.resumed
        for number, expected in ((1, 1.0), (2, 3.0)):
            again.connection.ask(again.act(number, done=number - 1))
            assert again.event(Acted).actions.tolist() == [[expected, 0.0]]
        assert first.event(Acted) is None  # its connection has been replaced
        assert server.num_clients == 1
        first.sock.close()
        again.sock.close()


def test_a_client_that_asks_beyond_its_window_or_misbehaves_is_refused_alone() -> None:
    with served(policy_of(Sums), window=2) as (_, server), client_of(server.address) as other:
        other.act([3, 0])
        client = RawClient(server.address)
        client.session.window = 9
        client.connection.ask(client.act(1))
        client.connection.ask(client.act(2))
        client.connection.ask(client.act(3))
        assert client.event(ConnectionBroken).error.code == "credit"
        assert other.act([4, 0]).tolist() == [7.0, 0.0]
        client.sock.close()


def test_secrets_that_differ_or_are_missing_are_refused() -> None:
    with served(policy_of(Sums)) as (_, server):
        for secret, text in (("another", "another secret"), (None, "asks for a secret")):
            with client_of(server.address, secret=secret) as client, pytest.raises(WireError, match=text):
                client.act([3, 0])
    with pytest.raises(WireError, match="without a secret"):
        PolicyServer(Shelf(), "tcp://0.0.0.0:0")
    with pytest.raises(WireError, match="without a secret"):
        PolicyClient("tcp://example.org:1")


def test_it_speaks_tls_and_unix_sockets(tmp_path: Path, certificates: dict[str, ssl.SSLContext]) -> None:
    with served(policy_of(Sums), tls=certificates["server"]) as (_, server):
        with client_of(server.address, tls=certificates["client"]) as client:
            assert client.act([3, 0]).tolist() == [3.0, 0.0]
        with client_of(server.address) as client, pytest.raises(WireError, match="speaks TLS"):
            client.act([3, 0])
    shelf = Shelf()
    shelf.put("a", policy_of(Echo), "1")
    with PolicyServer(shelf, f"unix:{tmp_path / 's'}") as server, PolicyClient(server.address) as client:
        assert client.act([3, 0]).tolist() == [3.0, 0.0]
    assert not (tmp_path / "s").exists()
    shelf.close()


def test_too_many_requests_are_refused_and_those_before_are_answered() -> None:
    held = Held(policy_of(Sums))
    with served(held, options=BatchOptions(max_batch=1, max_waiting=2)) as (shelf, server):
        with client_of(server.address) as client, ThreadPoolExecutor(3) as pool:
            first = pool.submit(client.act, [1, 0], session=0)
            assert held.begun.acquire(timeout=30)
            more = [pool.submit(client.act, [1, 0], session=session) for session in (1, 2)]
            while shelf.newest("a").num_waiting < 2:
                pass
            with pytest.raises(OverloadedError, match="2 requests wait already"):
                client.act([1, 0], session=3)
            with pytest.raises(OverloadedError):
                client.act_batch(np.ones((2, 2)), sessions=[3, 4])
            held.go.release(10)
            assert [each.result(30).tolist() for each in (first, *more)] == [[1.0, 0.0]] * 3
            assert client.act([5, 0], session=3).tolist() == [5.0, 0.0]  # refused, it is as it was


def test_observations_of_one_request_may_fail_apart() -> None:
    held = Held(policy_of(Sums))
    with (
        served(held, options=BatchOptions(max_batch=2, max_waiting=2)) as (_, server),
        client_of(server.address) as client,
    ):
        client.policies  # noqa: B018  # wait for the server
        held.go.release(10)
        with pytest.raises(PartlyActedError) as raised:
            client.act_batch(np.ones((64, 2)))
        assert {len(raised.value.actions) + len(raised.value.errors)} == {64}
        assert {type(error) for error in raised.value.errors.values()} == {OverloadedError}
        assert all(action.tolist() == [1.0, 0.0] for action in raised.value.actions.values())


def test_a_failed_pass_loses_its_sessions_and_says_so() -> None:
    with served(policy_of(Echo)) as (_, server), client_of(server.address) as client:
        with pytest.raises(ServingError, match="ValueError: thirteen"):
            client.act([13, 0])
        assert client.act([12, 0]).tolist() == [12.0, 0.0]


def test_a_client_that_leaves_takes_its_sessions_along() -> None:
    with served(policy_of(Sums)) as (shelf, server):
        with client_of(server.address) as client:
            client.act_batch(np.ones((5, 2)))
            assert shelf.newest("a").num_sessions == 5
        while server.num_clients or shelf.newest("a").num_sessions:
            pass
        with pytest.raises(ClosedError):
            client.act([1, 0])


def test_a_client_that_does_not_come_back_is_forgotten() -> None:
    with served(policy_of(Sums), limits=replace(SERVING_LIMITS, grace_s=0.05)) as (shelf, server):
        client = RawClient(server.address)
        client.connection.ask(client.act(1))
        client.event(Acted)
        client.sock.close()
        while server.num_clients or shelf.newest("a").num_sessions:
            pass
        back = RawClient(server.address)
        assert not back.welcome.resumed
        back.connection.ask(back.act(1, begins=np.array([False])))  # the session goes on, but nobody knows it
        assert [status for _, status, _ in back.event(Acted).refused] == [410]
        back.sock.close()


def test_more_clients_than_there_may_be_are_turned_away_until_one_has_left() -> None:
    with served(policy_of(Sums), max_clients=1) as (_, server), client_of(server.address) as first:
        first.act([1, 0])
        with client_of(server.address, timeout=0.5) as second:
            await_that(lambda: any("are served already" in each for each in second._link.loop.dialler.problems))
            with pytest.raises(UnansweredError, match="1 clients are served already"):
                second.act([1, 0])
            first.close()
            second.timeout = 30.0
            assert second.act([1, 0]).tolist() == [1.0, 0.0]


def sums_of(client: PolicyClient, session: int, steps: int) -> tuple[int, int]:
    """Check the sum after each of many steps of a session; how often it was lost, and how often too much waited."""
    total, lost, refused = 0, 0, 0
    rng = random.Random(session)
    for _ in range(steps):
        number = rng.randrange(1, 100)
        try:
            first, _ = client.act([number, 0], session=session)
        except SessionLostError:
            client.reset(session)
            total, lost = 0, lost + 1
            continue
        except OverloadedError:
            refused += 1
            continue
        total += number
        assert first == total  # acted on once, and by its own memory
    return lost, refused


@pytest.mark.slow
def test_connections_that_are_cut_at_drawn_moments_change_nothing() -> None:
    rng = random.Random(0)
    with served(policy_of(Sums)) as (_, server):
        wire = BrokenWire(parse_address(server.address), lambda: rng.randrange(1, 20_000))
        try:
            with client_of(wire.address, timeout=60.0) as client, ThreadPoolExecutor(8) as pool:
                ran = [pool.submit(sums_of, client, session, 150) for session in range(8)]
                assert [each.result(120) for each in ran] == [(0, 0)] * 8
                assert wire.cuts >= 5
        finally:
            wire.close()


_PROGRAM = """
import sys; sys.path[:] = {path!r}
from dataclasses import replace
from served_policies import Sums, policy_of
from rollflow.policy.serving import BatchOptions, PolicyServer, Shelf
from rollflow.policy.serving.policy_server import SERVING_LIMITS
shelf = Shelf(BatchOptions(max_waiting={max_waiting}))
shelf.put("a", policy_of(Sums), "1")
limits = replace(SERVING_LIMITS, heartbeat_s=0.2)
with PolicyServer(shelf, {address!r}, secret={secret!r}, limits=limits) as server:
    print(server.address, flush=True)
    sys.stdin.read()
shelf.close()
"""


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self, address: str, max_waiting: int = 1024) -> None:
        program = _PROGRAM.format(path=sys.path, address=address, secret=SECRET, max_waiting=max_waiting)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def end(self) -> None:
        """Kill it if it is still there."""
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "end"])
def test_a_server_that_is_started_anew_under_load_says_which_sessions_are_lost(tmp_path: Path, how: str) -> None:
    server = ServerProcess(f"unix:{tmp_path / 's'}")
    try:
        with client_of(server.address, timeout=60.0) as client, ThreadPoolExecutor(8) as pool:
            ran = [pool.submit(sums_of, client, session, 1500) for session in range(8)]
            for _ in range(2):
                while client._link.session.number % 500 < 400:
                    pass
                if how == "end":
                    assert server.process.stdin is not None
                    server.process.stdin.close()
                    server.process.wait(30)
                    server.process.stdin = None
                server.end()
                server = ServerProcess(f"unix:{tmp_path / 's'}")
                assert client.act([5, 0], session=None).tolist() == [5.0, 0.0]
            lost = [each.result(120)[0] for each in ran]
            assert all(1 <= each <= 2 for each in lost)
    finally:
        server.end()


@pytest.mark.slow
def test_a_server_that_is_frozen_under_load_goes_on_with_every_session() -> None:
    server = ServerProcess("tcp://127.0.0.1:0")
    try:
        with client_of(server.address, timeout=60.0) as client, ThreadPoolExecutor(8) as pool:
            ran = [pool.submit(sums_of, client, session, 1500) for session in range(8)]
            for _ in range(2):
                before = client._link.session.number
                while client._link.session.number < before + 500:
                    pass
                server.process.send_signal(signal.SIGSTOP)
                while not client._link.loop.dialler.problems:  # it is given up, and dialled again
                    threading.Event().wait(0.01)
                server.process.send_signal(signal.SIGCONT)
                while client._link.loop.dialler.problems:
                    threading.Event().wait(0.01)
            assert [each.result(120)[0] for each in ran] == [0] * 8
    finally:
        server.end()


def test_a_client_whose_server_stands_still_says_so_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "FIRST_WORD_S", 0.01)
    held = Held(policy_of(Echo))
    with served(held) as (_, server), client_of(server.address) as client, ThreadPoolExecutor(1) as pool:
        acted = pool.submit(client.act, [3, 0])
        await_that(lambda: "has not answered yet" in caplog.text)
        held.go.release(10)
        acted.result()


@contextmanager
def unanswered(module: Any) -> Iterator[PolicyClient]:
    """A client of a policy of one of these modules whose first request had no answer in time."""
    held = Held(policy_of(module))
    with served(held) as (_, server), client_of(server.address, timeout=0.2) as client:
        with pytest.raises(UnansweredError, match=r"has not answered within 0\.2 s"):
            client.act([3, 0])
        held.go.release(10)
        client.timeout = 30.0
        yield client


def test_an_answer_that_never_comes_leaves_the_session_lost_until_it_is_reset() -> None:
    with unanswered(Sums) as client:
        with pytest.raises(SessionLostError, match="an answer of it never came"):
            client.act([4, 0])
        client.reset()
        assert client.act([4, 0]).tolist() == [4.0, 0.0]


def test_an_answer_that_never_comes_is_nothing_to_a_policy_without_memory() -> None:
    with unanswered(Echo) as client:
        assert client.act([4, 0]).shape == (2,)


def test_a_client_whose_server_is_nowhere_says_where_and_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with client_of(f"tcp://127.0.0.1:{port}", timeout=0.3) as client:
        with pytest.raises(UnansweredError, match=f"tcp://127.0.0.1:{port}: Connection refused"):
            client.act([3, 0])


def test_agents_act_by_a_policy_each_as_they_would_without_a_server() -> None:
    rollout = MultiAgentRollout(
        lambda: ParallelPettingZooEnv(simple_spread_v3.parallel_env(N=2)),
        module={"agent_0": None, "agent_1": None},
        agent_to_module_mapping_fn={"agent_0": "agent_0", "agent_1": "agent_1"},
        model_config={"fcnet_hiddens": (8,), "use_lstm": True, "lstm_cell_size": 6},
        seed=1,
    )
    agents = ("agent_0", "agent_1")
    local = {agent: rollout.policy(agent, explore=False) for agent in agents}
    shelf = Shelf()
    for agent in agents:
        shelf.put(agent, rollout.policy(agent, explore=False), "1")
    env = simple_spread_v3.parallel_env(N=2, max_cycles=10)
    with PolicyServer(shelf, "tcp://127.0.0.1:0") as server, PolicyClient(server.address) as client:
        for episode in range(2):
            observations, _ = env.reset(seed=episode)
            for agent in agents:
                client.reset(policy=agent)
                local[agent].reset()
            while env.agents:
                actions = {agent: client.act(observations[agent], policy=agent) for agent in agents}
                assert actions == {agent: local[agent].act(observations[agent]) for agent in agents}
                observations, *_ = env.step(actions)
    shelf.close()


def test_a_client_needs_no_torch() -> None:
    program = f"import sys; sys.path[:] = {sys.path!r}\nfrom rollflow.policy import PolicyClient\n"
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_probe_is_no_warning_and_a_stranger_is(
    caplog: pytest.LogCaptureFixture, certificates: dict[str, ssl.SSLContext], *, has_tls: bool
) -> None:
    with served(policy_of(Sums), tls=certificates["server"] if has_tls else None) as (_, server):
        address = parse_address(server.address)
        assert isinstance(address, TcpAddress)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((address.host, address.port)) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1 << 16):  # until it is hung up on
                    pass
    [warning] = caplog.records
    assert "is refused: client: " in warning.message
