"""A serving loop that brings its own scheduling and uses nothing but the public calls; it is the documented example."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import oscar_jax as oscar
from oscar_jax.engine import Allocator
from oscar_jax.models import random_decoder
from tests.oscar_jax.tiny import CONFIG, TIERS, codes, tokens


def one_token(decoder, config, codes):
    """`step(cache, tokens [B, 1], counts [B]) -> (next tokens [B], cache)`."""

    def step(cache, tokens, counts):
        def attention(cache, layer, q, k, v):
            cache = oscar.demote(cache, k, v, layer=layer, counts=counts, codes=codes, tiers=config.tiers)
            out = oscar.attend(cache, q, k, v, layer=layer, counts=counts, codes=codes, config=config)
            return out, oscar.append(cache, k, v, layer=layer, counts=counts, tiers=config.tiers), None

        hidden, cache, _ = decoder(tokens, cache.lengths[:, None], attention, cache)
        return decoder.logits(hidden[:, -1]).argmax(-1), oscar.advance(cache, counts)

    return jax.jit(step)


def serve(step, config, codes, prompts, new):
    """Greedy tokens of each prompt, a token a step in every row; what earlier prompts stored is stored once."""
    allocator, cache = Allocator(config.tiers, pages=config.pages, tails=8), oscar.init_cache(config, codes)
    waiting, rows, tails, done = list(enumerate(prompts)), {}, {}, {}
    while waiting or rows:
        for row in sorted(set(range(config.batch)) - rows.keys())[: len(waiting)]:
            number, prompt = waiting.pop(0)
            begun = allocator.begin(prompt)
            rows[row] = number, begun.sequence, list(prompt)
            plain, lengths = cache.plain, cache.lengths.at[row].set(begun.length)
            if begun.tail is not None:
                plain = jax.tree.map(lambda x, tail, row=row: x.at[:, row].set(tail), plain, tails[begun.tail])
            cache = dataclasses.replace(cache, plain=plain, lengths=lengths)
        fed, counts = np.zeros((config.batch, 1), np.int32), np.zeros(config.batch, np.int32)
        table = np.full(cache.page_indices.shape, -1, np.int32)
        for row, (_, sequence, text) in rows.items():
            fed[row], counts[row] = text[allocator.length(sequence)], 1
            for source, target in allocator.grow(sequence, fed[row].tolist()):
                copied = jax.tree.map(lambda x, of=source, to=target: x.at[:, to].set(x[:, of]), cache.history)
                cache = dataclasses.replace(cache, history=copied)
            pages = allocator.pages(sequence)
            table[row, : len(pages)] = pages
        best, cache = step(dataclasses.replace(cache, page_indices=jnp.asarray(table)), fed, counts)
        for row, (number, sequence, text) in list(rows.items()):
            if allocator.length(sequence) == len(text):
                text.append(int(best[row]))
            if len(text) == len(prompts[number]) + new:
                slot = allocator.keep(sequence)
                if slot is not None:
                    tails[slot] = jax.tree.map(lambda x, row=row: x[:, row], cache.plain)
                allocator.end(sequence)
                done[number] = text[len(prompts[number]) :]
                del rows[row]
    return [done[number] for number in range(len(prompts))], allocator.stats()


def test_a_foreign_loop_shares_prefixes_and_gives_what_each_prompt_gives_alone():
    config = oscar.cache_config(
        CONFIG, max_length=72, tiers=TIERS, plain_dtype="float32", batch=2, step_tokens=2, pages=30
    )
    step = one_token(random_decoder(CONFIG), config, codes())
    first, second = tokens(30, 45)
    (answer,), _ = serve(step, config, codes(), [first], 8)
    turn = [*first, *answer, 5, 6]  # goes on where the first ended
    prompts = [first, second, turn, turn]
    together, stats = serve(step, config, codes(), prompts, 8)
    assert stats.hits == 2
    assert stats.tokens_hit == 2 * 37
    assert together == [serve(step, config, codes(), [prompt], 8)[0][0] for prompt in prompts]
