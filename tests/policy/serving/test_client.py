"""`PolicyClient` and its messages: sessions, refusals, and connections, clients and servers that come and go."""

import random
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import trustme
from held_envs import await_that
from remote_hosts import BrokenWire
from served_policies import ACTIONS, SECRET, Echo, Held, Sums, policy_of, served, value_of
from serving_process import serving
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import serve

from rollflow import Policy, PolicyClient
from rollflow.nodes import DefaultModule
from rollflow.policy.serving import BatchOptions, HttpServer
from rollflow.policy.serving.request import (
    ClosedError,
    OverloadedError,
    PartlyActedError,
    RequestError,
    ServingError,
    SessionLostError,
    UnansweredError,
    UnknownPolicyError,
    pack,
    unpack,
)
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import TcpAddress, parse_address


def client_of(address: str, **options: Any) -> PolicyClient:
    return PolicyClient(address, **{"secret": SECRET, "timeout": 30.0, **options})


@contextmanager
def broken_wire(url: str, drawn: Any) -> Iterator[tuple[BrokenWire, str]]:
    """A proxy before a server that cuts connections, and its address."""
    target = parse_address(url.replace("http", "tcp"))
    assert isinstance(target, TcpAddress)
    wire = BrokenWire(target, drawn)
    try:
        yield wire, wire.address.replace("tcp", "http")
    finally:
        wire.close()


def test_each_session_of_each_client_has_its_own_memory() -> None:
    with served(policy_of(Sums, 2.0)) as (_, server), client_of(server.url) as one, client_of(server.url) as two:
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
    with served(policy_of(Sums)) as (shelf, server), client_of(server.url) as client:
        observations = np.arange(6, dtype=np.float64).reshape(3, 2)
        assert client.act_batch(observations)[:, 0].tolist() == [0.0, 2.0, 4.0]
        assert client.act_batch(observations[::-1], sessions=[2, 1, 0])[:, 0].tolist() == [8.0, 4.0, 0.0]
        client.forget(1)
        assert client.act_batch(observations[1:], sessions=[1, 2])[:, 0].tolist() == [2.0, 12.0]
        assert len(shelf.batcher("a").book) == 3
        with pytest.raises(RequestError, match="session 1 comes more than once in one call"):
            client.act_batch(observations[1:], sessions=[1, 1])
        for count, sessions in ((2, [1]), (0, None), (1, [])):
            told = f"^{count} observations for {len(sessions or [])} sessions, expected one for each, at least one$"
            with pytest.raises(RequestError, match=told):
                client.act_batch(observations[:count], sessions=sessions)


def test_items_of_any_space_come_back_as_the_policy_gives_them() -> None:
    parts = {"place": gym.spaces.Tuple([gym.spaces.Discrete(4), gym.spaces.Box(0, 9, (2,))])}
    observed, chosen = gym.spaces.Dict(parts), gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.MultiBinary(2)])
    policy = Policy(DefaultModule, observation_space=observed, action_space=chosen, explore=False)
    rows = {"place": (np.array([1, 3]), np.ones((2, 2), np.float32))}
    with served(policy) as (_, server), client_of(server.url) as client:
        assert (client.observation_space, client.action_space) == (observed, chosen)
        one_by_one = [{"place": (number, np.ones(2, np.float32))} for number in (1, 3)]
        local = policy.act_batch(rows)
        for acted in (client.act_batch(rows), client.act_batch(one_by_one)):
            for mine, theirs in zip(acted, local, strict=True):
                np.testing.assert_array_equal(mine, theirs, strict=True)
        with pytest.raises(RequestError, match="the observations differ, expected those of one space"):
            client.act_batch([one_by_one[0], {"place": 1}])
        acted = client.act({"place": (1, [1, 1])})
        assert isinstance(acted, tuple)
        assert acted in chosen
        assert acted[0] == local[0][0]


def test_policies_are_asked_for_by_name_as_agents_have_them() -> None:
    with served(policy_of(Echo, 1.0), policy_of(Sums, 2.0)) as (shelf, server):
        with client_of(server.url) as client:
            assert sorted(client.policies) == ["a", "b"]
            for _ in range(2):
                assert client.act([3, 0], session="env 1", policy="a").tolist() == [3.0, 1.0]
            assert client.act([3, 0], session="env 1", policy="b").tolist() == [3.0, 2.0]
            assert client.act([3, 0], session="env 1", policy="b").tolist() == [6.0, 2.0]
            with pytest.raises(UnknownPolicyError, match="policy is None, expected one of those that are served: a, b"):
                client.act([3, 0])
        with client_of(server.url, policy="c") as client:
            with pytest.raises(UnknownPolicyError, match="no policy 'c'"):
                client.act([3, 0])
            shelf.put("c", policy_of(Echo, 3.0), "1")
            assert client.act([3, 0]).tolist() == [3.0, 3.0]


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    """A server for tests that leave it as it is."""
    with served(policy_of(Sums), max_body=8192) as (_, server):
        yield server


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ([1, 2, 3], r"observation has shape \[3\], expected float32\[2\]"),
        (object(), "object can't be sent, expected numbers"),
        (np.zeros(5000, np.float32), "the request has 20[0-9]* bytes, expected at most 8192"),
    ],
)
def test_bad_input_is_refused_by_field_and_disturbs_nothing(observation: Any, text: str, server: HttpServer) -> None:
    with client_of(server.url) as client:
        client.act([3, 0])
        with pytest.raises(RequestError, match=text):
            client.act(observation)
        assert client.act([4, 0]).tolist() == [7.0, 0.0]


