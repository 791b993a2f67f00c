"""Run vLLM's MLA layers on this package's kernels, over vLLM's own pages.

vLLM calls `register`, an entry point of `vllm.general_plugins`, in each of its processes at start-up.
"""

from __future__ import annotations

import logging

VERSION = "0.32"
"""The supported version of vLLM: in other versions its layers and registry differ."""
NAME = "MLA_COMPILE"
"""The backend's name for `--attention-backend`."""
_PATH = "mla_compile.vllm.backend.MLACompileBackend"


def register() -> None:
    """Register the backend with vLLM. On CPUs it also replaces `CPU_MLA`, the only MLA backend that vLLM knows there.

    `CPU_MLA` is vLLM's reference implementation, which it uses on CPUs without AMX. It stays in place if
    `VLLM_PLUGINS`, vLLM's list of plugins to load, lacks `mla_compile`. With another version of vLLM, this only logs
    a line.
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
