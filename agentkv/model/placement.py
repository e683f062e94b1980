"""On which device, and in which dtype, a model is to run."""

from __future__ import annotations

import torch

from ..config import EngineConfig
from ..errors import ModelError

__all__ = ["choose_device", "choose_dtype"]


def choose_device(config: EngineConfig) -> torch.device:
    """The device that `config` names; "auto" is the first CUDA device, else the CPU.

    Raises:
        ModelError: there is no such device.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device={name!r} names no device; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device={name!r} is not served; cpu and cuda are")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def choose_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype that `config` names; "auto" is bfloat16 where the device has it natively."""
    if config.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.dtype)
        return chosen
    if choose_device(config).type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32
