"""A smaller model as the guesser of drafted tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oscar_jax.engine.drafts import Drafter
from oscar_jax.models.decoder import Decoder
from oscar_jax.sampling import Sampling, choose
from oscar_jax.session import Session
from oscar_jax.step import Step, cache_config, make_step
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

GREEDY = Sampling()


def draft_model(
    decoder: Decoder,
    codes: TransformCodes | None = None,
    *,
    max_length: int,
    drafts: int,
    chunks: Sequence[int] = (8, 64),
    tiers: Tiers | None = None,
    plain_dtype: str | None = None,
) -> Callable[[], Drafter]:
    """For `Engine(drafter=..)`: every request gets a cache of the smaller model; its programs are compiled here.

    Args:
        decoder: of a model with the same tokens.
        codes: its transform codes; None keeps its cache plain.
        max_length: of the engine.
        drafts: most tokens guessed at once, those of the engine's `shapes`.
        chunks: tokens of its prefill calls, ascending: the few that a step has added, and those of a prompt.
        tiers: windows of a 2-bit cache; None for the default ones.
        plain_dtype: of plain tokens; None is the dtype of the model's weights.

    Raises:
        ValueError: as `cache_config` and `make_step`.
    """
    longest = max_length + drafts
    if codes is None:
        tiers = Tiers(sink=0, recent=longest)
    config = cache_config(
        decoder.config, max_length=longest, tiers=tiers, plain_dtype=plain_dtype, step_tokens=drafts + 1
    )
    step = make_step(decoder, config, codes)
    for chunk in chunks:
        ModelDrafts(step, chunks).propose([0] * min(chunk, max_length), drafts)
    return lambda: ModelDrafts(step, chunks)


class ModelDrafts:
    """The tokens that a model takes for the likeliest after a sequence; a `Drafter`."""

    def __init__(self, step: Step, chunks: Sequence[int]):
        """
        Args:
            step: of one sequence, able to take back as many tokens as are guessed at once.
            chunks: tokens of its prefill calls.
        """
        self._session = Session(step, chunks=chunks)
        self._stored: list[int] = []

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Drafter`."""
        if count < 1:
            return []
        # The last token is fed again if it is stored: its logits are needed.
        pairs = zip(self._stored, tokens[:-1], strict=False)
        same = next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        same = min(len(self._stored), len(tokens) - 1) if same is None else same
        self._session.take_back([len(self._stored) - same])
        logits = self._session.prefill([tokens[same:]])
        drafts = choose(logits, [GREEDY], [0]).tolist()
        while len(drafts) < count:
            drafts += choose(self._session.feed([drafts[-1:]]), [GREEDY], [0]).tolist()
        self._stored = [*tokens, *drafts[:-1]]
        return drafts
