"""Saved policies that were altered, by accident or on purpose: refused in words, and nothing of theirs is run."""

import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from altered_policies import FORBIDDEN, MOST_MEMORY, bounded_memory, change_arrays, no_change, sign
from drawn_policies import drawn_policy

from rollflow import Policy
from rollflow.nodes.policies.artifact_files import ARRAYS, POLICY
from rollflow.stream import PolicyError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy in the folder `p`."""
    folder = tmp_path_factory.mktemp("saved")
    policy = drawn_policy("box", "all", lstm=True)
    policy.trained_on = {"policy_version": 3}
    policy.save(folder / "p")
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of the folder, to be altered."""
    return Path(shutil.copytree(saved / "p", tmp_path / "p"))


# By accident


def test_any_bit_that_flips_is_found(copied: Path) -> None:
    rng = random.Random(0)
    for name in ("policy.json", *ARRAYS):
        data = (copied / name).read_bytes()
        for _ in range(60):
            place = rng.randrange(len(data))
            flipped = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
            (copied / name).write_bytes(flipped)
            with pytest.raises(PolicyError, match=name):
                Policy.load(copied)
        (copied / name).write_bytes(data)
    Policy.load(copied)


@pytest.mark.parametrize("name", ["policy.json", *ARRAYS])
def test_a_file_that_is_missing_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(PolicyError, match=f"{name} is missing"):
        Policy.load(copied)


@pytest.mark.parametrize("kind", ["missing", "empty folder", "text"])
def test_what_is_no_policy_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "p"
    if kind == "empty folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("a shopping list")
    with pytest.raises(PolicyError, match=r"there is no policy|is missing|is a file, expected a policy's folder"):
        Policy.load(path)


# On purpose


def test_an_artifact_that_was_signed_again_loads(copied: Path) -> None:
    sign(copied, no_change)
    Policy.load(copied)


def test_a_filter_without_its_statistics_is_named(copied: Path) -> None:
    def empty(manifest: dict[str, Any]) -> None:
        piece = next(each for each in manifest["env_to_module"]["pieces"] if each["name"].endswith("MeanStdFilter"))
        piece["state"] = {}

    sign(copied, empty)
    with pytest.raises(PolicyError, match=r"arrays that nothing uses: \['env_to_module/MeanStdFilter"):
        Policy.load(copied)

    def clear(arrays: dict[str, Any]) -> None:
        for name in [each for each in arrays if "MeanStdFilter" in each]:
            del arrays[name]

    change_arrays(copied, "state.safetensors", clear)
    sign(copied, empty)
    with pytest.raises(PolicyError, match=r"env_to_module/MeanStdFilter is the first part that differs"):
        Policy.load(copied)


def test_weights_that_are_missing_and_unused_are_both_named(copied: Path) -> None:
    def rename(arrays: dict[str, Any]) -> None:
        arrays["lstm.bias"] = arrays.pop("lstm.bias_ih_l0")

    change_arrays(copied, "module.safetensors", rename)
    with pytest.raises(PolicyError, match=r"missing: \['lstm.bias_ih_l0'\], and unused: \['lstm.bias'\]"):
        Policy.load(copied)


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    """Have a value be another one."""

    def change(manifest: Any) -> None:
        *before, last = path
        for key in before:
            manifest = manifest[key]
        manifest[last] = value

    return change


def rename_config(manifest: dict[str, Any]) -> None:
    manifest["module"]["settings"] = manifest["module"].pop("config")


CHANGES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    *((put(name, "env_to_module", "pieces", 0, "name"), "connector") for name in [*FORBIDDEN, 3, None, ["os:system"]]),
    (put("antigravity:fly", "module", "name"), r"'antigravity:fly' is not allowed .* allow=\['antigravity'\]"),
    (put(2, "format"), "newer rollflow"),
    (put("1", "format"), "whole number"),
    (rename_config, r"module: missing \['config'\], unknown \['settings'\]"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=range(len(CHANGES)))
def test_a_manifest_that_was_changed_is_refused_and_nothing_of_it_imported(
    copied: Path, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    sign(copied, change)
    with pytest.raises(PolicyError, match=text):
        Policy.load(copied, allow=["own_policy_parts"])
    assert "antigravity" not in sys.modules


TEXTS = ["", "[]", "null", "{", '{"digest": 1}', "[" * 100_000, '{"a":' * 50_000]
TEXTS += ['{"kind": 1, "kind": 2}', '{"a": NaN}']


@pytest.mark.parametrize("text", [*TEXTS, "\x00", '"' + "x" * 1000], ids=range(len(TEXTS) + 2))
def test_hostile_json_is_refused(copied: Path, text: str) -> None:
    (copied / "policy.json").write_text(text)
    with pytest.raises(PolicyError, match=r"policy.json"):
        Policy.load(copied)


@pytest.mark.parametrize("name", ["policy.json", "module.safetensors", "policy.onnx"])
def test_a_file_larger_than_it_may_be_is_not_read(copied: Path, name: str) -> None:
    with (copied / name).open("ab") as file:
        file.truncate(MOST_MEMORY)
    if name == "policy.onnx":  # that the manifest does not list
        with bounded_memory():
            Policy.load(copied)
        return
    with bounded_memory(), pytest.raises(PolicyError, match=f"{name} has {MOST_MEMORY} bytes, expected"):
        Policy.load(copied)


HEADERS = ['{"x": 3}', '{"x": {"dtype": "F64", "shape": [4503599627370496], "data_offsets": [0, 36028797018963968]}}']
BODIES = [b"", b"\xff" * 8, struct.pack("<Q", 1 << 40)]
BODIES += [struct.pack("<Q", len(each)) + each.encode() for each in HEADERS]


@pytest.mark.parametrize("data", BODIES, ids=range(len(BODIES)))
def test_what_is_no_safetensors_file_is_refused(data: bytes) -> None:
    with bounded_memory(), pytest.raises(PolicyError, match=r"x.safetensors"):
        POLICY.arrays_of(data, "x.safetensors")


def test_a_link_is_not_followed(copied: Path, tmp_path: Path) -> None:
    (copied / "module.safetensors").rename(tmp_path / "elsewhere")
    (copied / "module.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PolicyError, match=r"module.safetensors is missing"):
        Policy.load(copied)
