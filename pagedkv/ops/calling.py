"""Whether a call has to go through torch's dispatcher, which takes longer than a small call of a kernel."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def needs_operator(tensor: torch.Tensor) -> bool:
    """Say whether somebody may want to see ``torch.ops.pagedkv.*``: a tracer, a mode, a subclass of tensors.

    Otherwise an entry calls the backend itself, which is all that the operator would do.
    """
    return type(tensor) is not torch.Tensor or is_compiling() or is_in_torch_dispatch_mode()
