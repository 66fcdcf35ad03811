"""The bytes in the protocol's documentation are those of the messages, and its tables have all that hosts speak."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from wire_messages import EXAMPLES
from wire_values import same

from rollflow.stream.wire import FrameDecoder, decode, encode
from rollflow.stream.wire.codec.field import checks_of
from rollflow.stream.wire.codec.limits import MAX_HEADER, MAX_OTHER_KEYS, MAX_VALUES
from rollflow.stream.wire.codec.message import KINDS
from rollflow.stream.wire.codec.value import DTYPES

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "protocol.md").read_text()
BLOCKS = re.findall(r"^```hex ([a-z ]+)\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
# Messages and codes between processes of the same version of rollflow.
PRIVATE = {
    *("cut", "done", "fragment", "metrics"),
    *("settings", "states", "turn", "weights"),
}
PRIVATE_CODES = {"credit", "memory", "undelivered", "address", "lost"}


def bytes_of(block: str) -> bytes:
    """The bytes of a block; what is behind a semicolon is for people."""
    return bytes.fromhex("".join(line.split(";")[0] for line in block.splitlines()))


def fields_of(message: Any) -> Any:
    if dataclasses.is_dataclass(message):
        return {name: fields_of(getattr(message, name)) for name in checks_of(type(message))}
    return [fields_of(part) for part in message] if isinstance(message, tuple) else message


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_the_bytes_of_an_example_are_its_message_and_the_other_way_round(name: str, block: str) -> None:
    (frame,) = FrameDecoder(1 << 16).feed(bytes_of(block))
    message = decode(frame)
    assert type(message) is type(EXAMPLES[name])
    assert same(fields_of(message), fields_of(EXAMPLES[name]))
    assert b"".join(encode(EXAMPLES[name])).hex() == bytes_of(block).hex()


def test_every_example_of_what_hosts_speak_is_there_once() -> None:
    of_hosts = [name for name, message in EXAMPLES.items() if message.kind not in PRIVATE]
    assert sorted(name for name, _ in BLOCKS) == sorted(of_hosts)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - PRIVATE))
def test_every_field_of_a_message_is_explained(kind: str) -> None:
    section = DOCUMENT.split(f"### `{kind}`")[1].split("\n#")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(checks_of(KINDS[kind]))


def test_every_code_of_a_refusal_is_explained() -> None:
    table = DOCUMENT.split("### Codes of `refused`")[1].split("\n## ")[0]
    told = set(re.findall(r"^\| `([a-z]+)`", table, re.MULTILINE))
    assert told == codes_raised() - PRIVATE_CODES | {"tls"}  # which who has the sockets raises


def codes_raised() -> set[str]:
    """The codes that are named where errors are made."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "stream" / "wire").rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        str(call.args[1].value)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "WireError" and len(call.args) == 2
        if isinstance(call.args[1], ast.Constant)
    }


def test_every_dtype_and_limit_is_named() -> None:
    table = DOCUMENT.replace(r"\|", "|")
    for name in DTYPES:
        assert f"`{name}`" in table
    for limit in (f"{MAX_VALUES:,}", str(MAX_OTHER_KEYS), f"{MAX_HEADER >> 20} MiB"):
        assert limit in table
