"""Many requests from one process: a paged allocator with prefix sharing, a scheduler, and the loop that runs them.

`pool`, `prefix_tree`, `allocator`, `request`, `drafts` and `scheduler` are plain Python and import no jax.
"""
