"""The policies that a server has, by name and version, which of them acts for a session, and those saved anew."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any

from rollflow.nodes.policies.policy import Policy
from rollflow.policy.serving.batcher import Batcher, BatchOptions, Meters
from rollflow.policy.serving.request import ActRequest, ClosedError, UnknownPolicyError
from rollflow.stream.data.errors import ModuleError, PolicyError

_log = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


class Shelf:
    """Serves policies by name; each name has versions, the newest of which takes what begins.

    options    of every version's batches

    meters     what its policies have done, for Prometheus

    A session stays with the version that it began with, since its memory is there. It goes to the newest one when an
    episode begins anew. All methods may be called from any thread.
    """

    def __init__(self, options: BatchOptions | None = None) -> None:
        self._options, self.meters = options or BatchOptions(), Meters()
        for name, least in (("max_batch", 1), ("max_wait", 0), ("max_waiting", 1), ("max_sessions", 1)):
            if not (value := getattr(self._options, name)) >= least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        self._lock = threading.Lock()
        self._versions: dict[str, dict[str, Batcher]] = {}  # name -> version -> batches, the newest last
        self._is_closed = False

    @property
    def names(self) -> list[str]:
        """Names of the policies that are served."""
        return list(self._versions)

    def versions(self, name: str) -> dict[str, Batcher]:
        """Batches by version, the oldest first. Raises UnknownPolicyError."""
        with self._lock:
            found = self._versions.get(name)
            if not found:
                raise UnknownPolicyError(f"no policy '{name}' is served; served: {', '.join(self._versions) or 'none'}")
            return dict(found)

    def newest(self, name: str) -> Batcher:
        """Batches of the version that takes what begins. Raises UnknownPolicyError."""
        return list(self.versions(name).values())[-1]

    def put(self, name: str, policy: Any, version: str) -> None:
        """Serve a policy; of a name that is there already, it takes what begins from now on.

        Older versions go on for the sessions that began with them, until `tidy` finds none.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the server is closed")
            if version in self._versions.get(name, {}):
                raise ValueError(f"version '{version}' of policy '{name}' is served already")
            batcher = Batcher(policy, name, version, self._options, self.meters)
            self._versions.setdefault(name, {})[version] = batcher
        _log.info("policy '%s': version %s takes what begins", name, version)

    def publish(self, weights: Mapping[str, Any], version: int, name: str | None = None) -> list[str]:
        """Have the newest versions of policies act with a trainer's weights; the policies' names.

            weights    a `state_dict()`; of several modules one with names `module id/name`
            version    policy version, which answers have
            name       of a policy; None: the only one, or of several those whose names are ids of modules

        Raises UnknownPolicyError, and ModuleError for weights that are not the module's.
        """
        named = {each: _part_of(weights, each) for each in self.names if name in (None, each)}
        parts = {each: part for each, part in named.items() if part}
        if not parts and len(named) > 1:
            raise ModuleError(
                f"weights are named {', '.join(list(weights)[:4])}, and several policies are served: "
                f"{', '.join(named)}; expected names such as '{next(iter(named))}/…', or name='{next(iter(named))}'"
            )
        for each in parts or [name or next(iter(named), "")]:
            self.newest(each).publish(parts.get(each, weights), version)
        return list(parts) or list(named)

    def submit(self, name: str, request: ActRequest, version: str | None = None) -> None:
        """Have a request answered, by the version asked for or by the session's own.

        Raises UnknownPolicyError, OverloadedError or ClosedError.
        """
        for _ in range(3):  # the version may be closed just then
            try:
                return self._batcher_for(name, request.session, request.begins, version).submit(request)
            except ClosedError:
                if self._is_closed:
                    raise
        raise ClosedError(f"versions of policy '{name}' come and go too fast; ask again")

    def forget(self, name: str, session: Hashable) -> bool:
        """Release a session's memory; False where none is there. Raises UnknownPolicyError."""
        return any([batcher.forget(session) for batcher in self.versions(name).values()])

    def forget_client(self, client: str) -> None:
        """Release the memory of every session of a client that is gone."""
        for name in self.names:
            for batcher in self.versions(name).values():
                batcher.forget_client(client)

    def tidy(self) -> None:
        """Forget idle sessions, and close older versions that have none any more; to be called now and then."""
        over: list[tuple[str, Batcher]] = []
        with self._lock:
            for name, versions in self._versions.items():
                for version, batcher in list(versions.items())[:-1]:
                    if not batcher.has_sessions():
                        over.append((name, versions.pop(version)))
        for name, batcher in over:
            batcher.close()
            _log.info("policy '%s': version %s is over", name, batcher.version)

    def close(self) -> None:
        """Answer what waits, and take nothing more."""
        with self._lock:
            self._is_closed = True
            batchers = [batcher for versions in self._versions.values() for batcher in versions.values()]
        for batcher in batchers:
            batcher.close()

    def _batcher_for(self, name: str, session: Hashable, begins: bool, version: str | None) -> Batcher:
        versions = self.versions(name)
        if version is not None:
            if version not in versions:
                raise UnknownPolicyError(f"policy '{name}' has no version '{version}'; served: {', '.join(versions)}")
            return versions[version]
        if session is not None and len(versions) > 1:
            for batcher in reversed(versions.values()):
                if batcher.has_session(session):
                    if not begins:
                        return batcher
                    batcher.forget(session)  # it may begin with another version
        return list(versions.values())[-1]


def _part_of(weights: Mapping[str, Any], module_id: str) -> dict[str, Any]:
    """The weights of one of several modules; empty where there are none."""
    begin = f"{module_id}/"
    return {name.removeprefix(begin): value for name, value in weights.items() if name.startswith(begin)}


class WatchedPolicy:
    """A saved policy that is served, and served anew once something else was saved under its path.

        shelf     serves it
        name      by which clients ask for it
        path      of the artifact, a folder or a `.zip`
        allow, device    as `Policy.load` takes them

    A path that can't be loaded is logged, and what was served before goes on.
    """

    def __init__(
        self,
        shelf: Shelf,
        name: str,
        path: str | os.PathLike[str],
        *,
        allow: Collection[str] = (),
        device: Any = None,
    ) -> None:
        self._shelf, self._name, self._path = shelf, name, Path(path)
        if not self._path.exists():
            raise PolicyError(f"there is no policy at {self._path}, expected a folder or a .zip file")
        self._options: dict[str, Any] = {"allow": allow, "device": device}
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
            self._shelf.put(self._name, Policy.load(self._path, **self._options), version)

    def _stamp(self) -> _Stamp | None:
        try:
            found = self._manifest().stat()
        except OSError:
            return None  # it is being replaced
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _manifest(self) -> Path:
        return self._path / "policy.json" if self._path.is_dir() else self._path


class Watcher:
    """Calls the `look` of watched policies, and whatever else changes, from a thread, until it is closed.

    seconds    between two calls
    """

    def __init__(self, looks: Collection[Callable[[], object]], seconds: float = 1.0) -> None:
        self._looks, self._seconds = list(looks), seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollflow watches policies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, once it has loaded what it is loading."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            for look in self._looks:
                look()


def version_of(path: Path) -> str:
    """The version of an artifact: twelve digits of the digest of its manifest, which has the checksums of the rest."""
    manifest = path / "policy.json" if path.is_dir() else path
    return hashlib.sha256(manifest.read_bytes()).hexdigest()[:12]
