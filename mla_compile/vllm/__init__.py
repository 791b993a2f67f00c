"""vLLM's MLA layers on the kernels of this package, over vLLM's own pages.

vLLM calls `register` in each of its processes when it starts: an entry point of `vllm.general_plugins`.
"""

from __future__ import annotations

import logging

VERSION = "0.32"
"""Of vLLM, whose layers and registry others have in other forms."""
NAME = "MLA_COMPILE"
"""What `--attention-backend` calls it."""
_PATH = "mla_compile.vllm.backend.MLACompileBackend"


def register() -> None:
    """Tell vLLM of the backend; on CPUs, whose platform knows no other name for MLA, in place of `CPU_MLA`.

    That is vLLM's reference, which it takes where there is no AMX. `VLLM_PLUGINS`, vLLM's list of the plugins it shall
    load, leaves it as it is where `mla_compile` is not on it. Beside another version of vLLM nothing is done but a line
    logged.
    """
    from vllm import __version__

    if not __version__.startswith(f"{VERSION}."):
        logging.getLogger(__name__).info("no backend %s: expected vLLM %s, found %s", NAME, VERSION, __version__)
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(NAME, _PATH)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_MLA, _PATH)
