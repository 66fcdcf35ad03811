"""Node, and the folder of the example of a host in JavaScript, with its package of msgpack installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = Path("examples", "env_host_node")
POLICY_CLIENT = "node", "--experimental-websocket"  # Node 20 has WebSockets so
PACKAGE = Path("node_modules", "@msgpack", "msgpack")
FIRST_VERSION = 20


@pytest.fixture(scope="session")
def node() -> None:
    """Skips where no node is that the examples run on."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    version = subprocess.check_output(["node", "--version"], text=True)
    if int(version.lstrip("v").split(".")[0]) < FIRST_VERSION:
        pytest.skip(f"node is {version.strip()}, expected {FIRST_VERSION} or newer")


@pytest.fixture(scope="session")
def folder(node: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder where its package is installed, or a copy where it can be."""
    if (ROOT / EXAMPLE / PACKAGE).exists():
        return ROOT / EXAMPLE
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, and the example has no package of msgpack")
    copy = tmp_path_factory.mktemp("node")
    shutil.copytree(ROOT / EXAMPLE, copy / EXAMPLE)
    shutil.copytree(ROOT / "docs", copy / "docs")
    install = ["npm", "install", "--prefer-offline", "--fetch-retries=0"]
    install += ["--no-audit", "--no-fund", "--no-package-lock"]
    try:
        subprocess.run(install, cwd=copy / EXAMPLE, check=True, capture_output=True, text=True, timeout=60)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"npm can't install the package of msgpack: {error.stderr[-500:]}")
    except subprocess.TimeoutExpired:
        pytest.skip("npm can't install the package of msgpack within 60 s")
    return copy / EXAMPLE
