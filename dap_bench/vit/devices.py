"""Which device to work on, and where double precision is."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from dap_bench.errors import UserError

Numbers = TypeVar("Numbers", Tensor, nn.Module)


def choose_device(device: str) -> torch.device:
    """The device to work on.

    Args:
        device: auto (CUDA where there is one, else Apple's mps where there is one, else the CPU), cpu, cuda, cuda:N
            or mps.

    Returns:
        The device.

    Raises:
        UserError: If there is no such device here.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device={device} is unknown; use auto, cpu, cuda, cuda:N or mps.") from error
    if chosen.type == "cuda" and not cuda:
        raise UserError(f"device={device} was asked for, but torch finds no CUDA here; use device=auto or device=cpu.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={device} was asked for, but there are {torch.cuda.device_count()} CUDA devices.")
    if chosen.type == "mps" and not mps:
        raise UserError(f"device={device} was asked for, but torch finds no mps here; use device=auto or device=cpu.")
    return chosen


def double_of(numbers: Numbers) -> Numbers:
    """A tensor or a model in double precision: on its own device, or on the CPU where that has none (mps).

    Args:
        numbers: The tensor or model.

    Returns:
        The same in double precision; a model itself is changed.
    """
    device = numbers.device if isinstance(numbers, Tensor) else next(numbers.parameters()).device
    return (numbers.cpu() if device.type == "mps" else numbers).double()
