"""The properties of a GPU on which a kernel's configuration depends."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

KIB = 1024


@dataclass(frozen=True)
class Machine:
    """A GPU's architecture and size."""

    arch: str
    """The compilers' name of the architecture: `sm_90`, `gfx942`."""
    processors: int
    """Multiprocessors (compute units): at least as many programs run at the same time."""

    @property
    def shared_bytes(self) -> int:
        """The most shared memory of one program (CUDA programming guide, table of compute capabilities; CDNA 3)."""
        if self.arch.startswith("gfx"):
            return (160 if self.arch == "gfx950" else 64) * KIB
        capability = int(self.arch.removeprefix("sm_"))
        if capability in (80, 87):
            return 163 * KIB
        if capability < 80:
            return 64 * KIB
        return 227 * KIB if 90 <= capability < 120 else 99 * KIB

    @property
    def converts_fp8(self) -> bool:
        """Whether Triton converts e4m3fn in hardware."""
        return self.arch.startswith("sm_") and int(self.arch.removeprefix("sm_")) >= 89


@functools.cache
def present(device: torch.device) -> Machine:
    """The machine behind a CUDA or ROCm device."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Machine(properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Machine(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)
