"""Options, hypothesis profiles and folders that every test shares."""

import datetime
import gc
import os
import signal
import ssl
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import trustme
from lane_clock import LaneClock, StoppedClock

from rollflow.stream.net.backoff import waiting
from rollflow.stream.observe import run_socket

# How long an example takes says nothing of whether it is right.
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("random", deadline=None, database=None, max_examples=100)
hypothesis.settings.load_profile("quick")

YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
SLOW_TIMEOUT_S = 600  # most take a minute or two where nothing else runs
SLOW_CASES = {"processes", "rollouts", "hosts", "rollouts on hosts", "workers", "uvloop"}
"""Values of parameters with which a test is slow: those that start processes, and an event loop like asyncio's."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests as well, after the others")


def pytest_configure(config: pytest.Config) -> None:
    """Have property tests draw more examples in the long run."""
    if config.getoption("--slow") and hypothesis.settings.get_current_profile_name() == "quick":
        hypothesis.settings.load_profile("fixed")


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("--hypothesis-seed")
    return f"property tests: profile {hypothesis.settings.get_current_profile_name()}, seed {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the slow tests to the end, with more time for each, or leave them out."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            if not SLOW_CASES.isdisjoint(item.callspec.id.split("-")):
                item.add_marker(pytest.mark.slow)
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    for item in slow:
        item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if config.getoption("--slow"):
        items[:] = [*quick, *slow]
    elif slow:
        items[:] = quick
        config.hook.pytest_deselected(items=slow)


def pytest_sessionstart() -> None:
    """Have Ctrl-C raise KeyboardInterrupt, as tests expect: what a script starts with `&` ignores it from the start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Have torch use one thread, and keep what was collected out of every later garbage collection: tests ask for many.

    Where other processes use the cores, threads that wait for each other take milliseconds for small tensors.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary folder of this test process alone: tests look at what a run has left there.

    Sockets of runs lie elsewhere: a process that is killed leaves its own.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        patched.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("r")))
        patched.setattr(tempfile, "tempdir", os.environ["TMPDIR"])
        yield


@pytest.fixture(autouse=True)
def _wait_times(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the test's waits take the times of its marks `wait_times`, of which the nearest counts."""
    with waiting(**ChainMap(*(mark.kwargs for mark in request.node.iter_markers("wait_times")))):
        yield


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Every asynchronous test runs on each of these."""
    return request.param


@pytest.fixture(scope="session")
def certificates() -> dict[str, ssl.SSLContext]:
    """Contexts by what is theirs.

    server, client                    good ones; each asks for the other's certificate
    without                           a client that has no certificate
    other client, other server        with a certificate of an authority that nobody here trusts
    misnamed server, expired server   with one for another name, and with one that was good until yesterday
    """
    authority, other = trustme.CA(), trustme.CA()
    issued = {
        "client": authority.issue_cert("host@example.org"),
        "without": None,
        "other client": other.issue_cert("host@example.org"),
        "server": authority.issue_cert("127.0.0.1"),
        "other server": other.issue_cert("127.0.0.1"),
        "misnamed server": authority.issue_cert("127.0.0.2"),
        "expired server": authority.issue_cert("127.0.0.1", not_after=YESTERDAY),
    }
    contexts = {}
    for name, certificate in issued.items():
        is_server = name.endswith("server")
        purpose = ssl.Purpose.CLIENT_AUTH if is_server else ssl.Purpose.SERVER_AUTH
        contexts[name] = context = ssl.create_default_context(purpose)
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        if certificate is not None:
            certificate.configure_cert(context)
    return contexts


@pytest.fixture
def forward() -> Iterator[Callable[[float], None]]:
    """Lets time go by for those who wait for environments; it stands still otherwise."""
    now = [0.0]

    def forward(seconds: float) -> None:
        now[0] += seconds

    with waiting(clock=lambda: now[0]):
        yield forward


@pytest.fixture
def lane_clock() -> Iterator[LaneClock]:
    """A clock by which lanes are late; those that are lost come back at once."""
    clock = LaneClock()
    with waiting(clock=clock, first_pause_s=0.0):
        yield clock


@pytest.fixture
def stopped_clock() -> Iterator[None]:
    """Have no lane be late, however slow the machine is, but where a child of this process is stopped."""
    with waiting(clock=StoppedClock(), first_pause_s=0.0):
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the sockets of the test's runs alone."""
    monkeypatch.setenv(run_socket.FOLDER, str(tmp_path / "runs"))
    return tmp_path / "runs"
