"""Steps and engines over meshes of eight simulated devices against one device; the same tokens up to ties."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from oscar_jax.cache import init_cache
from oscar_jax.cache_check import check_cache
from oscar_jax.engine import Engine, Request, Shapes
from oscar_jax.engine.compilations import compilations
from oscar_jax.engine.invariants import check
from oscar_jax.models import random_decoder, tiny_config
from oscar_jax.sharding import make_mesh, weight_spec
from oscar_jax.step import Step, _run, cache_config, make_step
from pallas_kernels import sm90
from pallas_kernels.attention import gpu
from pallas_kernels.transform_code import TransformCodes
from pallas_kernels.write import triton
from tests.oscar_jax.tiny import TIERS, tokens
from tests.pallas_kernels.codes import transform_codes

CONFIG = tiny_config(q_heads=8, kv_heads=2)
CODES = transform_codes(bucket=16, layers=CONFIG.layers, kv_heads=CONFIG.kv_heads, head_dim=CONFIG.head_dim)
BATCH, WIDTH, NEW = 4, 24, 8
TIE = 1e-4


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(CONFIG)


@pytest.fixture(scope="module")
def alone(decoder) -> Step:
    return step_on(decoder, None)


def step_on(decoder, mesh) -> Step:
    config = cache_config(CONFIG, max_length=72, batch=BATCH, tiers=TIERS, plain_dtype="float32", mesh=mesh)
    return make_step(decoder, config, CODES)


def greedy(step: Step, prompts: list[list[int]]):
    """New tokens `[B, NEW]`, logits `[B, NEW, V]` and the cache; one program for prompts and decoding."""
    cache, fed, new, logits = step.init(), [list(prompt) for prompt in prompts], [], []
    while len(new) < NEW:
        rows, counts = np.zeros((BATCH, WIDTH), np.int32), np.zeros(BATCH, np.int32)
        longest = max(map(len, fed))
        for row, left in enumerate(fed):
            if len(left) == longest or longest <= WIDTH:  # the others wait, so that all end their prompts together
                counts[row] = min(len(left), WIDTH)
                rows[row, : counts[row]] = left[:WIDTH]
                del left[:WIDTH]
        last, cache = step(cache, rows, counts)
        if not any(fed):
            logits.append(np.asarray(last))
            new.append(logits[-1].argmax(-1))
            fed = [[int(token)] for token in new[-1]]
    return np.stack(new, 1), np.stack(logits, 1), cache


@pytest.mark.parametrize(("data", "tensor"), [(1, 8), (2, 4), (4, 2)])
def test_a_mesh_gives_the_tokens_of_one_device(decoder, alone, data, tensor):
    """Also with more devices than KV heads: then each holds one of several copies."""
    prompts = tokens(40, 3, 25, 60)
    expected, logits, _ = greedy(alone, prompts)
    step = step_on(decoder, make_mesh(data=data, tensor=tensor))
    got, others, cache = greedy(step, prompts)
    for row in range(BATCH):
        differs = np.flatnonzero(got[row] != expected[row])
        same = differs[0] if differs.size else NEW
        np.testing.assert_allclose(others[row, :same], logits[row, :same], rtol=0, atol=TIE)
        if differs.size:
            second, first = np.sort(logits[row, same])[-2:]
            assert first - second < TIE
    assert cache.history is not None
    assert isinstance(step.codes, TransformCodes)
    heads = max(tensor, CONFIG.kv_heads)
    assert cache.history.key.slots.shape[2] == cache.plain.recent_k.shape[3] == heads
    assert {shard.data.shape[2] for shard in cache.history.key.slots.addressable_shards} == {heads // tensor}
    assert {shard.data.shape[1] for shard in cache.plain.recent_k.addressable_shards} == {BATCH // data}
    for shard in step.codes.key.encode.addressable_shards:  # every head's code lies where the head does
        head = shard.index[1].start or 0
        original = np.asarray(CODES.key.encode)[:, head * CONFIG.kv_heads // heads]
        np.testing.assert_array_equal(shard.data[:, 0], original)
    check_cache(cache, step.config)
    scale = cache.history.value.scale.at[1, step.config.sequence_pages * (BATCH - 1)].set(
        np.inf
    )  # of the last sequence
    value = dataclasses.replace(cache.history.value, scale=scale)
    damaged = dataclasses.replace(cache, history=dataclasses.replace(cache.history, value=value))
    with pytest.raises(ValueError, match=rf"sequence {BATCH - 1}, layer 1, head 0, position {TIERS.sink}: value scale"):
        check_cache(damaged, step.config)
    row, count = np.zeros((BATCH, WIDTH), np.int32), np.ones(BATCH, np.int32)
    before = compilations()
    compiled = _run.lower(step.decoder, step.codes, cache, row, count, config=step.config, output="last").compile()
    assert compilations() == before  # what a step returns is laid out as what it was given
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert not re.search(r" (all-gather|all-to-all|collective-permute)\(", text)
    assert len(re.findall(r" all-reduce\(", text)) <= 3  # embedding, and in a layer after attention and after the MLP
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(cache.history)) // (data * tensor)


def test_an_engine_on_a_mesh_serves_from_pools_of_its_parts(decoder, alone):
    shapes = Shapes(rows=2, decode_batches=(2,), prefill_batches=(1,), chunks=(16,))
    engine = Engine(
        decoder, CODES, max_length=72, tiers=TIERS, plain_dtype="float32", shapes=shapes, pages=9, tails=2,
        mesh=make_mesh(data=2, tensor=4),
    )  # fmt: skip
    prompts = tokens(40, 3, 25, 50)
    requests = [Request(prompt, max_tokens=NEW) for prompt in prompts]
    expected = greedy(alone, prompts)[0].tolist()
    assert engine.complete([*requests, *requests[::-1]]) == [*expected, *expected[::-1]]
    before = compilations()
    assert engine.complete([requests[3], requests[1]]) == [expected[3], expected[1]]  # found kept
    assert compilations() == before
    stats = engine.stats()
    assert stats.device_bytes == stats.expected_bytes
    assert stats.prefix_hits
    assert stats.tokens_in_use == 0
    for allocator in engine._allocators:
        assert allocator.stats().tokens_asked
        check(allocator)


def test_what_a_mesh_does_not_divide_is_named(decoder):
    with pytest.raises(ValueError, match=r"data=3, tensor=4: expected sizes of at least 1 and a product of at most 8"):
        make_mesh(data=3, tensor=4)
    with pytest.raises(ValueError, match=r"batch=3, pages=None on a mesh with data=2: expected multiples of 2"):
        cache_config(CONFIG, max_length=72, batch=3, mesh=make_mesh(data=2))
    with pytest.raises(ValueError, match=r"tensor=3: expected whole query heads .*the nearest that fits is tensor=2"):
        cache_config(CONFIG, max_length=72, mesh=make_mesh(tensor=3))
    with pytest.raises(ValueError, match=r"mesh with axes \('data', 'model'\).*\('data', 'tensor'\), both Auto"):
        cache_config(CONFIG, max_length=72, mesh=jax.make_mesh((1, 2), ("data", "model")))
    config = cache_config(CONFIG, max_length=72, batch=2, tiers=TIERS, pages=14, mesh=make_mesh(data=2))
    with pytest.raises(ValueError, match=r"pages=14: one sequence of max_length=72 needs 8, in each of 2 parts"):
        make_step(decoder, config, CODES).init()


def test_a_vocabulary_that_the_mesh_does_not_divide_is_on_every_device():
    mesh = make_mesh(tensor=4)
    assert weight_spec("embedding", CONFIG, mesh) == jax.P("tensor")
    assert weight_spec("embedding", tiny_config(vocab_size=97), mesh) == jax.P()
    assert weight_spec("layers.key", CONFIG, mesh) == jax.P()
    assert weight_spec("layers.query", CONFIG, mesh) == jax.P(None, None, "tensor")


@pytest.mark.parametrize("width", [1, 300])
def test_the_gpu_kernels_are_those_of_a_device_with_its_part_of_the_heads(width, monkeypatch):
    for module in (gpu, triton):
        monkeypatch.setattr(module, "unavailable", lambda: None)  # lowering needs no GPU
    found = []
    for parts in (2, 1):
        mesh = AbstractMesh(
            (1, parts), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto),
            abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None),
        )  # fmt: skip
        model = tiny_config(q_heads=4 * parts, kv_heads=parts, head_dim=64, max_position=2048)
        codes = transform_codes(bucket=2048, layers=model.layers, kv_heads=parts)
        config = cache_config(model, max_length=1024, plain_dtype="bfloat16", implementation="triton")
        shapes = jax.eval_shape(lambda: (random_decoder(model, dtype="bfloat16"), codes, init_cache(config, codes)))  # noqa: B023
        row, count = (jax.ShapeDtypeStruct(shape, "int32") for shape in ((1, width), (1,)))
        config = dataclasses.replace(config, mesh=mesh)
        with use_abstract_mesh(mesh):
            lowered = _run.trace(*shapes, row, count, config=config, output="last").lower(lowering_platforms=("cuda",))
        found.append([(kernel.name, kernel.grid) for kernel in sm90.kernels(lowered)])
    assert found[0] == found[1]
