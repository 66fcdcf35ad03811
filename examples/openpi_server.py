"""A saved policy speaks openpi's WebSocket protocol: `python openpi_server.py PATH [PORT]` (extra `serve`).

First come the policy's metadata, then an observation in and an action out, in turn, as msgpack with arrays.
A connection is a session; a message with `"reset": true` begins an episode.
"""

import sys
import threading
from contextlib import suppress
from time import perf_counter
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

from rollflow import Policy
from rollflow.policy.serving.request import item_from, pack, unpack

INTERNAL_ERROR = 1011


def serving(policy: Policy, port: int = 8000) -> Server:
    """A server whose `serve_forever` answers each client in a thread of its own."""
    lock, space = threading.Lock(), policy.observation_space  # one thread at a time may call the policy

    def answer(message: dict[str, Any], session: int) -> dict[str, Any]:
        mark = perf_counter()
        if message.pop("reset", False):
            with lock:
                policy.reset(session)
            if not message:
                return {}
        # A map with one array stands for the array if the space has no parts.
        observation = message if hasattr(space, "spaces") or len(message) != 1 else next(iter(message.values()))
        item = item_from(space, observation, "observation")
        with lock:
            action = policy.act(item, session=session)
        return {"actions": action, "server_timing": {"infer_ms": 1000 * (perf_counter() - mark)}}

    def converse(connection: ServerConnection) -> None:
        session = id(connection)
        with suppress(ConnectionClosed):
            connection.send(pack({"observation": str(space), "action": str(policy.action_space)}))
            while True:
                try:
                    connection.send(pack(answer(unpack(connection.recv(decode=False)), session)))
                except ConnectionClosed:
                    break
                except Exception as error:
                    connection.send(f"{type(error).__name__}: {error}")
                    connection.close(INTERNAL_ERROR, "the request failed")
                    break
        with lock:
            policy.forget(session)

    return serve(converse, "127.0.0.1", port, compression=None, max_size=None)


if __name__ == "__main__":
    path, *rest = sys.argv[1:]
    with serving(Policy.load(path), *map(int, rest)) as server:
        server.serve_forever()
