"""Log lines of programs that have set up no log carry the time; those of others are left to them."""

import re
import subprocess
import sys

import pytest

PROGRAM = """
import logging
{setup}
from rollflow.nodes import EnvHost
from rollflow.stream.data.errors import WireError
with EnvHost("CartPole-v1") as host:
    try:
        host.connect("tcp://127.0.0.1:1", retry_s=0)
    except WireError:
        pass
"""
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
TOLD = r"waiting: gateway tcp://127\.0\.0\.1:1: Connection refused; .*\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("", TIME + TOLD),
        ("logging.basicConfig(format='mine %(message)s')", "mine " + TOLD),
        ("logging.getLogger('rollflow').addHandler(logging.StreamHandler())", TOLD),
        ("logging.disable(logging.CRITICAL)", ""),
    ],
    ids=["no log", "a log", "a handler", "switched off"],
)
def test_a_program_without_a_log_gets_the_time_with_its_lines(setup: str, told: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setup=setup)], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(told, ran.stderr), ran.stderr
