"""`mla::index_scores`: an indexer's scores of all keys, summed over its heads."""

from .aten import index_scores_aten
from .native import index_scores_cpu
from .reference import index_scores_reference

__all__ = ["index_scores_aten", "index_scores_cpu", "index_scores_reference"]
