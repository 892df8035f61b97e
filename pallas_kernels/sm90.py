"""What Pallas' Triton kernels cost on Hopper, found without a GPU: registers, spills, stack, shared memory.

`python -m pallas_kernels.sm90 --shape 16,65536,32,8,128,1` lowers decode attention for a GPU that is not there and
compiles the Triton IR of the lowered module with PyPI's Triton and the ptxas that comes with it. `--xla` compiles with
XLA instead, which has a Triton and LLVM passes of its own: slower, needs the `cuda13` extra (still no GPU), and gives
the registers that the device's profiler shows, where PyPI's Triton may be far off (97 registers for 163).

Any jitted function will do: `[compiled(kernel) for kernel in kernels(lower(function, *arguments))]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from pallas_kernels.storage import storage_dtype

ARCHITECTURE = 90
TARGETS = ("__gpu$xla.gpu.triton", "xla.gpu.triton")
# Of one multiprocessor (CUDA C++ Programming Guide, compute capability 9.0).
REGISTERS, REGISTER_UNIT = 65536, 256  # 32-bit registers; a warp takes a multiple of the unit
WARPS, PROGRAMS = 64, 32
SHARED, SHARED_RESERVED = 228 * 1024, 1024  # bytes; what every program takes on top of its own
# XLA's GpuTargetConfigProto of an H200, what compilation asks of it.
TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  device_address_bits: 64 core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 151397597184
}
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch in a lowered module: Triton IR as MLIR bytecode, and how it is to be compiled."""

    name: str
    ir: bytes
    grid: tuple[int, int, int]
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Usage:
    """What ptxas says of one kernel; registers a thread, bytes a thread (spills, stack) or a program (shared)."""

    kernel: Kernel
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int | None  # None: XLA does not tell
    ptx: str
    cubin: bytes

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads

    @property
    def resident_warps(self) -> int:
        """Warps that one multiprocessor holds at a time, at most 64."""
        warps = self.kernel.warps
        registers = warps * -(-32 * self.registers // REGISTER_UNIT) * REGISTER_UNIT
        shared = (self.shared or 0) + SHARED_RESERVED
        return warps * min(REGISTERS // registers, WARPS // warps, PROGRAMS, SHARED // shared)


def lower(
    function: Callable[..., Any], *arguments: Any, sharding: jax.sharding.Sharding | None = None
) -> jax.stages.Lowered:
    """Lowers a function, jitted or not, for an H200 that need not be there.

    Args:
        arguments: arrays or `jax.ShapeDtypeStruct`s, in pytrees.
        sharding: `absent_gpu()` if XLA is to compile it.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    jitted = jax.jit(function) if sharding is None else jax.jit(function, in_shardings=sharding, out_shardings=sharding)
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return jitted.trace(*shapes).lower(lowering_platforms=("cuda",))


def absent_gpu() -> NamedSharding:
    """Everything on one H200 that XLA compiles for without having it; needs the CUDA plugin of jax."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc("", "cuda", target_config=TARGET, topology="1x1x1")
    return NamedSharding(Mesh(topology.devices, ("x",)), PartitionSpec())


def kernels(lowered: jax.stages.Lowered) -> list[Kernel]:
    """The Triton kernels of a lowered function in program order, each distinct one once.

    Raises:
        ValueError: there is none.
    """
    found: dict[Kernel, None] = {}

    def visit(operation: Any) -> Any:
        from jaxlib.mlir import ir

        attributes = operation.attributes
        if "call_target_name" in attributes and ir.StringAttr(attributes["call_target_name"]).value in TARGETS:
            config = ir.DictAttr(attributes["mhlo.backend_config"])

            def number(name: str) -> int:
                return ir.IntegerAttr(config[name]).value

            kernel = Kernel(
                ir.StringAttr(config["name"]).value,
                ir.StringAttr(config["ir"]).value_bytes,
                (number("grid_x"), number("grid_y"), number("grid_z")),
                number("num_warps"),
                number("num_stages"),
            )
            found[kernel] = None
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    if not found:
        raise ValueError("the lowered function has no Triton kernel; expected a pallas_call with Triton parameters.")
    return list(found)


def text(kernel: Kernel) -> str:
    """Triton IR in generic form.

    Bytecode ties every operation to its version in one build of MLIR, and XLA's is not PyPI's; text does less so.
    """
    from jax._src.interpreters.mlir import make_ir_context
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    with make_ir_context() as context:
        dialect.register_dialect(context)
        return str(ir.Module.parse(kernel.ir))


def compiled(kernel: Kernel) -> Usage:
    """Compiles one kernel for sm_90a.

    Raises:
        RuntimeError: Triton or ptxas cannot; in their words.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler.compiler import make_backend

    backend: Any = make_backend(GPUTarget("cuda", ARCHITECTURE, 32))
    # XLA compiles without contracting multiplications and additions.
    options = backend.parse_options({"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": False})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, Language.TRITON)
    metadata: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ttir"
        source.write_text(text(kernel))
        module = ir.parse_mlir_module(str(source), context)
    module.context = context
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[stage](module, metadata)
    return _assembled(kernel, module, metadata["shared"], get_ptxas(ARCHITECTURE).path)


def compiled_by_xla(lowered: jax.stages.Lowered) -> list[Usage]:
    """Compiles the kernels of a function that was lowered for `absent_gpu()`; an order of its own.

    Raises:
        RuntimeError: XLA or ptxas cannot; in their words.
    """
    named = {kernel.name: kernel for kernel in kernels(lowered)}
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"})
        files = sorted(Path(folder).glob("*.ptx"), key=lambda path: int(path.stem.rpartition(".")[2]))
        sources = [path.read_text() for path in files]
    usages = []
    for source in sources:
        entry = re.search(r"\.entry (\w+)", source)
        # XLA numbers kernels of one name, and has kernels of its own.
        origins = [kernel for name, kernel in named.items() if entry is not None and entry[1].startswith(name)]
        if entry is not None and origins:
            kernel = max(origins, key=lambda kernel: len(kernel.name))
            usages.append(_assembled(dataclasses.replace(kernel, name=entry[1]), source, None, _ptxas()))
    return usages


def _ptxas() -> Path:
    """The assembler of the CUDA toolkit that XLA uses: PTX of a later version than Triton's own would be refused."""
    import nvidia

    return next(path for root in nvidia.__path__ for path in Path(root).glob("cu*/bin/ptxas"))


def _assembled(kernel: Kernel, ptx: str, shared: int | None, ptxas: str | Path) -> Usage:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        # XLA compiles without contracting multiplications and additions.
        command = [ptxas, "-v", "--fmad=false", f"--gpu-name=sm_{ARCHITECTURE}a", source, "-o", cubin]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas on {kernel.name}: {done.stderr.strip()}")
        return Usage(kernel, *_ptxas_numbers(done.stderr), shared, ptx, cubin.read_bytes())


def _ptxas_numbers(log: str) -> tuple[int, int, int, int]:
    """Registers, bytes of spill stores, of spill loads and of stack from ptxas' `-v`."""
    registers = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or frame is None:
        raise RuntimeError(f"ptxas reported neither registers nor spills: {log.strip()}")
    stack, stores, loads = map(int, frame.groups())
    return int(registers[1]), stores, loads, stack


def sass(usage: Usage) -> str:
    """The machine code, disassembled."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(usage.cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(code: str) -> int:
    """How many instructions disassembled code has."""
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE))


def spills_in_loops(code: str) -> int:
    """Loads and stores of spilled registers inside innermost loops of disassembled code, where they cost each time."""
    lines, labels, loops = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            lines.append(line)
            target = re.search(r"\bBRA\b.*`\((\.L\w+)\)", line)
            if target and target[1] in labels:  # backwards
                loops.append((labels[target[1]], len(lines)))
    innermost = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for a, b in innermost for line in lines[a:b])


# Operations: a shape of their benchmark, lowered from shapes alone. `sharding` as in `lower`.


def decode(shape: Any, sharding: jax.sharding.Sharding | None = None) -> jax.stages.Lowered:
    """Decode attention of a `pallas_kernels.attention.benchmark.Shape`."""
    from pallas_kernels.attention import benchmark, triton

    return _attention(triton.attend, lambda: benchmark.workload(shape), sharding)


def prefill(shape: Any, sharding: jax.sharding.Sharding | None = None) -> jax.stages.Lowered:
    """Attention of a chunk of `q_len` tokens, of the same kind of shape."""
    from pallas_kernels.attention import benchmark_prefill, triton_prefill

    return _attention(triton_prefill.attend, lambda: benchmark_prefill.prefill_workload(shape), sharding)


def _attention(attend: Callable[..., Any], make: Callable[[], Any], sharding: Any) -> jax.stages.Lowered:
    works: list[Any] = []

    def arguments():
        works.append(make())
        return works[0].q, *works[0].arrays

    def call(q, k, v, plain, history, lengths, codes):
        [work] = works
        return attend(q, k, v, plain, history, codes=codes, tiers=work.tiers, spec=work.spec, **lengths)

    return lower(call, *jax.eval_shape(arguments), sharding=sharding)


def write(shape: Any, sharding: jax.sharding.Sharding | None = None) -> jax.stages.Lowered:
    """Writes of a `pallas_kernels.write.benchmark.Shape`: demotion in a step of one token, or a layer of many."""
    from pallas_kernels.attention.api import PlainTiers
    from pallas_kernels.history import init_history
    from pallas_kernels.write import benchmark, triton

    tiers, batch = benchmark.TIERS, shape.batch
    tail, pages = (shape.kv_heads, shape.head_dim), 1 + shape.tokens // benchmark.TIERS.page

    def arguments():
        codes = benchmark.random_codes(shape)
        history = init_history(codes, pages=batch * pages, page=tiers.page, values_tokens_last=True)
        rows = jnp.zeros((batch, shape.tokens, *tail), jnp.bfloat16)
        ring = jnp.zeros((shape.layers, batch, tiers.ring(1), *tail), storage_dtype(jnp.bfloat16))
        return history, codes, rows, ring, jnp.zeros((batch, pages), jnp.int32), jnp.zeros((batch,), jnp.int32)

    def call(history, codes, rows, ring, table, starts):
        common: dict[str, Any] = {"page_indices": table, "codes": codes, "tiers": tiers}
        if shape.tokens == 1:
            plain = PlainTiers(ring[:, :, :0], ring[:, :, :0], ring, ring)
            return triton.demote_ahead(history, plain, tokens=1, starts=starts, counts=starts + 1, **common)
        positions = starts[:, None] + jnp.arange(shape.tokens)
        valid = positions >= tiers.sink
        return triton.write(history, rows, rows, layer=jnp.int32(0), positions=positions, valid=valid, **common)

    return lower(call, *jax.eval_shape(arguments), sharding=sharding)


OPERATIONS = {"decode": decode, "prefill": prefill, "write": write}


def shapes(operation: str) -> tuple[type, list[Any]]:
    """The class of an operation's shapes, and those whose speed matters most."""
    from pallas_kernels.attention import benchmark, benchmark_prefill
    from pallas_kernels.write import benchmark as benchmark_write

    if operation == "write":
        kind = benchmark_write.Shape
        return kind, [kind(tokens=n, layers=2, recipe=r) for r in ("default", "oscar-reference") for n in (1, 4096)]
    return benchmark.Shape, list({"decode": benchmark.SHAPES, "prefill": benchmark_prefill.SHAPES}[operation])


def shape_of(kind: type, text: str) -> Any:
    """A shape from its first fields, separated by commas.

    Raises:
        ValueError: too many, or not a number where one is due.
    """
    fields = dataclasses.fields(kind)
    values = text.split(",")
    if len(values) > len(fields):
        raise ValueError(f"shape {text!r}: expected at most {','.join(field.name for field in fields)}.")
    pairs = zip(fields, values, strict=False)
    return kind(*(value if field.type in (str, "str") else int(value) for field, value in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", choices=OPERATIONS, default="decode", help="default: %(default)s")
    parser.add_argument(
        "--shape",
        action="append",
        metavar="B,CONTEXT,N,K,D,T",
        help="for write B,T,L,K,D; more fields as in the benchmark's Shape; may be repeated (default: the main ones)",
    )
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write each kernel's PTX and machine code here")
    parser.add_argument("--xla", action="store_true", help="compile with XLA: exact")
    options = parser.parse_args()
    kind, main_shapes = shapes(options.operation)
    lowered = OPERATIONS[options.operation]
    print(f"{'kernel':24} {'grid':>15} warps registers spills stack shared resident instructions")
    for shape in [shape_of(kind, text) for text in options.shape or ()] or main_shapes:
        print(" ".join(f"{name}={value}" for name, value in dataclasses.asdict(shape).items()), flush=True)
        if options.xla:
            usages = iter(compiled_by_xla(lowered(shape, absent_gpu())))
        else:
            usages = (compiled(kernel) for kernel in kernels(lowered(shape)) if options.kernel in kernel.name)
        for i, usage in enumerate(usages):
            if options.kernel in usage.kernel.name:
                code = sass(usage)
                print(_line(usage, instructions(code)), flush=True)
                if options.dump:
                    options.dump.mkdir(parents=True, exist_ok=True)
                    fields = "-".join(map(str, dataclasses.astuple(shape)))
                    stem = f"{options.operation}-{fields}-{i}-{usage.kernel.name}"
                    (options.dump / f"{stem}.ptx").write_text(usage.ptx)
                    (options.dump / f"{stem}.sass").write_text(code)


def _line(usage: Usage, count: int) -> str:
    kernel, shared = usage.kernel, "-" if usage.shared is None else usage.shared
    return (
        f"{kernel.name:24} {'x'.join(map(str, kernel.grid)):>15} {kernel.warps:5} {usage.registers:9} "
        f"{usage.spills:6} {usage.stack:5} {shared:>6} {usage.resident_warps:8} {count:12}"
    )


if __name__ == "__main__":
    main()
