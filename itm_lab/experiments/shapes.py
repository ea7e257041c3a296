"""Models that have shapes and no numbers: enough to know what a run trains, and made in milliseconds."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class WithoutDraws(TorchDispatchMode):
    """Leaves tensors as they are where numbers would be drawn into them."""

    DRAWS: ClassVar = {torch.ops.aten.uniform_, torch.ops.aten.normal_}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: PyTorch need not import its compiler (1.5 s) to leave this mode out of it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func._overloadpacket in self.DRAWS else func(*args, **(kwargs or {}))


def shapes_only(device: str) -> AbstractContextManager[object]:
    """On "meta", initialisations do nothing: PyTorch would import its compiler there, to draw no numbers."""
    return WithoutDraws() if device == "meta" else nullcontext()
