"""Refusals between rollout and trainer: both ends say what is wrong, and neither waits without a word."""

import re
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import HASTY, SHORT, failing, feeding, graph_of, rollout_of, running, trainer
from numbered_module import NumberedModule
from remote_hosts import hosting, listening
from remote_rollouts import await_that, makers

from rollflow import (
    DatasetSource,
    DefaultModelConfig,
    EpsilonGreedy,
    Forward,
    GeneralAdvantageEstimation,
    Graph,
    RemoteEnvs,
    Replay,
    Rollout,
    Timeouts,
    TrainerStream,
    VTrace,
    Watch,
    feed,
)
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.sinks import Batches, Sources, TrainerProcess, TrainerSink
from rollflow.sinks.trainer.stream import _failure_of
from rollflow.stream.data.errors import RunError, WireError
from rollflow.stream.wire import Fragment, Hello, Limits, SourceConnection, SourceSession, TcpAddress, encode

SECRET = "correct horse battery staple"


def refused_by(stream: TrainerStream, told: str) -> None:
    """The stream turns somebody away, and says why once it has waited for long enough."""
    stream._listener.open()
    await_that(lambda: any(re.search(told, each) for each in stream._listener.refusals))
    with pytest.raises(RunError, match=f"0 of 1 rollouts came within 0.01 s: listening on .*{told}"):
        next(iter(stream))


def test_a_secret_is_proved_by_both_ends() -> None:
    with trainer(secret=SECRET, yields="fragments") as stream:
        with feeding(stream.address, num_fragments=2, sink={"secret": SECRET}):
            assert len(list(stream)) == 2


@pytest.mark.parametrize(
    ("at_trainer", "at_rollout", "told"),
    [
        ({"secret": SECRET}, {"secret": "another"}, "proof.mac: the rollout has another secret"),
        ({"secret": SECRET}, {}, "the trainer asks for a secret, and this rollout has none"),
        (
            {"yields": "fragments"},
            {"sends": "batches"},
            "this rollout sends train batches, and the trainer has yields='fragments'",
        ),
    ],
)
def test_a_rollout_that_does_not_fit_is_refused_at_both_ends(
    at_trainer: dict[str, Any], at_rollout: dict[str, Any], told: str
) -> None:
    with trainer(join_timeout=0.01, **at_trainer) as stream:
        with pytest.raises(WireError, match=told), feeding(stream.address, sink=at_rollout, num_fragments=1) as feed:
            refused_by(stream, told)
            feed.ended.result(60)