@contextmanager
def raw(server: HttpServer, name: str | None = "raw") -> Iterator[ClientConnection]:
    """A connection made by hand, of a client that has said hello under a name; None: it has not."""
    headers = {"Authorization": f"Bearer {SECRET.encode().decode('latin-1')}"}  # bytes as they are
    with connect(f"{server.url.replace('http', 'ws')}/v1/stream", additional_headers=headers) as connection:
        if name is not None:
            assert asked(connection, hello=2, client=name)["hello"] == 2
        yield connection


def asked(connection: ClientConnection, **fields: Any) -> dict[str, Any]:
    """The answer to a message."""
    connection.send(pack(fields))
    answer: dict[str, Any] = unpack(connection.recv(30, decode=False))
    return answer


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"observations": np.zeros((1, 3))}, 422, "observations has shape [1, 3], expected float32[1, 2]"),
        ({"observations": np.full((1, 2), np.nan)}, 422, "observations has NaN or infinite numbers"),
        ({"sessions": None}, 422, "'sessions' is missing, expected a list with one for each observation"),
        ({"sessions": []}, 422, "'sessions' is [], expected a list with one for each of 'sessions'"),
        ({"begins": [True, False]}, 422, "'begins' is [True, False], expected a list with one for each of"),
        ({"policy": "z"}, 404, "no policy 'z' is served; served: a"),
        ({"policy": 7}, 404, "'policy' is 7, expected one of those that are served: a"),
        ({"more": 1}, 422, "unknown field 'more', expected begins, observations"),
        ({"hello": 1}, 426, "'hello' is 1, expected 2: the protocol's version here"),
        ({"hello": 2, "client": ""}, 422, "'client' is '', expected a text"),
        ({"forget": "x", "policy": "z"}, 404, "no policy 'z' is served; served: a"),
        (
            {"begins": [False]},
            410,
            "session 'x' has no memory here: it never began, it was forgotten, or a new version",
        ),
    ],
)
def test_the_server_looks_at_every_field(fields: dict[str, Any], status: int, text: str, server: HttpServer) -> None:
    whole = {"policy": "a", "observations": [[1, 0]], "sessions": ["x"], "begins": [True]}
    with raw(server, text) as connection:
        answer = asked(connection, **{**whole, "id": 3, **fields})
        [refusal] = answer.get("refused", [answer])  # for each observation apart, once the request itself is sound
        assert (answer["id"], refusal["status"], refusal["error"][: len(text)]) == (3, status, text)
        assert asked(connection, **whole)["actions"].tolist() == [[1.0, 0.0]]


@pytest.mark.slow
def test_failures_to_agree_are_told_apart(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "pem")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with served(policy_of(Sums)) as (_, server):
        for options, text in (({"secret": "another"}, "has another secret"), ({"secret": None}, "asks for a secret")):
            with client_of(server.url, **options) as client, pytest.raises(WireError, match=text):
                client.act([3, 0])
        with client_of(server.url.replace("http", "https")) as client, pytest.raises(WireError, match="speaks no TLS"):
            client.act([3, 0])
    with served(policy_of(Sums), certificate=tmp_path / "pem") as (_, server):
        with client_of(server.url, tls=trusting) as client:
            assert client.act([3, 0]).tolist() == [3.0, 0.0]
        with client_of(server.url) as client, pytest.raises(WireError, match="can't be trusted, or speaks no TLS"):
            client.act([3, 0])
        with client_of(server.url.replace("https", "http"), timeout=0.5) as client:
            with pytest.raises(UnansweredError, match="it hangs up before it answers; expected https:// if it speaks"):
                client.act([3, 0])


