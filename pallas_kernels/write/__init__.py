"""Writing history: rows to stored rows in their pages, and the rows that leave the recent window."""

from pallas_kernels.write.api import demote, demote_ahead, write

__all__ = ["demote", "demote_ahead", "write"]
