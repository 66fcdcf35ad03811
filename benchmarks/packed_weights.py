"""Room that weights take on the way with compression="zstd", and how fast they are packed and unpacked.

An MLP with 1.2 million weights learns by Adam to do what another one does; some of its updates go from one version to
the next. `alone` and `then` are the bytes of packed weights over those of whole ones: of the first, and of the next.

    python -m benchmarks.packed_weights
"""

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from rollflow.nodes.modules.weights_codec import to_arrays
from rollflow.stream.wire import Weights, WeightsPacked, WeightsPacker, encode
from rollflow.stream.wire.weights_packing import WeightsUnpacker

RATES, UPDATES, VERSIONS = (1e-3, 3e-4, 3e-5), (1, 16, 64), 5
MOST = 1 << 30


def mlp(width: int) -> torch.nn.Module:
    """A network of 100 inputs and 10 outputs."""
    layers = [torch.nn.Linear(100, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def learning(rate: float, updates: int) -> Iterator[dict[str, Any]]:
    """Weights after a hundred updates, and then after every so many more."""
    torch.manual_seed(0)
    module, teacher = mlp(1024), mlp(64)
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    done = 0
    while True:
        if done >= 100 and (done - 100) % updates == 0:
            yield module.state_dict()
        inputs = torch.randn(256, 100)
        loss = ((module(inputs) - teacher(inputs)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1


def main() -> None:
    """A line for each learning rate and number of updates between versions."""
    torch.set_num_threads(1)
    print("learning rate   updates    alone    then    packed, MB/s   unpacked, MB/s")
    for rate in RATES:
        for updates in UPDATES:
            packer, unpacker, shares, times = WeightsPacker(), WeightsUnpacker(), list[float](), [0.0, 0.0]
            for version, state in zip(range(VERSIONS), learning(rate, updates), strict=False):
                weights = Weights(version, *to_arrays(state))
                began = perf_counter()
                message = packer.packed(weights, version - 1 if version else None)
                packed = perf_counter()
                assert isinstance(message, WeightsPacked)
                unpacker.unpacked(message, MOST)
                times = [times[0] + packed - began, times[1] + perf_counter() - packed]
                shares.append(message.packed.nbytes / sum(map(len, encode(weights))))
            mbytes = VERSIONS * message.size / 1e6
            rates = "".join(f"{mbytes / seconds:>16,.0f}" for seconds in times)
            print(f"{rate:>13} {updates:>9} {shares[0]:>8.2f} {sum(shares[1:]) / (VERSIONS - 1):>7.2f}{rates}")


if __name__ == "__main__":
    main()
