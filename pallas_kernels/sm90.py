"""What Pallas' Triton kernels cost on Hopper, found without a GPU: registers, spills, stack, shared memory.

`python -m pallas_kernels.sm90 --shape 16,65536,32,8,128,1` lowers decode attention for a GPU that is not there, takes
the Triton IR out of the lowered module and compiles it with PyPI's Triton and the ptxas that comes with it. XLA bundles
a Triton of its own, so numbers on the device differ a little; spills here are spills there. Any jitted function will
do: `compiled(kernel) for kernel in kernels(lower(function, *arguments))`.
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
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

ARCHITECTURE = 90
TARGETS = ("__gpu$xla.gpu.triton", "xla.gpu.triton")
# Of one multiprocessor (CUDA C++ Programming Guide, compute capability 9.0).
REGISTERS, REGISTER_UNIT = 65536, 256  # 32-bit registers; a warp takes a multiple of the unit
WARPS, PROGRAMS = 64, 32
SHARED, SHARED_RESERVED = 228 * 1024, 1024  # bytes; what every program takes on top of its own


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
    shared: int
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
        shared = self.shared + SHARED_RESERVED
        return warps * min(REGISTERS // registers, WARPS // warps, PROGRAMS, SHARED // shared)


def lower(function: Callable[..., Any], *arguments: Any) -> jax.stages.Lowered:
    """Lowers a function, jitted or not, for an H200 that need not be there.

    Args:
        arguments: arrays or `jax.ShapeDtypeStruct`s, in pytrees.
    """
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


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

    lowered.compiler_ir("stablehlo").operation.walk(visit)
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
        return ir.Module.parse(kernel.ir).operation.get_asm(enable_debug_info=False)


def compiled(kernel: Kernel) -> Usage:
    """Compiles one kernel for sm_90a.

    Raises:
        RuntimeError: Triton or ptxas cannot; in their words.
    """
    from triton import knobs
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", ARCHITECTURE, 32))
    # XLA compiles without contracting multiplications and additions.
    options = backend.parse_options({"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": False})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, Language.TRITON)
    metadata: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        source, ptx, cubin = (Path(folder) / f"kernel.{suffix}" for suffix in ("ttir", "ptx", "cubin"))
        source.write_text(text(kernel))
        module = ir.parse_mlir_module(str(source), context)
        module.context = context
        for stage in ("ttir", "ttgir", "llir", "ptx"):
            module = stages[stage](module, metadata)
        ptx.write_text(module)
        done = subprocess.run(
            [knobs.nvidia.ptxas.path, "-v", "--fmad=false", f"--gpu-name=sm_{ARCHITECTURE}a", ptx, "-o", cubin],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"ptxas on {kernel.name}: {done.stderr.strip()}")
        return Usage(kernel, *_ptxas_numbers(done.stderr), metadata["shared"], module, cubin.read_bytes())


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


def decode(shape: Any) -> jax.stages.Lowered:
    """Decode attention of a shape of the benchmark, lowered from shapes alone."""
    from pallas_kernels.attention import benchmark

    static: list[benchmark.Workload] = []

    def arguments():
        static.append(benchmark.workload(shape))
        return static[0].q, *static[0].arrays

    def call(q, k, v, plain, history, lengths, codes):
        [work] = static
        return benchmark.attend(q, k, v, plain, history, codes=codes, tiers=work.tiers, spec=work.spec, **lengths)

    return lower(call, *jax.eval_shape(arguments))


def _shape(text: str) -> Any:
    from pallas_kernels.attention.benchmark import Shape

    fields = dataclasses.fields(Shape)
    values = text.split(",")
    if not 2 <= len(values) <= len(fields):
        raise argparse.ArgumentTypeError(
            f"expected {','.join(field.name for field in fields)}, at least the first two, got {text!r}"
        )
    return Shape(*(value if field.type == "str" else int(value) for field, value in zip(fields, values, strict=False)))


def main() -> None:
    from pallas_kernels.attention.benchmark import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", type=_shape, action="append", metavar="B,CONTEXT,N,K,D,T", help="may be repeated (default: all)"
    )
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write each kernel's PTX and machine code here")
    options = parser.parse_args()
    print(f"{'kernel':24} {'grid':>15} warps registers spills stack shared resident instructions")
    for shape in options.shape or SHAPES:
        print(" ".join(f"{name}={value}" for name, value in dataclasses.asdict(shape).items()), flush=True)
        for i, kernel in enumerate(kernels(decode(shape))):
            if options.kernel not in kernel.name:
                continue
            usage = compiled(kernel)
            code = sass(usage)
            print(
                f"{kernel.name:24} {'x'.join(map(str, kernel.grid)):>15} {kernel.warps:5} {usage.registers:9} "
                f"{usage.spills:6} {usage.stack:5} {usage.shared:6} {usage.resident_warps:8} {instructions(code):12}",
                flush=True,
            )
            if options.dump:
                options.dump.mkdir(parents=True, exist_ok=True)
                stem = f"{shape.batch}x{shape.context}-{i}{kernel.name}"
                (options.dump / f"{stem}.ptx").write_text(usage.ptx)
                (options.dump / f"{stem}.sass").write_text(code)


if __name__ == "__main__":
    main()
