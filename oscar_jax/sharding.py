"""One model and its cache over a mesh with the axes "data" (sequences) and "tensor" (heads).

    mesh = make_mesh(data=2, tensor=4)
    model = models.load(folder, mesh=mesh)
    step = make_step(model.decoder, cache_config(model.config, max_length=4096, batch=8, mesh=mesh), codes)

Weights carry named shardings of the usual kind (columns of what makes heads and hidden units, rows of what reads them),
and XLA inserts the collectives. The cache and its kernels run under `shard_map`, each device on the KV heads and
sequences it holds, without any communication; page ids count from the first page of a device's own part of the pool.
A mesh with more devices on "tensor" than KV heads stores each KV head several times, and its query heads are divided
among the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from oscar_jax.layer_codes import LayerCodes
    from oscar_jax.models.config import ModelConfig
    from oscar_jax.models.decoder import Decoder
    from pallas_kernels.transform_code import TransformCodes

DATA, TENSOR = "data", "tensor"
CODES = PartitionSpec(None, TENSOR)  # of [L, K, ..]
HEADS = PartitionSpec(DATA, None, TENSOR)  # of q, k, v [B, T, heads, D]
PLAIN = PartitionSpec(None, DATA, None, TENSOR)  # of sinks and rings [L, B, tokens, K, D] or [L, B, tokens, K/h, h D]
HISTORY = PartitionSpec(None, DATA, TENSOR)  # of [L, P, K, ..]
ROWS = PartitionSpec(DATA)  # of [B, ..]
EVERYWHERE = PartitionSpec()

# Axis of each weight that is divided over "tensor".
_HEAD_AXES = {"layers.query": 2, "layers.query_bias": 1, "layers.output": 1}
_KV_HEAD_AXES = {"layers.key": 2, "layers.value": 2, "layers.key_bias": 1, "layers.value_bias": 1}
_MLP_AXES = {"layers.gate": 2, "layers.up": 2, "layers.down": 1}
_VOCABULARY_AXES = {"embedding": 0, "head": 1}

Function = TypeVar("Function", bound=Callable)
Codes = TypeVar("Codes", bound="TransformCodes | LayerCodes")


def make_mesh(*, data: int = 1, tensor: int = 1, devices: Any = None) -> Mesh:
    """A mesh of `data * tensor` devices.

    Args:
        data: parts that sequences are divided into. tensor: parts of the heads and weights.
        devices: which ones; None for the first of all processes' devices.

    Raises:
        ValueError: a size below 1, or more devices than there are.
    """
    devices = jax.devices() if devices is None else list(devices)
    if data < 1 or tensor < 1 or data * tensor > len(devices):
        raise ValueError(
            f"data={data}, tensor={tensor}: expected sizes of at least 1 and a product of at most {len(devices)}, the "
            "devices there are."
        )
    grid = np.asarray(devices[: data * tensor]).reshape(data, tensor)
    return Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto, AxisType.Auto))


def check_mesh(mesh: Mesh, *, batch: int, pages: int | None, q_heads: int, kv_heads: int) -> None:
    """Raises ValueError for axes that are not those of `make_mesh`, or a cache that they do not divide."""
    if mesh.axis_names != (DATA, TENSOR) or set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"mesh with axes {mesh.axis_names} of types {mesh.axis_types}: expected ('data', 'tensor'), both Auto, as "
            "oscar_jax.sharding.make_mesh makes it."
        )
    data, tensor = mesh.shape[DATA], mesh.shape[TENSOR]
    if batch % data or (pages or 0) % data:
        raise ValueError(
            f"batch={batch}, pages={pages} on a mesh with data={data}: expected multiples of {data}, as sequences and "
            "their pages are divided."
        )
    if q_heads % tensor or (kv_heads % tensor and tensor % kv_heads):
        fitting = [n for n in range(tensor, 0, -1) if not (q_heads % n or (kv_heads % n and n % kv_heads))]
        raise ValueError(
            f"q_heads={q_heads}, kv_heads={kv_heads} on a mesh with tensor={tensor}: expected whole query heads and "
            f"KV heads (or whole copies of them) on each device; the nearest that fits is tensor={fitting[0]}."
        )


def on_mesh(mesh: Mesh | None, function: Function, *, inputs: Any, outputs: Any) -> Function:
    """The function on each device's part of its arguments, under `shard_map`; without a mesh the function itself.

    Args:
        inputs, outputs: partition specs, prefixes of the trees of arguments and results.
    """
    if mesh is None:
        return function
    # Pallas kernels do not say along which axes their results vary, so that cannot be checked.
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)  # type: ignore[return-value]


def named(mesh: Mesh, specs: Any) -> Any:
    """Named shardings of a tree of partition specs, spelled as XLA spells those of its results.

    Equal placements must be spelled equally, or a step that gets back what it returned would be compiled again.
    """

    def one(spec: PartitionSpec) -> NamedSharding:
        axes = [None if axis is None or mesh.shape[axis] == 1 else axis for axis in spec]
        while axes and axes[-1] is None:
            axes.pop()
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(one, specs)


def constrained(mesh: Mesh | None, tree: Any, specs: Any) -> Any:
    """The tree, its arrays laid out by a prefix of partition specs; as it is without a mesh."""
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, named(mesh, specs))


def weight_spec(name: str, config: ModelConfig, mesh: Mesh) -> PartitionSpec:
    """Of a weight of `parameter_shapes`, "layers." ones with their leading L.

    Vocabulary and MLP are divided where the axis' size divides them; what is left, norms too, is on every device. So
    are keys and values where there are fewer KV heads than devices: each device then stores one of them.
    """
    divided = (
        (config.q_heads, _HEAD_AXES),
        (config.kv_heads, _KV_HEAD_AXES),
        (config.mlp_size, _MLP_AXES),
        (config.vocab_size, _VOCABULARY_AXES),
    )
    for size, axes in divided:
        if name in axes and size % mesh.shape[TENSOR] == 0:
            return PartitionSpec(*[None] * axes[name], TENSOR)
    return EVERYWHERE


def placed(
    mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """An array whose parts are read where they belong, one at a time; a part that several devices hold is read once.

    Args:
        read: the part at an index; called for this process's devices only.
    """
    target = named(mesh, spec)
    holders: dict[tuple, list[Any]] = {}
    for device, index in target.addressable_devices_indices_map(shape).items():
        assert index is not None  # as it is for every named sharding
        holders.setdefault(tuple((part.start, part.stop) for part in index), []).append(device)
    parts = []
    for bounds, devices in holders.items():
        part = read(tuple(slice(*pair) for pair in bounds))
        parts += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, target, parts)


def decoder_specs(decoder: Decoder, mesh: Mesh) -> Decoder:
    """Partition specs in place of a decoder's arrays."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        del leaf
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return weight_spec(name, decoder.config, mesh)

    return jax.tree_util.tree_map_with_path(spec, decoder)


