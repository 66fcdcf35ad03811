"""Serving of policies over HTTP and WebSocket (extra `serve`): sessions, batches.

Names are imported when they are first asked for: a shelf needs no web framework.
"""

from typing import TYPE_CHECKING

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollflow.policy.serving.http import HttpServer as HttpServer
    from rollflow.policy.serving.shelf import (
        BatchOptions as BatchOptions,
        Shelf as Shelf,
        WatchedPolicy as WatchedPolicy,
        Watcher as Watcher,
    )

__all__, __getattr__, __dir__ = lazy_names(__name__)
