"""One thread for PyTorch: the tests' tensors are tiny, and two test processes share two cores."""

import contextlib

with contextlib.suppress(ImportError):
    import torch

    torch.set_num_threads(1)