@pytest.mark.parametrize(
    ("welcome", "text"),
    [
        ({"error": "'hello' is 2, expected 3"}, "refuses this client: \"'hello' is 2, expected 3\""),
        ({"hello": 2}, "sends what this client does not understand: KeyError"),
        (None, "has no /v1/stream there, expected"),
    ],
)
def test_a_server_of_another_kind_or_version_is_none(welcome: Any, text: str) -> None:
    def other(connection: Any) -> None:
        connection.send(pack(welcome))

    def refuse(connection: Any, request: Any) -> Any:
        return None if welcome is not None else connection.respond(404, "not here")

    with serve(other, "127.0.0.1", 0, process_request=refuse) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        port = server.socket.getsockname()[1]
        try:
            with client_of(f"http://127.0.0.1:{port}") as client, pytest.raises(WireError, match=text):
                client.act([3, 0])
        finally:
            server.shutdown()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "127.0.0.1:1", "http://", "http://there/path"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(WireError, match=f"address '{address}', expected 'http://host:port' or 'https://host:port'"):
        PolicyClient(address)


def test_observations_of_one_request_may_fail_apart() -> None:
    held = Held(policy_of(Sums))
    with served(held, options=BatchOptions(max_batch=2, max_waiting=2)) as (_, server), client_of(server.url) as client:
        held.go.release(64)
        with pytest.raises(PartlyActedError) as raised:
            client.act_batch(np.ones((64, 2)))
        assert {len(raised.value.actions) + len(raised.value.errors)} == {64}
        assert {type(error) for error in raised.value.errors.values()} == {OverloadedError}
        assert {str(error) for error in raised.value.errors.values()} == {"2 requests wait already; ask again later"}
        assert all(action.tolist() == [1.0, 0.0] for action in raised.value.actions.values())
        place, other = next(iter(raised.value.actions)), next(iter(raised.value.errors))
        assert client.act_batch(np.ones((2, 2)), sessions=[place, other])[:, 0].tolist() == [2.0, 1.0]


def test_a_failed_pass_says_so_to_its_requests() -> None:
    with served(policy_of(Echo)) as (shelf, server), client_of(server.url) as client:
        with pytest.raises(ServingError, match="ValueError: thirteen"):
            client.act([13, 0])
        assert value_of(shelf.meters, "failed_total") == 1
        assert client.act([12, 0]).tolist() == [12.0, 0.0]


def test_a_client_that_leaves_takes_its_sessions_along() -> None:
    with served(policy_of(Sums)) as (shelf, server):
        with client_of(server.url) as client:
            client.act_batch(np.ones((5, 2)))
            assert len(shelf.batcher("a").book) == 5
        await_that(lambda: not len(shelf.batcher("a").book))
        with pytest.raises(ClosedError):
            client.act([1, 0])


def test_a_session_goes_on_by_the_next_connection_until_the_server_forgets_it() -> None:
    with served(policy_of(Sums)) as (shelf, server), broken_wire(server.url, lambda: None) as (wire, address):
        with client_of(address) as client:
            assert client.act([1, 0]).tolist() == [1.0, 0.0]
            wire.go_down()
            await_that(lambda: client._socket is None)
            wire.is_down = False
            assert client.act([2, 0]).tolist() == [3.0, 0.0]
            wire.go_down()
            await_that(lambda: client._socket is None)
            shelf.forget_client(str(client._hello["client"]))
            wire.is_down = False
            with pytest.raises(SessionLostError, match="session 'default' has no memory here"):
                client.act([2, 0])
            client.reset()
            assert client.act([2, 0]).tolist() == [2.0, 0.0]


@pytest.mark.parametrize(("module", "session"), [(Sums, "default"), (Sums, None), (Echo, "default")])
def test_a_request_whose_connection_breaks_is_asked_again_unless_it_has_a_memory(module: Any, session: Any) -> None:
    held = Held(policy_of(module))
    with served(held) as (_, server), broken_wire(server.url, lambda: None) as (wire, address):
        with client_of(address) as client, ThreadPoolExecutor(1) as pool:
            acted = pool.submit(client.act, [1, 0], session=session)
            assert held.begun.acquire(timeout=30)
            wire.go_down()
            wire.is_down = False
            held.go.release(10)
            if module is Echo or session is None:
                assert acted.result(30).tolist() == [1.0, 0.0]
                return
            with pytest.raises(UnansweredError, match="lost the connection while a request was under way"):
                acted.result(30)
            with pytest.raises(SessionLostError, match="expected reset"):
                client.act([2, 0])
            client.reset()
            assert client.act([5, 0]).tolist() == [5.0, 0.0]


