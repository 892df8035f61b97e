"""Writing the cache: rows to stored rows in their pages, the rows that leave the recent window, and new tokens."""

from pallas_kernels.write.api import append, demote, demote_ahead, write

__all__ = ["append", "demote", "demote_ahead", "write"]
