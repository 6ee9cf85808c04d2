"""transformers' models in fp64 throughout, to be compared with."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Wide(TorchFunctionMode):
    """Inside, what is fp64 stays so: transformers narrows it to fp32 in norms, softmax and rotary
    positions."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            if function in (Tensor.to, torch.nn.functional.softmax):
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
                if kwargs.get("dtype") is torch.float32:
                    kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)
