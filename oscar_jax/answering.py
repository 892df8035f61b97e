"""Prompts in, log-probabilities and answers out, many at once: what a benchmark harness asks of a model.

Two `Answerer`s of one model, one with transform codes and one without, run the same prompts with equal concurrency and
equal budgets.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax.engine import Engine, Request, Shapes
from oscar_jax.generate import CONTEXT_TOKENS, stop_tokens
from oscar_jax.layer_codes import LayerCodes
from oscar_jax.models import LoadedModel
from oscar_jax.sampling import Sampling
from oscar_jax.step import Step, cache_config, make_step
from oscar_jax.text_stream import TextStream
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Answer:
    """One generated answer.

    Attributes:
        text: without the stop text.
        tokens: generated ones, a stop token included.
        truncated: the budget ended it.
        prompt_cut: tokens taken from the prompt's beginning so that prompt and budget fit.
    """

    text: str
    tokens: int
    truncated: bool
    prompt_cut: int


class Answerer:
    """A model and one kind of cache.

    Attributes:
        model, codes: as for `Engine`; codes None is the plain cache.
        max_length: longest sequence in tokens, the answer included.
        rows: sequences on the device at once.
        max_tokens: most new tokens of an answer, whatever is asked for.
    """

    def __init__(
        self,
        model: LoadedModel,
        codes: TransformCodes | LayerCodes | None = None,
        *,
        max_length: int,
        max_tokens: int,
        rows: int = 8,
        tiers: Tiers | None = None,
        plain_dtype: str | None = None,
        implementation: str | None = None,
    ):
        """
        Args:
            tiers, plain_dtype, implementation: as for `Engine`; the plain cache takes the plain dtype alone.

        Raises:
            ValueError: a model without a tokenizer, lengths beyond its context, or a budget that leaves no prompt.
        """
        if model.tokenizer is None:
            raise ValueError(f"model {model.identity.model_id!r} has no tokenizer, expected one to read prompts with.")
        if not 1 < max_length <= model.config.max_position:
            raise ValueError(
                f"max_length={max_length}: expected 2 to {model.config.max_position}, the model's context."
            )
        if not 0 < max_tokens < max_length:
            raise ValueError(f"max_tokens={max_tokens}: expected 1 to {max_length - 1}, below max_length.")
        self.model, self.codes = model, codes
        self.max_length, self.max_tokens, self.rows = max_length, max_tokens, rows
        tiers = Tiers() if tiers is None else tiers
        if codes is None:
            tiers, implementation = dataclasses.replace(tiers, sink=0, recent=max_length), None
        self._options = {"tiers": tiers, "plain_dtype": plain_dtype, "implementation": implementation}
        self._stops = stop_tokens(model.tokenizer)
        self._engine: Engine | None = None
        self._step: Step | None = None

    def log_likelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """For each context and continuation, as token ids, the log-probability in nats of the continuation after the
        context, and whether it is the greedy one. A context too long loses its beginning.

        Raises:
            ValueError: an empty context or continuation, or a continuation too long by itself.
        """
        for context, continuation in pairs:
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"a context of {len(context)} and a continuation of {len(continuation)} tokens: expected at least "
                    f"one of each, and at most max_length={self.max_length} of the latter."
                )
        rows = [[*context, *continuation][-self.max_length - 1 :] for context, continuation in pairs]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: -len(rows[i]))  # alike lengths share a batch
        for start in range(0, len(order), self.rows):
            batch = order[start : start + self.rows]
            found = self._batch([rows[i] for i in batch], [len(pairs[i][1]) for i in batch])
            for i, result in zip(batch, found, strict=True):
                results[i] = result
        return results

    def _batch(self, rows: list[list[int]], scored: list[int]) -> list[tuple[float, bool]]:
        """Of up to `self.rows` sequences, the last `scored` tokens of each."""
        if self._step is None:
            config = cache_config(self.model.config, max_length=self.max_length, batch=self.rows, **self._options)
            self._step = make_step(self.model.decoder, config, self.codes)
        step, cache = self._step, self._step.init()
        lengths = np.zeros(self.rows, np.int64)
        lengths[: len(rows)] = [len(row) - 1 for row in rows]
        tokens = np.zeros((self.rows, lengths.max() + CHUNK + 1), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        sums, greedy = np.zeros(len(rows)), np.ones(len(rows), bool)
        for start in range(0, int(lengths.max()), CHUNK):
            counts = np.clip(lengths - start, 0, CHUNK).astype(np.int32)
            hidden, cache = step(cache, tokens[:, start : start + CHUNK], counts, output="hidden")
            for i, count in enumerate(counts[: len(rows)]):
                first = max(int(lengths[i]) - scored[i] - start, 0)
                if first < count:  # logits of one row at a time: all of them at once would be the largest array
                    targets = jnp.asarray(tokens[i, start + 1 : start + 1 + CHUNK])
                    log_p, right = (np.asarray(x)[first:count] for x in _judge(step.decoder, hidden[i], targets))
                    sums[i] += log_p.sum(dtype=np.float64)
                    greedy[i] &= bool(right.all())
        return [(float(total), bool(right)) for total, right in zip(sums, greedy, strict=True)]

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: Sequence[int],
        stops: Sequence[Sequence[str]],
        sampling: Sequence[Sampling],
    ) -> list[Answer]:
        """An answer to each prompt, token ids.

        Args:
            max_tokens: budget of each, at most `self.max_tokens` of which count.
            stops: texts that end each answer, beside the model's stop tokens.
            sampling: of each; of sequences that share a seed, the i-th draw is shared too (`seeds`).
        """
        if self._engine is None:
            shapes = Shapes.of(self.rows)
            self._engine = Engine(
                self.model.decoder, self.codes, max_length=self.max_length, shapes=shapes, **self._options
            )
        engine, running, results = self._engine, {}, [Answer("", 0, False, 0)] * len(prompts)
        for i, prompt in enumerate(prompts):
            budget = min(max_tokens[i], self.max_tokens)
            kept = list(prompt)[-(self.max_length - budget) :]
            request = Request(kept, max_tokens=budget, sampling=sampling[i], stop_tokens=self._stops)
            text = TextStream(self.model.tokenizer, stop=stops[i], context=kept[-CONTEXT_TOKENS:])
            running[engine.submit(request)] = [i, text, "", 0, len(prompt) - len(kept)]
        while running:
            for output in engine.step():
                if output.request not in running:
                    continue  # cancelled below: its stop text had come
                state = running[output.request]
                i, text, _, _, cut = state
                for token in output.tokens:
                    state[2] += text.push(token)
                    state[3] += 1
                    if text.stopped:
                        break
                if text.stopped or output.finish:
                    if not output.finish:
                        engine.cancel(output.request)
                    truncated = output.finish == "length" and not text.stopped
                    results[i] = Answer(state[2] + text.finish(), state[3], truncated, cut)
                    del running[output.request]
        while not engine.idle:
            engine.step()  # the ends of cancelled requests
        return results


def seeds(seed: int, count: int) -> list[int]:
    """Seeds of `count` sequences that draw independently, the same ones for the same `seed`."""
    return [zlib.crc32(f"{seed} {number}".encode()) for number in range(count)]


@jax.jit
def _judge(decoder, hidden, targets):
    """Log-probability of each target and whether it is the most likely token; hidden `[T, E]`, targets `[T]`."""
    log_p = jax.nn.log_softmax(decoder.logits(hidden), axis=-1)
    return jnp.take_along_axis(log_p, targets[:, None], axis=-1)[:, 0], log_p.argmax(-1) == targets
