"""Thousands of altered policies: each is refused in words, or does what it did; nothing of theirs is run."""

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered_policies import FORBIDDEN, HOSTILE, bounded_memory, change_arrays, no_change, places_of, sign
from drawn_policies import drawn_policy
from extras import needs

from rollflow import Policy
from rollflow.policy import OnnxPolicy
from rollflow.stream import PolicyError

needs("onnx", "onnxruntime", "onnxscript")

COUNT, PARTS = 1_200, 4
ARRAYS = ("module.safetensors", "state.safetensors", "examples.safetensors")
FILES = ("policy.json", "policy.onnx", *ARRAYS)
FORBIDDEN_EVENTS = ("os.", "subprocess.", "socket.connect", "pickle.find_class", "ctypes.dlopen", "shutil.")
NEEDED = {"rollflow", "torch", "numpy", *sys.stdlib_module_names}
HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")


class Watch:
    """Keeps what is done by programs that are run, while it watches: an audit hook can't be taken away again."""

    def __init__(self) -> None:
        self.watches, self.seen = False, list[str]()
        self._modules: set[str] = set()
        sys.addaudithook(self._hear)

    def __enter__(self) -> None:
        self.watches, self._modules = True, set(sys.modules)

    def __exit__(self, *_: object) -> None:
        self.watches = False
        new = {name.split(".")[0] for name in set(sys.modules) - self._modules}
        self.seen += [f"import {name}" for name in new - NEEDED | new & {"antigravity"}]

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.watches:
            return
        writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if writes or (event.startswith(FORBIDDEN_EVENTS) and event not in HARMLESS):
            self.seen.append(f"{event} {args}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two policies `p` and `q`, which have ONNX programs."""
    folder = tmp_path_factory.mktemp("saved")
    for seed, name in enumerate("pq"):
        policy = drawn_policy("box", "all", lstm=True, seed=seed)
        policy.trained_on = {"policy_version": seed, "returns": np.arange(3.0)}
        policy.save(folder / name, onnx=True)
        OnnxPolicy.load(folder / name)
    return folder


# Ways to alter a copy; each returns the path that is to be loaded


def swap_files(copy: Path, saved: Path, rng: random.Random) -> Path:
    name = rng.choice(FILES)
    source = saved / "q" / name if rng.random() < 0.5 else copy / rng.choice(FILES)
    (copy / name).write_bytes(source.read_bytes())
    return copy


def swap_tensors(copy: Path, saved: Path, rng: random.Random) -> Path:
    """Arrays under each other's names, of other kinds, missing and new, with checksums that fit."""

    def change(arrays: dict[str, Any]) -> None:
        names = sorted(arrays)
        one = rng.choice(names) if names else "x"
        other = rng.choice(names) if names else "y"
        kind = rng.randrange(6)
        if kind == 0 and names:
            arrays[one], arrays[other] = arrays[other], arrays[one]
        elif kind == 1:
            arrays.pop(one, None)
        elif kind == 2 and names:
            arrays[f"{one}.new"] = arrays[one]
        elif kind == 3 and names:
            dtype = rng.choice([np.float16, np.float64, np.int64, np.bool_, np.uint8])
            arrays[one] = np.nan_to_num(arrays[one]).astype(dtype)
        elif kind == 4 and names:
            arrays[one] = arrays[one].reshape(-1)[: rng.randrange(4)]
        elif names:
            arrays[one] = np.full_like(arrays[one], rng.choice([0, 1, 100]))

    change_arrays(copy, rng.choice(ARRAYS), change)
    return copy


def change_manifest(copy: Path, saved: Path, rng: random.Random) -> Path:
    def change(manifest: dict[str, Any]) -> None:
        files = manifest.pop("files")
        mutate(manifest, rng)
        manifest["files"] = files

    sign(copy, change)
    return copy


def change_file_list(copy: Path, saved: Path, rng: random.Random) -> Path:
    """Checksums, sizes and names of files that are not theirs, in a manifest whose digest fits."""

    def change(manifest: dict[str, Any]) -> None:
        entries = manifest["files"]
        if rng.random() < 0.3:
            name = rng.choice(["../p/module.safetensors", "/etc/passwd", "policy.json", "x"])
            entries[name] = {"bytes": 1 << 40, "sha256": ""}
        mutate(entries, rng)

    sign(copy, change)
    return copy


def change_onnx(copy: Path, saved: Path, rng: random.Random) -> Path:
    """Bits of the ONNX program, with checksums that fit."""
    path = copy / "policy.onnx"
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 3])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    sign(copy, no_change)
    return copy


def mutate(value: Any, rng: random.Random) -> None:
    """Take away something within a JSON value, or put something hostile into its place."""
    for _ in range(rng.choice([1, 1, 2])):
        places = list(places_of(value))
        if not places:
            return
        container, key = rng.choice(places)
        if rng.random() < 0.2:
            del container[key]
        else:
            container[key] = rng.choice([*HOSTILE, *FORBIDDEN, "antigravity:fly"])


WAYS: list[Callable[[Path, Path, random.Random], Path]] = [
    *(swap_files, swap_tensors, change_manifest, change_file_list, change_onnx)
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_an_altered_policy_is_refused_or_does_what_it_did(part: int, saved: Path, tmp_path: Path, watch: Watch) -> None:
    rng = random.Random(part)
    copy, refused = tmp_path / "p", 0
    for number in range(COUNT // PARTS):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(saved / "p", copy)
        way = WAYS[number % len(WAYS)]
        path = way(copy, saved, rng)
        load = OnnxPolicy.load if way is change_onnx else Policy.load
        with watch, bounded_memory():
            try:
                load(path)
            except PolicyError as error:
                refused += 1
                assert str(error), way.__name__
        assert not watch.seen, (way.__name__, number)
    assert refused > COUNT // PARTS * 0.8
    assert sorted(each.name for each in tmp_path.iterdir()) == ["p"]