IN_MEMORY = {"address": "shm:/x", "tls": ssl.create_default_context()}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"on_excess": "pace"}, "on_excess='pace' is for fragments older than max_lag, expected max_lag=0 or more"),
        ({"on_excess": "mask"}, "on_excess='mask' is for fragments older than max_lag"),
        ({"on_excess": "mask", "yields": "fragments"}, "is for batches, expected another one with yields='fragments'"),
        (
            {"on_excess": "pace", "yields": Batches(fragments=3)},
            "a batch is one fragment of every lane, expected Batch",
        ),
        ({"module": "x"}, "module is 'x', expected a module, or module id -> module"),
        ({"module": NumberedModule}, "module is <class .*NumberedModule'>, expected a module"),
        (
            {"watch": Watch(on_stall="raise")},
            "on_stall is 'raise', expected 'log': a trainer's stream has no stall doctor",
        ),
        ({"yields": "steps"}, "yields is 'steps', expected one of 'batches', 'fragments', 'Batches\\(...\\)'"),
        ({"sources": 0}, "sources is 0, expected a whole number from 1 on"),
        ({"on_excess": "wait"}, "on_excess is 'wait', expected one of 'drop', 'pace', 'mask', 'raise'"),
        ({"max_lag": -1}, "max_lag is -1, expected a whole number from 0 on"),
        ({"on_excess": "raise"}, "on_excess='raise' is for fragments older than max_lag"),
        ({"secret": 5}, "secret is of type int, expected text or bytes"),
        ({"secret": True}, "secret is of type bool, expected text or bytes"),
        ({"address": None}, "address None, expected a string: 'tcp://host:port', .*, 'unix:/path' or 'shm:/path'"),
        ({"address": "tcp://host"}, "address 'tcp://host', expected a port behind it: 'tcp://host:port'"),
        ({"tls": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}, "tls is a client's context, expected a server's"),
        ({"address": "http://x:1"}, "address 'http://x:1', expected 'tcp://host:port', .* or 'shm:/path'"),
        ({"address": "tcp://0.0.0.0:7020"}, "without a secret, expected one, or a loopback address or Unix socket"),
        (IN_MEMORY, "address 'shm:/x' with tls: memory is not encrypted, expected tls=None"),
        *(
            ({"address": address}, "expected an absolute path of at most 103 bytes behind 'shm:'")
            for address in ("shm:x", "shm:/" + "x" * 103, "shm:/\0")
        ),
    ],
)
def test_what_a_stream_can_not_work_with_is_refused_when_it_is_made(options: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, WireError), match=told):
        TrainerStream(**{"address": "tcp://127.0.0.1:0", **options})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (partial(Batches, learner_connector=3), "learner_connector is 3, expected a function that returns a piece"),
        (partial(Batches, fragments=0), "fragments is 0, expected a whole number from 1 on"),
        (partial(feed, None, "tcp://127.0.0.1:1"), "rollout is None, expected a Rollout or a MultiAgentRollout"),
    ],
)
def test_what_is_no_batch_and_no_rollout_is_refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            partial(TrainerStream, fragments_per_batch=4, trace=None),
            r"TrainerStream has no keyword 'fragments_per_batch', expected yields=.*; 'trace', expected watch=",
        ),
        (
            lambda address: TrainerProcess(print, stream={"log_x": "steps"}),
            r"TrainerStream has no keyword 'log_x', expected watch=Watch\(log_x=…\)",
        ),
        (
            lambda address: TrainerProcess(print, stream={"max_lagg": 1}),
            "TrainerStream has no keyword 'max_lagg', expected 'max_lag'",
        ),
        (
            lambda address: TrainerProcess(print, yields="fragments", learner_connector=None, lingers=1),
            r"TrainerProcess has no keyword 'yields', expected stream=dict\(yields=…\); 'learner_connector', expected "
            r"stream=dict\(yields=Batches\(learner_connector=…\)\); 'lingers', expected 'linger'",
        ),
        (
            lambda address: TrainerProcess(print, stream={1: 2}),
            r"TrainerStream has no keyword 1, expected one of those in help\(TrainerStream\)",
        ),
        (
            partial(feed, None, trace="x"),
            r"feed has no keyword 'trace', expected watch=Watch\(trace=…\) of the rollout",
        ),
        (partial(feed, None, max_lag=1), r"feed has no keyword 'max_lag', expected TrainerStream\(max_lag=…\)"),
        (
            lambda address: TrainerProcess(print, stream={"address": address}),
            r"TrainerStream has no keyword 'address', expected none, for it has its own",
        ),
        (
            partial(TrainerStream, join_timeout=4, prefetched=2),
            r"'join_timeout', expected sources=Sources\(join_timeout=…\); 'prefetched', expected 'prefetch'",
        ),
        (partial(TrainerSink, lingers=4), "TrainerSink has no keyword 'lingers', expected 'linger'"),
        (partial(DatasetSource, batchsize=4), "DatasetSource has no keyword 'batchsize', expected 'batch_size'"),
        (
            partial(RolloutHost, secret="s"),
            r"RolloutHost has no keyword 'secret', expected connect\(address, secret=…\), or listening",
        ),
        (partial(EnvHost, tls=None), r"EnvHost has no keyword 'tls', expected connect\(address, tls=…\), or listening"),
    ],
)
def test_a_keyword_that_has_moved_is_told_its_place(call: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        call("tcp://127.0.0.1:0")


@pytest.mark.parametrize(
    ("made", "wrong", "told"),
    [
        (GeneralAdvantageEstimation, "lam", "lambda_=…"),
        (GeneralAdvantageEstimation, "gae_lambda", "lambda_=…"),
        (VTrace, "rho_clipped", "'rho_clip'"),
        (EpsilonGreedy, "epsilon", "schedule=…"),
        (DefaultModelConfig, "fcnet_hidden", "'fcnet_hiddens'"),
        (Replay, "batchsize", "'batch_size'"),
        (Batches, "fragment", "'fragments'"),
        (Sources, "join_timeouts", "'join_timeout'"),
        (Forward, "device", "device=… of the rollout"),
        (Forward, "maxbatch", "'max_batch'"),
        (Timeouts, "steps", "'step'"),
        (Watch, "stall_afters", "'stall_after'"),
    ],
)
def test_a_constructor_tells_the_keyword_that_was_meant(made: type, wrong: str, told: str) -> None:
    with pytest.raises(TypeError, match=f"^{made.__name__} has no keyword '{wrong}', expected {told}$"):
        made(**{wrong: 1})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"linger": -1}, "linger is -1, expected seconds from 0 on"),
        ({"max_bytes": 0}, "max_bytes is 0, expected a whole number from 1 on"),
        ({"secret": 5}, "secret is of type int, expected text or bytes"),
        ({"address": None}, "address None, expected a string: .*'shm:/path'"),
        ({"address": "tcp://example.org:7020"}, "without a secret, expected one, or a loopback address or Unix soc"),
        (IN_MEMORY, "address 'shm:/x' with tls: memory is not encrypted, expected tls=None"),
    ],
)
def test_what_a_sink_can_not_work_with_is_refused_when_it_is_made(options: dict[str, Any], told: str) -> None:
    given = {"address": "tcp://127.0.0.1:1", **options}
    with pytest.raises((ValueError, WireError), match=told):
        TrainerSink(**given)
    with pytest.raises((ValueError, WireError), match=told):
        feed(Rollout("CartPole-v1"), **given)


