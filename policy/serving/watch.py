"""Watching of saved policies: what is saved anew under a watched path takes over, without a dropped request."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from rollflow.nodes.policies.policy import Policy
from rollflow.policy.serving.shelf import Shelf
from rollflow.stream.data.errors import PolicyError

_log = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


class WatchedPolicy:
    """A saved policy that is served, and served anew once something else was saved under its path.

        shelf     serves it
        name      by which clients ask for it
        path      of the artifact, a folder or a `.zip`
        share     of what begins; below 1 it is a canary
        load      makes the policy of a path; None: `Policy.load` with `allow` and `device`

    A path that can't be loaded is logged, and what was served before goes on.
    """

    def __init__(
        self,
        shelf: Shelf,
        name: str,
        path: str | os.PathLike[str],
        *,
        share: float = 1.0,
        allow: Collection[str] = (),
        device: Any = None,
        load: Callable[[Path], Any] | None = None,
    ) -> None:
        self._shelf, self._name, self._path, self._share = shelf, name, Path(path), share
        if not self._path.exists():
            raise PolicyError(f"there is no policy at {self._path}, expected a folder or a .zip file")
        self._load = load or (lambda found: Policy.load(found, allow=allow, device=device))
        self._seen = self._stamp()
        self._put()

    def look(self) -> bool:
        """Serve what is under the path now, if it is not what was seen last. True: a new version is served."""
        stamp = self._stamp()
        if stamp is None or stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self._put()
        except Exception as error:
            _log.warning("%s can't be served, what was there before goes on: %s", self._path, error)
            return False
        return True

    def _put(self) -> None:
        version = version_of(self._path)
        if version not in (self._shelf.versions(self._name) if self._name in self._shelf.names else ()):
            self._shelf.put(self._name, self._load(self._path), version, share=self._share)

    def _stamp(self) -> _Stamp | None:
        try:
            found = self._manifest().stat()
        except OSError:
            return None  # it is being replaced
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _manifest(self) -> Path:
        return self._path / "policy.json" if self._path.is_dir() else self._path


class Looker(Protocol):
    """Something that is looked at now and then."""

    def look(self) -> object:
        """See whether anything has changed, and do what is due then."""
        ...


class Watcher:
    """Looks at watched policies, and whatever else changes, from a thread, until it is closed.

    seconds    between two looks
    """

    def __init__(self, watched: Collection[Looker], seconds: float = 1.0) -> None:
        self._watched, self._seconds = list(watched), seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollflow watches policies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, once it has loaded what it is loading."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            for policy in self._watched:
                policy.look()


def version_of(path: Path) -> str:
    """The version of an artifact: twelve digits of the digest of its manifest, which has the checksums of the rest."""
    manifest = path / "policy.json" if path.is_dir() else path
    return hashlib.sha256(manifest.read_bytes()).hexdigest()[:12]
