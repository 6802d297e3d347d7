"""The best allowed token of every row on a CPU, compiled.

It calls nothing of ours: numba, which keeps compiled functions on disk, looks at the file of a function
only and not at those of the ones it calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jfbatch.kernel_cache import compiled


@compiled
def best_allowed(
    logits: NDArray[np.float32],  # [positions, vocabulary]
    bits: NDArray[np.uint32],  # the same memory
    positions: NDArray[np.int64],  # [rows], indices into logits
    masks: NDArray[np.uint32],  # [rows, words]
    token_ids: NDArray[np.int64],  # [rows], out: the first best allowed token, -1 if none is above -inf
    faults: NDArray[np.bool_],  # [rows], out: whether an allowed logit is no number
) -> None:
    """Masked argmax: 32 running maxima, one per bit of a mask word; about 8 us a row of 50,000 logits."""
    width = logits.shape[1]
    best = np.empty(32, np.float32)
    where = np.empty(32, np.int32)
    wrong = np.empty(32, np.uint32)
    for index in range(len(positions)):
        row, raw, mask = logits[positions[index]], bits[positions[index]], masks[index]
        best[:] = -np.inf
        where[:] = -1
        wrong[:] = 0
        for word in range(min(len(mask), (width + 31) // 32)):
            allowed = mask[word]
            if allowed == 0:
                continue
            numbers, codes = row[32 * word : 32 * word + 32], raw[32 * word : 32 * word + 32]
            if len(numbers) == 32:
                for j in range(32):
                    may = (allowed >> np.uint32(j)) & np.uint32(1)
                    wrong[j] |= may & np.uint32((codes[j] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000))
                    better = (may != 0) & (numbers[j] > best[j])
                    best[j] = numbers[j] if better else best[j]
                    where[j] = word if better else where[j]
            else:  # the vocabulary ends within this word
                for j in range(len(numbers)):
                    if (allowed >> np.uint32(j)) & np.uint32(1):
                        wrong[j] |= np.uint32(np.isnan(numbers[j]))
                        if numbers[j] > best[j]:
                            best[j] = numbers[j]
                            where[j] = word
        top = np.max(best)
        token = np.int64(-1)
        for j in range(32):
            if where[j] >= 0 and best[j] == top:
                found = np.int64(where[j]) * 32 + j
                token = found if token < 0 or found < token else token
        token_ids[index] = token
        faults[index] = np.any(wrong) or top == np.inf