@pytest.mark.parametrize(
    ("name", "value"), [("learner_connector", lambda *_: GeneralAdvantageEstimation()), ("max_lag", 1)]
)
def test_how_batches_are_made_is_said_to_the_trainer(name: str, value: Any) -> None:
    rollout = Rollout("CartPole-v1", prefetch=1, **{name: value})
    with pytest.raises(ValueError, match=rf"the rollout has {name}=, .*: expected TrainerStream\(.*{name}=…\)+ there"):
        feed(rollout, "tcp://127.0.0.1:1")


def test_a_secret_that_is_none_and_shared_memory_are_refused_by_hosts_and_gateways_and_nothing_is_left_open() -> None:
    for make in (
        lambda: EnvHost(makers(1)).connect("tcp://127.0.0.1:1", secret=5),  # type: ignore[arg-type]
        lambda: RemoteEnvs.listen("tcp://127.0.0.1:0", secret=5),  # type: ignore[arg-type]
        lambda: RemoteEnvs.connect("tcp://127.0.0.1:1", secret=5),  # type: ignore[arg-type]
    ):
        with pytest.raises(WireError, match="secret is of type int, expected text or bytes"):
            make()
    for other in (RemoteEnvs.listen, lambda text: EnvHost(makers(1)).connect(text)):
        with pytest.raises(WireError, match=r"address 'shm:/x', expected 'tcp://host:port'"):
            other("shm:/x")


def test_an_address_that_is_none_or_taken_is_refused(tmp_path: Path) -> None:
    taken = pytest.raises(RunError, match=r"can't listen on tcp://127.0.0.1:.*Address already in use")
    with trainer() as stream, taken:
        TrainerStream(str(stream.address)).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"can't listen on shm:.*something else is there, expected nothing or a socket"):
        TrainerStream(f"shm:{tmp_path}/file").__enter__()
    assert (tmp_path / "file").exists()
    with pytest.raises(RunError, match=r"can't listen on unix:.*No such file or directory"):
        TrainerStream(f"unix:{tmp_path}/missing/trainer").__enter__()


def test_hosts_are_no_rollouts_and_a_trainer_is_no_gateway() -> None:
    with trainer(join_timeout=0.01) as stream:
        with pytest.raises(WireError, match=r"hello.role is 'env', expected 'source': this is a trainer"):
            with hosting(stream.address, makers(0), kind=EnvHost):
                refused_by(stream, "hello.role is 'env'")
    envs = listening()
    with hosting(envs.addresses[0], makers(0)):
        with Rollout(envs, module=NumberedModule(), fragment_length=8) as other:
            next(iter(other.fragments()))
            graph, rollout, sink = graph_of(envs.addresses[0], (0,), num_fragments=1)
            with (
                pytest.raises(WireError, match=r"hello.role is 'source', expected 'env'"),
                running(graph, rollout, sink) as feed,
            ):
                for _ in other.fragments():
                    if feed.ended.done():
                        break


@pytest.mark.slow
def test_a_sink_gets_what_it_was_told_to_send() -> None:
    with trainer(join_timeout=2.0, limits=HASTY) as stream:
        rollout, graph = rollout_of([0], num_fragments=2), Graph("no")
        sink = TrainerSink(stream.address, sends="batches")
        graph.add(rollout=rollout, passes_on=lambda fragments: fragments)
        graph.connect("rollout.fragments", "passes_on")
        graph.connect("passes_on", sink)
        with (
            pytest.raises(TypeError, match="a Fragment came to a sink that sends batches, expected these"),
            running(graph, rollout, sink) as feed,
        ):
            with pytest.raises((RunError, StopIteration)):
                next(iter(stream))
            feed.ended.result(60)


BOX = {"kind": "Box", "low": ["<f4", [2], bytes(2)], "high": []}
PART = {"agents": ["agent"], "action_space": {"kind": "Sphere"}}


