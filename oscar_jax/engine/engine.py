"""`Engine`: many requests on one model, a step at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from calib.manifest import Manifest
from oscar_jax.engine import sizes
from oscar_jax.engine.allocator import Allocator, AllocatorStats
from oscar_jax.engine.compilations import compilations
from oscar_jax.engine.drafts import Drafter, PromptLookup
from oscar_jax.engine.executor import JaxExecutor
from oscar_jax.engine.request import Output, Request
from oscar_jax.engine.scheduler import Scheduler, Shapes
from oscar_jax.layer_codes import LayerCodes
from oscar_jax.limits import warn_beyond
from oscar_jax.models.decoder import Decoder
from oscar_jax.sampling import Sampling
from oscar_jax.sharding import DATA
from oscar_jax.step import cache_config
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """State of an engine on all its devices, and counts since its start.

    Attributes:
        device_bytes: of its arrays of keys and values as measured; `expected_bytes` by formula.
        capacity_tokens: history tokens that the pool has room for; `capacity_tokens_bf16`: tokens of an ordinary
            bfloat16 cache in as many bytes as the whole engine takes.
        tokens_in_use, tokens_shared, tokens_idle: of the pool, in whole pages: of pages that sequences use, pages with
            several owners, and pages that kept prefixes alone hold.
        tails, tails_kept, tail_bytes: boundaries that can be kept, those kept now, and bytes of each.
        evictions: kept boundaries given up. page_copies: pages copied because they were shared.
        hit_rate: share of prompt tokens found kept, by token. prefix_hits: requests that found some.
        running, waiting: requests now. The other counts: requests by fate, preemptions, steps, drafted tokens.
        compilations: programs compiled by the process since the engine's module was imported.
    """

    device_bytes: int
    expected_bytes: int
    capacity_tokens: int
    capacity_tokens_bf16: int
    tokens_in_use: int
    tokens_shared: int
    tokens_idle: int
    tails: int
    tails_kept: int
    tail_bytes: int
    evictions: int
    page_copies: int
    hit_rate: float
    prefix_hits: int
    running: int
    waiting: int
    submitted: int
    finished: int
    cancelled: int
    preemptions: int
    steps: int
    drafted: int
    drafts_accepted: int
    compilations: int


class Engine:
    """Submit requests at any moment, call `step` for their tokens. Not to be used from several threads at once.

    Attributes:
        shapes: of the device calls.
    """

    def __init__(
        self,
        decoder: Decoder,
        codes: TransformCodes | LayerCodes | None = None,
        *,
        max_length: int,
        shapes: Shapes | None = None,
        pages: int | None = None,
        cache_bytes: int | None = None,
        memory_fraction: float | None = None,
        tails: int = 32,
        tail_every: int = 4096,
        tiers: Tiers | None = None,
        plain_dtype: str | None = None,
        drafter: Callable[[], Drafter] = PromptLookup,
        implementation: str | tuple[str, ...] | None = None,
        unroll_layers: bool = False,
        mesh: jax.sharding.Mesh | None = None,
        manifest: Manifest | None = None,
    ):
        """
        Args:
            decoder: the model, as `LoadedModel.decoder`.
            codes: its transform codes. None keeps every token plain, for which `tiers.recent` must cover max_length.
            max_length: longest sequence in tokens, new ones included.
            shapes: sequences on the device at once, tokens of a prompt's chunk, most drafted tokens to verify in a
                step; None for `Shapes.of(8)`. `shapes`, `pages` and `tails` are those of each part of the mesh.
            pages, cache_bytes, memory_fraction: size of the pool; at most one of them. By default pages for a
                sequence of `max_length` in every row. The bytes are of all arrays, plain tiers and tails included.
            tails: boundaries of shared prefixes that can be kept; 0 shares nothing.
            tail_every: also keep one whenever a sequence has reached a multiple of so many tokens.
            tiers: windows; None for the default ones.
            plain_dtype: of plain tiers; None is the dtype of the model's weights.
            drafter: makes the guesser of each request, if `shapes` has drafted tokens.
            implementation: of attention and writes; None is the best one here.
            unroll_layers: as in `CacheConfig`; takes longer to compile.
            mesh: of `sharding.make_mesh`. Heads and weights are divided over "tensor", requests over "data": each
                part of that axis has rows, pages and prefixes of its own. In several processes, all make the same
                engine, submit the same requests in the same order and get the same outputs.
            manifest: of the artifact that the codes are from, to warn of a `max_length` that outgrows it.

        Raises:
            ValueError: sizes that do not fit each other, the model, the codes or the mesh.
            NotImplementedError: no implementation here takes the model.

        Warns:
            BeyondCalibrationWarning: as `limits.warn_beyond`.
        """
        if codes is not None and manifest is not None:
            warn_beyond(manifest, max_length, what=f"artifact: max_length={max_length} is")
        if sum(size is not None for size in (pages, cache_bytes, memory_fraction)) > 1:
            raise ValueError("pages, cache_bytes, memory_fraction: expected at most one of them.")
        if codes is None and (pages, cache_bytes, memory_fraction) != (None, None, None):
            raise ValueError(
                "pages, cache_bytes, memory_fraction with codes=None: a plain cache has no pages, expected none of "
                "them; its bytes are those of `shapes.rows` sequences of max_length."
            )
        if tails < 0:
            raise ValueError(f"tails={tails}: expected at least 0.")
        self.shapes = shapes = shapes or Shapes.of(8)
        recent = (tiers or Tiers()).recent
        if shapes.take_back + 2 > recent:
            raise ValueError(
                f"drafts={shapes.drafts} with recent={recent}: expected at most {recent - 2}, and recent at least 3."
            )
        parts = 1 if mesh is None else mesh.shape[DATA]
        config = cache_config(
            decoder.config,
            max_length=max_length,
            tiers=tiers,
            plain_dtype=plain_dtype or decoder.dtype.name,
            batch=shapes.rows * parts,
            step_tokens=shapes.take_back + 2,
            implementation=implementation,
            unroll_layers=unroll_layers,
            mesh=mesh,
        )
        if memory_fraction is not None:
            cache_bytes = sizes.bytes_of_fraction(memory_fraction, mesh)
        if codes is None:
            pages = 0
        elif cache_bytes is not None:
            pages = sizes.pages_within(config, codes, cache_bytes=cache_bytes, tails=tails * parts) // parts
        if pages is None:
            pages = shapes.rows * config.sequence_pages + 1
        self._codes, self._tails, self._pages = codes, tails * parts, parts * pages
        self._allocators = [
            Allocator(config.tiers, pages=pages, tails=tails, take_back=shapes.take_back) for _ in range(parts)
        ]
        config = dataclasses.replace(config, pages=self._pages if codes is not None else None)
        self._executor = JaxExecutor(decoder, config, codes, shapes=shapes, tails=tails)
        self._vocabulary = decoder.config.vocab_size
        self._scheduler = Scheduler(
            self._allocators,
            self._executor,
            shapes,
            max_length=max_length,
            tail_every=tail_every,
            drafter=drafter if shapes.drafts else None,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do or to report."""
        return self._scheduler.idle

    def submit(self, request: Request) -> int:
        """Adds a request and returns its id.

        Raises:
            ValueError: it could outgrow `max_length`, or has a token that the model does not know or a `sampling` that
                is none.
        """
        bad = [token for token in request.prompt if not 0 <= token < self._vocabulary]
        if bad:
            raise ValueError(
                f"prompt has token {bad[0]}: expected 0 to {self._vocabulary - 1}, the model's vocabulary."
            )
        if not isinstance(request.sampling, Sampling | None):
            raise ValueError(f"sampling={request.sampling!r:.60}: expected an oscar_jax.Sampling, or None for greedy.")
        return self._scheduler.submit(request)

    def cancel(self, request: int) -> bool:
        """Ends a request now; False if it has ended already. The next `step` reports it."""
        return self._scheduler.cancel(request)

    def step(self) -> list[Output]:
        """Feeds every decoding sequence and some prompts, and returns the new tokens.

        Raises:
            RuntimeError: an earlier step was interrupted.
        """
        return self._scheduler.step()

    def complete(self, requests: Iterable[Request]) -> list[list[int]]:
        """New tokens of each request, once all have ended; what else runs goes on and its outputs are dropped.

        Raises:
            ValueError: as `submit`, of any of them; then none of them runs.
        """
        tokens: dict[int, list[int]] = {}
        try:
            for request in requests:
                tokens[self.submit(request)] = []
        except Exception:
            for number in tokens:
                self.cancel(number)
            raise
        left = set(tokens)
        while left:
            for output in self.step():
                if output.request in tokens:
                    tokens[output.request] += output.tokens
                    left -= {output.request} if output.finish else set()
        return list(tokens.values())

    def forget(self) -> None:
        """Gives up all kept prefixes; what runs is not touched."""
        for allocator in self._allocators:
            allocator.forget()

    def warm_up(self) -> int:
        """Compiles every program that requests can need, and returns how many that were; call it while idle.

        Raises:
            ValueError: requests are running.
        """
        if not self.idle:
            raise ValueError("warm_up while requests run: expected an idle engine; call it first.")
        before = compilations()
        self._executor.warm_up()
        return compilations() - before

    def stats(self) -> EngineStats:
        """See `EngineStats`."""
        config = self._executor.config
        pools = [dataclasses.asdict(allocator.stats()) for allocator in self._allocators]
        pool = AllocatorStats(**{name: sum(each[name] for each in pools) for name in pools[0]})
        page = config.tiers.page
        counts: dict[str, Any] = dataclasses.asdict(self._scheduler.counts)
        return EngineStats(
            device_bytes=self._executor.bytes,
            expected_bytes=sizes.total_bytes(config, self._codes, pages=self._pages, tails=self._tails),
            capacity_tokens=pool.pages * page,
            capacity_tokens_bf16=self._executor.bytes // sizes.bfloat16_token_bytes(config),
            tokens_in_use=(pool.pages - pool.pages_free - pool.pages_idle) * page,
            tokens_shared=pool.pages_shared * page,
            tokens_idle=pool.pages_idle * page,
            tails=pool.tails,
            tails_kept=pool.tails_kept,
            tail_bytes=sizes.row_bytes(config, self._codes),
            evictions=pool.evictions,
            page_copies=pool.copies,
            hit_rate=pool.tokens_hit / pool.tokens_asked if pool.tokens_asked else 0.0,
            prefix_hits=pool.hits,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            compilations=compilations(),
            **counts,
        )