def place_decoder(decoder: Decoder, mesh: Mesh) -> Decoder:
    """The decoder with its weights on the mesh; what lies there already is not copied."""
    return jax.device_put(decoder, named(mesh, decoder_specs(decoder, mesh)))


def codes_sharding(mesh: Mesh, *, kv_heads: int) -> NamedSharding:
    """Where `artifact.load` puts a model's codes: each device's heads, or all where there are fewer than devices."""
    return named(mesh, EVERYWHERE if kv_heads % mesh.shape[TENSOR] else CODES)


def place_codes(codes: Codes, mesh: Mesh, *, kv_heads: int) -> Codes:
    """Transform codes with each device's heads on it.

    Args:
        kv_heads: that the cache stores, a multiple of the codes'.
    """
    copies = kv_heads // codes.kv_heads
    if copies > 1:
        codes = jax.tree.map(lambda leaf: np.repeat(leaf, copies, axis=1), codes)
    return jax.device_put(codes, named(mesh, CODES))


def copied(heads: jax.Array, copies: int) -> jax.Array:
    """Heads `[.., K, D]`, each several times in a row."""
    return heads if copies == 1 else jnp.repeat(heads, copies, axis=-2)


def on_host(x: jax.Array) -> np.ndarray:
    """The whole array, on a mesh of several processes too, in each of which it must then be called."""
    if not (x.is_fully_addressable or x.is_fully_replicated):
        assert isinstance(x.sharding, NamedSharding)  # there are no others here
        x = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, EVERYWHERE))(x)
    return np.asarray(x)