@pytest.mark.parametrize(
    ("said", "fragment", "told"),
    [
        ({"parts": []}, None, "hello.metadata.parts is [], expected 1 or more"),
        ({"parts": [{**PART, "spaces": [{"kind": "Sphere"}]}]}, None, "Sphere"),
        ({"parts": [{**PART, "spaces": [BOX]}]}, None, "hello.metadata.parts[0].spaces[0]"),
        ({"version": 1.5}, None, "version is 1.5, expected a whole number"),
        ({"weights": {"a": "big"}}, None, "hello.metadata.weights['a'] is 'big', expected a list"),
        ({"sends": "letters"}, None, "sends is 'letters', expected one of fragments, batches"),
        ({}, {"rest": {}}, "layout is None, expected a map"),
        ({}, {"rest": {"layout": {"episodes": "x", "num_slots": -1}}}, "layout.num_slots is -1"),
        ({}, {"rest": {"batch": True}}, "a train batch among fragments"),
    ],
)
def test_a_rollout_that_says_or_sends_nonsense_is_refused(said: dict[str, Any], fragment: Any, told: str) -> None:
    with trainer(join_timeout=60.0) as stream:
        rollout, sink = rollout_of([0]), TrainerSink(str(stream.address))
        Graph("feed").connect(rollout.fragments, sink)
        hello = sink._uplink.hello()
        sink.close()
        raw = RawSource(stream, replace(hello, metadata={**hello.metadata, **said}))
        stream._begin_next()
        if fragment is not None:
            raw.welcomed()
            raw.sock.sendall(b"".join(encode(Fragment(0, 1, {}, **fragment))))
        assert told in raw.refusal()


class RawSource:
    """A source made by hand."""

    def __init__(self, stream: TrainerStream, hello: Hello) -> None:
        address: Any = stream.address
        self.sock = socket.create_connection((address.host, address.port))
        session = SourceSession(hello.session)
        session.given = 1
        self.connection = SourceConnection(hello, session, secret=None, limits=Limits(), now=0.0)

    def events(self) -> list[Any]:
        """The next ones."""
        while True:
            for buffer in self.connection.outgoing():
                self.sock.sendall(buffer)
            data = self.sock.recv(1 << 16)
            events = self.connection.receive(data, 0.0)
            if events or not data:
                return events

    def welcomed(self) -> None:
        """Wait until the trainer has taken it in."""
        self.events()
        await_that(lambda: self.connection.next)

    def refusal(self) -> str:
        """Return the trainer's last message."""
        while self.connection.error is None:
            self.events()
        self.sock.close()
        return str(self.connection.error)


def test_a_connection_may_be_encrypted_at_both_ends_and_not_at_one(certificates: dict[str, ssl.SSLContext]) -> None:
    server, client = certificates["server"], certificates["client"]
    with trainer(tls=server, secret=SECRET, yields="fragments") as stream:
        with feeding(stream.address, num_fragments=3, sink={"tls": client, "secret": SECRET}) as feed:
            assert sum(fragment.num_steps for fragment in stream) == feed.rollout.num_steps
    with trainer(tls=server, join_timeout=0.01) as stream:
        with (
            pytest.raises(WireError, match="the trainer speaks TLS and the rollout does not"),
            feeding(stream.address, num_fragments=1) as feed,
        ):
            refused_by(stream, "the trainer speaks TLS and the rollout does not")
            feed.ended.result(60)
    with pytest.raises(WireError, match="no host name to check in a certificate"):
        graph_of("unix:/tmp/trainer", (0,), sink={"tls": client})


def test_why_a_trainer_has_failed_is_told_to_its_rollouts_which_wait_for_another(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/trainer"
    with ThreadPoolExecutor() as threads:
        with failing(address, yields="fragments") as stream:
            fed = threads.submit(feed, rollout_of([0], num_fragments=3), stream.address, limits=SHORT)
            next(iter(stream))
        told = f"waiting: trainer {address}: it has failed: ZeroDivisionError: no steps"
        await_that(lambda: told in caplog.text)
        assert f"{told}; it is dialled again until it answers" in [record.getMessage() for record in caplog.records]
        with trainer(address, yields="fragments") as stream:
            assert [fragment.sequence for fragment in stream] == [0, 1, 2]
        fed.result(60)
    assert re.search(rf"trainer {address}: connected again after \d+\.\d s", caplog.text)


def test_why_a_trainer_has_failed_is_told_to_nobody_who_has_not_proved_the_secret() -> None:
    with pytest.raises(KeyError), trainer(secret=SECRET, join_timeout=0) as stream:
        with pytest.raises(RunError, match="0 of 1 rollouts came"):
            next(iter(stream))  # from now on it takes them in
        assert isinstance(stream.address, TcpAddress)
        stranger = socket.create_connection((stream.address.host, stream.address.port))
        await_that(lambda: list(stream._listener._loop.peers))
        raise KeyError("hunter2")
    with stranger:
        stranger.settimeout(60)
        assert stranger.recv(1 << 16) == b""


def test_leaving_a_trainer_by_no_error_of_its_own_is_no_failure() -> None:
    assert _failure_of(None) is None
    assert _failure_of(KeyboardInterrupt()) == _failure_of(SystemExit(0)) == "it was interrupted"
    assert _failure_of(ValueError("x")) == "it has failed: ValueError: x"
