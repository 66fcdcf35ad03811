"""Ways to alter a saved policy, as accidents do and as somebody does who means harm."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollflow.nodes.policies.artifact_files import POLICY
from rollflow.stream.data.stored_files import array_bytes, checksums

MOST_MEMORY = 2 << 30  # bytes that loading may ask for beyond what the program has
FORBIDDEN = ["os:system", "subprocess:Popen", "builtins:eval", "rollflow.nodes.policies.policy:Policy", "__main__:x"]
FORBIDDEN += ["rollflow.Rollout", "rollflow.EnvHost", "rollflow.DefaultModule", "numpy:load", "", "x"]
HOSTILE: list[Any] = [None, True, -1, 0, 10**9, 10**30, 1e308, "", "nan", "../../etc/passwd"]
HOSTILE += [[], {}, [[]], {"$array": "x"}]
HOSTILE += [{"$tuple": 3}, {"$float": "x"}, {"$function": "os:system"}, {"$space": {}}, {"$dict": [[[], 1]]}]


@contextmanager
def bounded_memory() -> Iterator[None]:
    """A limit of the memory that the program may ask for."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def sign(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a policy's manifest, and make the checksums and the digest fit, as somebody who means harm would."""
    manifest = json.loads((folder / "policy.json").read_text())
    del manifest["digest"]
    manifest["files"] = checksums({name: (folder / name).read_bytes() for name in manifest["files"]})
    changed = change(manifest)
    (folder / "policy.json").write_bytes(POLICY.manifest_bytes(manifest if changed is None else changed))


def no_change(_: Any) -> None:
    """Leave a manifest as it is."""


def change_arrays(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the arrays of a file, and make the checksums fit."""
    arrays = POLICY.arrays_of((folder / name).read_bytes(), name)
    change(arrays)
    (folder / name).write_bytes(array_bytes(arrays))
    sign(folder, no_change)


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value within a JSON value."""
    for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(each, dict | list):
            yield from places_of(each)
