"""Clients of an HTTP server in a closed loop, in a process of their own: each asks again when it has its answer.

    python -m benchmarks.http_clients PORT PATH CLIENTS SECONDS

It prints one line of JSON: answers per second, and the median and the 99th percentile of what an answer took, in ms.
"""

import asyncio
import json
import sys
from time import perf_counter

import numpy as np

BODY = json.dumps({"observation": [0.01, -0.02, 0.03, -0.04]}).encode()
WARM_UP_S = 0.5


def main(port: int, path: str, clients: int, seconds: float) -> None:
    """Ask for so many seconds, behind a warm-up, and print what came out."""
    took, spent = asyncio.run(_asked(port, path, clients, seconds))
    median, late = (float(each) * 1e3 for each in np.percentile(took, [50, 99]))
    print(json.dumps({"answers_per_s": len(took) / spent, "median_ms": median, "p99_ms": late}))


async def _asked(port: int, path: str, clients: int, seconds: float) -> tuple[list[float], float]:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY
    took: list[float] = []
    first = perf_counter() + WARM_UP_S
    last = first + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = perf_counter()
        while began < last or not took:
            writer.write(request)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not answer.startswith(b"http/1.1 200"):
                raise RuntimeError(f"the server answered {answer!r}")
            await reader.readexactly(int(answer.split(b"content-length:")[1].split(b"\r\n")[0]))
            ended = perf_counter()
            if began >= first:
                took.append(ended - began)
            began = ended
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return took, seconds


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
