"""True float64 for models that compute parts in fp32 whatever their dtype.

transformers' norms, rotary embeddings and softmaxes upcast with ``.to(torch.float32)``, which is a downcast in a
float64 model and leaves errors of 1e-8. Within :class:`Float64` every request for fp32 becomes one for float64.
Only exactness tests pay for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Turns fp32 arguments of every torch function into float64, and ``.float()`` into ``.double()``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


def exact(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The context for computing in ``dtype``: :class:`Float64` for float64, nothing otherwise."""
    return Float64() if dtype == torch.float64 else nullcontext()
