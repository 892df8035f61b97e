"""Transform codes of JAX as those of PyTorch."""

import numpy as np
import torch

from triton_ref.code import TransformCode


def torch_code(code, layer=0):
    """One layer of a JAX code."""
    arrays = {name: np.array(leaf) for name, leaf in code.arrays().items()}
    whole = TransformCode.from_arrays(arrays, kind=code.kind, clip=code.clip, clip_ratio=code.clip_ratio)
    return whole.layer(layer)


def tensor(x):
    return torch.from_numpy(np.array(x))
