"""What a cache accepts and refuses when it is built, its bytes, and its donation."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import cache as caches
from oscar_jax.cache import cache_bytes, expected_bits, init_cache
from oscar_jax.cache_settings import CacheConfig
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import bits_per_element
from tests.oscar_jax.cache_runs import BASE, BATCH, DIM, LAYERS, base_codes, config, step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers=0: expected a whole number, at least 1"),
        ({"max_length": 7.5}, "max_length=7.5: expected a whole number"),
        ({"head_dim": 65}, "head_dim=65: expected a multiple of 8"),
        ({"q_heads": 5}, "q_heads=5, kv_heads=2: expected a whole number of query heads a KV head"),
        ({"q_heads": 66, "kv_heads": 1}, "at most 32"),
        ({"plain_dtype": "int8"}, "plain_dtype='int8': expected float16, bfloat16, float32 or float64"),
        ({"step_tokens": 9}, "step_tokens=9: expected at most recent=8"),
        ({"windows": (4,)}, r"windows=\(4,\): expected 2 entries"),
        ({"windows": (4, 0)}, "each None or at least 1"),
        ({"implementation": "cuda"}, "implementation='cuda': expected one of triton, tpu, xla, or None"),
    ],
)
def test_wrong_requests_are_refused_at_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("implementation", ("triton", "tpu", ("triton", "tpu")))
def test_fault_c12_an_absent_implementation_is_refused_at_construction(implementation):
    """Every option that a backend cannot serve is named when the cache is built, with what works instead."""
    with pytest.raises(NotImplementedError, match=r"cannot run here \(.*'xla' runs everywhere"):
        config(implementation=implementation)
    assert config(implementation=("triton", "xla")).implementation == ("triton", "xla")


def test_wrong_codes_and_pools_are_refused_at_construction():
    codes = base_codes()
    for wrong in ({"kv_heads": 3}, {"layers": 3}, {"head_dim": 80}):
        with pytest.raises(ValueError, match="calibrate this model"):
            init_cache(BASE, base_codes(**wrong))
    with pytest.raises(ValueError, match=r"codes=None with max_length=72.*recent >= 68"):
        init_cache(BASE)
    with pytest.raises(ValueError, match="bucket=16 with page=12: expected pages that divide the bucket"):
        init_cache(config(tiers=Tiers(4, 8, 4, 12)), codes)
    with pytest.raises(ValueError, match="pages=3: one sequence of max_length=72 needs 8"):
        init_cache(config(pages=3), codes)
    with pytest.raises(ValueError, match=r"switch on float64 first, with jax\.enable_x64"):
        init_cache(config(plain_dtype="float64"), codes)


def test_fault_c17_every_accepted_pair_of_options_runs():
    """(sliding window, soft-cap, sink logits, T > 1, D = 96): each pair is traced, and all five together run."""
    options = {"window", "softcap", "sinks", "several", "head 96"}

    def build(chosen):
        dim = 96 if "head 96" in chosen else 64
        spec = AttentionSpec(dim**-0.5, softcap=5.0 if "softcap" in chosen else None)
        built = config(head_dim=dim, attention=spec, windows=(None, 9) if "window" in chosen else None)
        codes = base_codes(head_dim=dim)
        width = 5 if "several" in chosen else 1
        q, k = (jnp.ones((BATCH, width, heads, dim)) for heads in (4, 2))
        sinks = jnp.zeros(4) if "sinks" in chosen else None

        def once(cache, codes):
            layer, counts = jnp.int32(1), jnp.full(BATCH, width, jnp.int32)
            cache = caches.demote(cache, k, k, layer=layer, counts=counts, codes=codes, tiers=built.tiers)
            out = caches.attend(
                cache, q, k, k, layer=layer, counts=counts, codes=codes, config=built, sink_logits=sinks
            )
            return out, caches.append(cache, k, k, layer=layer, counts=counts, tiers=built.tiers)

        return once, init_cache(built, codes), codes, q.shape

    for chosen in itertools.combinations(sorted(options), 2):
        once, cache, codes, shape = build(chosen)
        out, _ = jax.eval_shape(once, cache, codes)
        assert out.shape == shape
    once, cache, codes, _ = build(options)
    out, cache = jax.jit(once)(cache, codes)
    assert np.isfinite(np.asarray(out)).all()
    assert (np.asarray(out) < 1).all()  # a learnt sink logit takes probability from values of one
    assert np.asarray(cache.plain.sink_k)[1].any()


PRESETS = {
    "levels, bfloat16": (config(plain_dtype="bfloat16"), {}),
    "minmax, float32": (config(max_length=300), {"key": "naive", "value": "rotation-rank", "bucket": None}),
    "wide slots": (config(batch=3, pages=40), {"slots": 72}),
    "head 128": (
        config(head_dim=128, tiers=Tiers(64, 256, 8, 128), max_length=4096),
        {"head_dim": 128, "bucket": 2048},
    ),
}


@pytest.mark.parametrize("name", PRESETS)
def test_fault_c13_the_bytes_allocated_are_the_bytes_promised(name):
    cfg, changes = PRESETS[name]
    codes = base_codes(**changes)
    cache = init_cache(cfg, codes)
    tiers, width = cfg.tiers, {"bfloat16": 2, "float32": 4}[cfg.plain_dtype]
    pages = -(-((cfg.max_length - tiers.sink - tiers.recent) // tiers.group * tiers.group) // tiers.page)
    pool = cfg.pages or cfg.batch * pages
    ring = min(tiers.recent + tiers.group - 1 + cfg.step_tokens - 1, cfg.max_length - tiers.sink)
    plain = 2 * cfg.layers * cfg.batch * (tiers.sink + ring) * cfg.kv_heads * cfg.head_dim * width
    row = sum(code.slots // 4 + 2 + 2 * (code.kind == "minmax") for code in (codes.key, codes.value))
    history = cfg.layers * pool * cfg.kv_heads * tiers.page * row
    tables = 4 * (cfg.batch * pages + cfg.batch)
    assert cache_bytes(cache) == {
        "plain": plain, "history": history, "tables": tables, "total": plain + history + tables,
    }  # fmt: skip
    assert cache_bytes(cache)["total"] == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    per_element = 8 * row / (2 * cfg.head_dim)
    context = cfg.max_length
    old = tiers.history_tokens(context)
    assert expected_bits(cfg, codes, context) == pytest.approx(
        ((context - old) * 8 * width + old * per_element) / context
    )


def test_expected_bits_of_a_plain_cache_are_its_dtype():
    plain = config(plain_dtype="bfloat16", tiers=Tiers(4, 512, 8, 64))
    assert expected_bits(plain, None, 100) == 16
    assert bits_per_element(None, plain.tiers, 100, plain_bits=32) == 32
    assert init_cache(plain).history is None


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("width", (1, 24))
def test_a_step_updates_the_donated_cache_in_place(dtype, width):
    """All bytes of the cache are aliased, and no operation of the compiled step makes a second copy of any pool."""
    cfg, codes = config(plain_dtype=dtype), dataclasses.replace(base_codes(), scale_dtype="bfloat16")
    cache = init_cache(cfg, codes)
    q, k = (jnp.zeros((LAYERS, BATCH, width, n, DIM)) for n in (4, 2))
    compiled = step.lower(cache, codes, q, k, k, jnp.zeros(BATCH, jnp.int32), config=cfg).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    assert memory.alias_size_in_bytes >= cache_bytes(cache)["total"]
    shapes = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves((cache.plain, cache.history))}
    moved = [
        line.strip()[:120]
        for line in text.splitlines()
        if any(f"[{shape}]" in line.split(" = ", 1)[-1].split("{", 1)[0] for shape in shapes)
        and any(f" {operation}(" in line for operation in ("copy", "convert", "bitcast-convert", "select", "transpose"))
    ]
    assert not moved


def test_a_config_is_a_static_argument():
    assert hash(config()) == hash(BASE)
    assert dataclasses.replace(BASE, batch=3) != BASE
    assert isinstance(BASE, CacheConfig)
