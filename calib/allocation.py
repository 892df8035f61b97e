"""Which layer is stored how: the least total error at an average of bits."""

from __future__ import annotations

import numpy as np


def allocate(errors: np.ndarray, bits: np.ndarray, budget: int) -> np.ndarray:
    """An option for each layer, int `[L]`: the least sum of errors among all choices whose bits fit the budget.

    Exact, by dynamic programming over the bits spent: layers x options x budget steps.

    Args:
        errors: `[options, L]`, of each layer alone; errors of layers are taken to add up.
        bits: int `[options]`, of one layer, the same unit as the budget.
        budget: of all layers together.

    Raises:
        ValueError: shapes that do not fit, or a budget below the cheapest choice.
    """
    errors, bits = np.asarray(errors, np.float64), np.asarray(bits)
    options, layers = errors.shape
    if bits.shape != (options,) or (bits < 0).any():
        raise ValueError(f"bits={bits.tolist()}: expected {options} numbers, one for each option, none below 0.")
    if budget < layers * bits.min():
        raise ValueError(
            f"budget={budget}: expected at least {layers * bits.min()}, the cheapest option in all layers."
        )
    unit = np.gcd.reduce(bits) or 1
    costs, room = bits // unit, int(min(budget, layers * bits.max()) // unit)
    least = np.zeros(room + 1)  # error of the layers so far, by what may be spent on them
    taken = np.empty((layers, room + 1), np.int64)
    for layer in range(layers):
        totals = np.full((options, room + 1), np.inf)
        for option, cost in enumerate(costs):
            totals[option, cost:] = errors[option, layer] + least[: max(0, room + 1 - cost)]
        taken[layer] = totals.argmin(0)
        least = totals.min(0)
    chosen = np.empty(layers, np.int64)
    for layer in reversed(range(layers)):
        chosen[layer] = taken[layer, room]
        room -= costs[chosen[layer]]
    return chosen
