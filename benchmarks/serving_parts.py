"""Parts of the benchmarks of serving: the bare forward pass, and clients in a process of their own."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def sampled(module: Any, observations: NDArray[np.float32]) -> NDArray[np.int64]:
    """Actions i64[N] for observations f32[N, 4], by a forward pass and torch's own distribution."""
    with torch.inference_mode():
        output = module.forward_exploration({"obs": torch.from_numpy(observations)})
        actions: NDArray[np.int64] = (
            torch.distributions.Categorical(logits=output["action_dist_inputs"]).sample().numpy()
        )
    return actions


def asked(program: str, port: int, way: str, clients: int, seconds: float) -> tuple[float, float]:
    """Answers per second, and the 99th percentile of what one takes over the median, by `benchmarks.<program>`."""
    command = [sys.executable, "-m", f"benchmarks.{program}", str(port), way, str(clients), str(seconds)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, float] = json.loads(ran.stdout)
    return answer["answers_per_s"], answer["p99_ms"] / answer["median_ms"]
