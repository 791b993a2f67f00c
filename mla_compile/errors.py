"""The exceptions that mla_compile raises on purpose."""


class MlaCompileError(Exception):
    """Base class of all exceptions in this module."""


class OptionError(MlaCompileError, ValueError):
    """An option does not exist or has an invalid value."""


class ConfigError(MlaCompileError, ValueError):
    """A model's configuration does not contain what is needed from it."""


class StrictError(MlaCompileError):
    """`mla.strict` is set, and an attention was left unchanged or the graph has none."""


class PassesError(MlaCompileError):
    """The passes failed on a graph, which is a bug of theirs. With `mla.strict`, and for exported programs; otherwise
    the graph is left as it is, with a warning."""


class VerifyError(MlaCompileError):
    """`mla.verify` is set and a rewritten site differs from the original by more than its dtype explains."""


class KernelError(MlaCompileError, ValueError):
    """A tensor does not fit an mla op: its shape, dtype or device is wrong."""


class CacheError(MlaCompileError):
    """A page pool, or a cache over one, cannot do what is asked of it. Its state is as it was before the call."""


class OutOfPagesError(MemoryError, CacheError):  # MemoryError has a `__new__` of its own, so it has to come first
    """More pages are requested than are free."""


class FreedError(CacheError, RuntimeError):
    """A sequence or a page is used after it was freed."""


class PageIndexError(CacheError, IndexError):
    """The pool has no page of this number."""


class CacheMismatchError(CacheError, ValueError):
    """Tokens differ from the cache in dtype, device or shape, or a size is invalid for it."""
