"""Every error that mla_compile raises on purpose."""


class MlaCompileError(Exception):
    """Base of all of them."""


class OptionError(MlaCompileError, ValueError):
    """An option that does not exist, or a value that it cannot have."""


class ConfigError(MlaCompileError, ValueError):
    """A model's configuration that does not say what is asked of it."""


class StrictError(MlaCompileError):
    """`mla.strict` is set and an attention was left unchanged, or the model has none."""


class VerifyError(MlaCompileError):
    """`mla.verify` is set and a rewritten site differs from the original by more than its dtype explains."""


class KernelError(MlaCompileError, ValueError):
    """Tensors that do not fit an mla op: a wrong shape, dtype or device."""


class CacheError(MlaCompileError):
    """A page pool, or a cache over one, that cannot do what it is asked; it is as it was before."""


class OutOfPagesError(MemoryError, CacheError):  # MemoryError makes its instances itself, so it has to come first
    """More pages are asked for than are free."""


class FreedError(CacheError, RuntimeError):
    """A sequence or a page that was freed is used."""


class PageIndexError(CacheError, IndexError):
    """A page number that the pool does not have."""


class CacheMismatchError(CacheError, ValueError):
    """Tokens of another dtype, device or shape than the cache's, or a size that it cannot have."""
