"""What a module's weights are, in 32 bytes: the same wherever they have arrived whole."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 32


def digest_of(tensors: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str]) -> bytes:
    """BLAKE2b, 32 bytes, over each tensor by the order of its name: the name, its dtype, its shape, its bytes.

    tensors, dtypes    as in the wire's `weights`
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensors):
        array = tensors[name]
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        told = f"{name}\n{dtypes.get(name, little.dtype.str)}\n{','.join(map(str, array.shape))}\n"
        digest.update(told.encode())
        digest.update(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)
    return digest.digest()