def test_a_policy_that_the_next_server_lacks_is_named_after_a_break() -> None:
    held = Held(policy_of(Sums))
    with served(held) as (_, server), served(policy_of(Sums), names="b") as (_, other):
        with broken_wire(server.url, lambda: None) as (wire, address):
            with client_of(address) as client, ThreadPoolExecutor(1) as pool:
                acted = pool.submit(client.act, [1, 0], policy="a")
                assert held.begun.acquire(timeout=30)
                wire.go_down()
                wire.move_to(parse_address(other.url.replace("http", "tcp")))
                wire.is_down = False
                with pytest.raises(UnknownPolicyError, match="'a'"):
                    acted.result(30)
                held.go.release(10)


def sums_of(client: PolicyClient, session: int, steps: int) -> int:
    """Check the sum after each of many steps of a session; how often it was lost."""
    total, lost = 0, 0
    rng = random.Random(session)
    for _ in range(steps):
        number = rng.randrange(1, 100)
        try:
            first, _ = client.act([number, 0], session=session)
        except (SessionLostError, UnansweredError):
            client.reset(session)
            total, lost = 0, lost + 1
            continue
        total += number
        assert first == total  # acted on once, and by its own memory
    return lost


@pytest.mark.slow
def test_connections_that_are_cut_at_drawn_moments_lose_sessions_and_mix_none_up() -> None:
    rng = random.Random(0)
    with served(policy_of(Sums)) as (_, server):
        with broken_wire(server.url, lambda: rng.randrange(1, 20_000)) as (wire, address):
            with client_of(address, timeout=60.0) as client, ThreadPoolExecutor(8) as pool:
                ran = [pool.submit(sums_of, client, session, 150) for session in range(8)]
                lost = [each.result(120) for each in ran]
                assert wire.cuts >= 5
                assert 0 < max(lost) <= wire.cuts


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_server_that_ends_or_freezes_under_load_says_what_is_lost(tmp_path: Path, how: signal.Signals) -> None:
    policy_of(Sums).save(tmp_path / "sums")
    with serving(str(tmp_path / "sums")) as (process, url):
        with client_of(url, timeout=60.0, heartbeat=0.2) as client, ThreadPoolExecutor(8) as pool:
            ran = [pool.submit(sums_of, client, session, 300) for session in range(8)]
            await_that(lambda: client._last_number > 800)
            process.send_signal(how)
            await_that(lambda: bool(client._problem))  # it is given up, and dialled again
            if how is signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
                assert {each.result(120) for each in ran} <= {0, 1}
                return
            process.wait(30)
            with serving(str(tmp_path / "sums"), "--http", url.removeprefix("http://")):
                assert [each.result(120) for each in ran] == [1] * 8


@pytest.mark.wait_times(first_word_s=0.01)
def test_a_client_whose_server_stands_still_says_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    held = Held(policy_of(Echo))
    with served(held) as (_, server), client_of(server.url) as client, ThreadPoolExecutor(1) as pool:
        acted = pool.submit(client.act, [3, 0])
        await_that(lambda: "has not answered yet" in caplog.text)
        held.go.release(10)
        acted.result()


@pytest.mark.parametrize("module", [Sums, Echo])
def test_an_answer_that_never_comes_loses_a_session_with_a_memory_until_it_is_reset(module: Any) -> None:
    held = Held(policy_of(module))
    with served(held) as (_, server), client_of(server.url) as client:
        client.policies  # noqa: B018  # it is connected
        client.timeout = 0.2
        with pytest.raises(UnansweredError, match=r"has not answered within 0\.2 s"):
            client.act([3, 0])
        held.go.release(10)
        client.timeout = 30.0
        if module is Sums:
            with pytest.raises(SessionLostError, match="an answer of it never came"):
                client.act([4, 0])
            client.reset()
        assert client.act([4, 0]).tolist() == [4.0, 0.0]


@pytest.mark.wait_times(first_pause_s=0.001)
def test_a_client_whose_server_is_nowhere_says_where_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with caplog.at_level("INFO"), client_of(f"http://127.0.0.1:{port}", timeout=0.3) as client:
        with pytest.raises(UnansweredError, match=f"http://127.0.0.1:{port} has not answered .*: Connection refused"):
            client.act([3, 0])
    assert caplog.text.count("it is dialled again") == 1


USES = {"PolicyClient": "PolicyClient('http://127.0.0.1:1')", "serving": "serving.HttpServer"}


@pytest.mark.parametrize(
    ("package", "name"), [("websockets", "PolicyClient"), ("uvicorn", "serving"), ("prometheus_client", "serving")]
)
def test_without_a_package_of_serving_the_extra_is_named(package: str, name: str) -> None:
    program = f"import sys; sys.path[:] = {sys.path!r}; sys.modules['{package}'] = None\n"
    program += f"from rollflow.policy import {name}\nprint('imported', flush=True)\n{USES[name]}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "imported\n", ran.stderr
    assert ran.stderr.endswith(f"{name} takes the package {package}: pip install 'rollflow[serve]'\n")
