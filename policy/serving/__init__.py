"""Serving of policies by rollflow's protocol, and over HTTP and WebSocket (extra `serve`): sessions, batches, versions.

Names are imported when they are first asked for: a shelf needs no web framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollflow.policy.serving.http_server import HttpServer
    from rollflow.policy.serving.policy_server import PolicyServer
    from rollflow.policy.serving.shelf import BatchOptions, Shelf
    from rollflow.policy.serving.watch import WatchedPolicy, Watcher

__all__ = ["BatchOptions", "HttpServer", "PolicyServer", "Shelf", "WatchedPolicy", "Watcher"]

_HOMES = {
    "BatchOptions": "shelf",
    "HttpServer": "http_server",
    "PolicyServer": "policy_server",
    "Shelf": "shelf",
    "WatchedPolicy": "watch",
    "Watcher": "watch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"rollflow.policy.serving.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
