"""Every error that mla_compile raises on purpose."""


class MlaCompileError(Exception):
    """Base of all of them."""


class OptionError(MlaCompileError, ValueError):
    """An option that does not exist, or a value that it cannot have."""


class StrictError(MlaCompileError):
    """`mla.strict` is set and an attention was left unchanged, or the model has none."""


class VerifyError(MlaCompileError):
    """`mla.verify` is set and a rewritten site differs from the original by more than its dtype explains."""


class KernelError(MlaCompileError, ValueError):
    """Tensors that do not fit an mla op: a wrong shape, dtype or device."""
