"""openpi's WebSocket protocol: first the policy's metadata, then an observation in and an action out, in turn.

Each message is binary msgpack with arrays. An answer has `actions` and `server_timing`. The protocol has no sessions:
a connection is one, which begins with its first observation, and anew after a message with `"reset": true`.
"""

from contextlib import suppress
from time import perf_counter
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from rollflow.policy.serving.front import AsyncFront, description_of
from rollflow.policy.serving.items import pack, unpack
from rollflow.policy.serving.request import RequestError
from rollflow.policy.serving.shelf import Shelf

_INTERNAL_ERROR = 1011


async def converse(socket: WebSocket, shelf: Shelf, name: str, front: AsyncFront) -> None:
    """Speak with one client over an accepted socket, until it goes. An error is sent as text, and ends it."""
    session = f"openpi {socket.client} {id(socket):x}"
    begins = True
    with suppress(WebSocketDisconnect):
        await socket.send_bytes(pack(description_of(shelf, name)))
        while True:
            data = await socket.receive_bytes()
            mark = perf_counter()
            try:
                observation = unpack(data)
                if isinstance(observation, dict) and observation.pop("reset", False):
                    begins = True
                    if not observation:
                        await socket.send_bytes(pack({}))
                        continue
                fields = {"observation": _lone(shelf, name, observation), "session": session, "begins": begins}
                acted = await front.act(name, fields)
            except Exception as error:
                await socket.send_text(f"{type(error).__name__}: {error}")
                await socket.close(_INTERNAL_ERROR, "the request failed")
                break
            begins = False
            timing = {"infer_ms": 1000 * (perf_counter() - mark)}
            await socket.send_bytes(pack({"actions": acted.action, "server_timing": timing}))
    shelf.forget(name, session)


def _lone(shelf: Shelf, name: str, observation: Any) -> Any:
    """An observation in the policy's space: a map with one array stands for the array where the space is no Dict."""
    space = shelf.newest(name).policy.observation_space
    if isinstance(observation, dict) and not hasattr(space, "spaces"):
        if len(observation) != 1:
            raise RequestError(f"observation has {', '.join(map(repr, observation))}, expected one array for {space}")
        return next(iter(observation.values()))
    return observation
