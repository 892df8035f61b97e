"""Run as a program without TRITON_INTERPRET: compiles the reference's kernels for Hopper and prints a line for each.

`python tests/triton_ref/sm90_compile.py`: name, registers, bytes of spills and stack, bytes of shared memory.
"""

import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from triton_ref.kernels import decode, quantize

TARGET = GPUTarget("cuda", 90, 32)
COMMON = dict(KV_HEADS=8, TOKENS=1, ROWS=16, SINK=64, RECENT=256, GROUP=8, WINDOW=2**30, SOFTCAP=0.0, TILE=64, SPLITS=4)
HISTORY = COMMON | dict(
    KEY_QUARTER=32, VALUE_QUARTER=32, BLOCK_KEY=32, BLOCK_VALUE=32, PAGE=128, POOL=100, ENTRIES=10, BUCKET=2048,
    BUCKETS=4, SPAN=512, KEY_OFFSET=False, VALUE_OFFSET=False,
)  # fmt: skip
PLAIN = COMMON | dict(TILE=32, D=128, BLOCK_D=128, RING=263, SPAN=128)
MERGE = dict(ROWS=16, WIDTH=128, BLOCK=128, SPLITS=4, NORMALISE=True)
QUANTIZE = dict(
    COUNT=1000, ROWS=4, KV_HEADS=8, D=128, BLOCK_D=128, HALVINGS=7, QUARTER=32, BLOCK_Q=32, RANK=122, BISECTIONS=7
)
POINTERS = {
    "history_kernel": "q f f b h h b h h i i i f f",
    "plain_kernel": "q q q q q q q i i f f",
    "merge_kernel": "f f f f",
    "quantize_kernel": "f i f f f f i i b h h",
}
TYPES = {"q": "*bf16", "f": "*fp32", "b": "*u8", "h": "*fp16", "i": "*i32"}


def compile_one(kernel, constants, query="*bf16", **options):
    name = kernel.fn.__name__
    types = [query if letter == "q" else TYPES[letter] for letter in POINTERS[name].split()]
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(kernel.arg_names, types, strict=False))
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=TARGET, options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", ptx.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report))
    registers = re.findall(r"Used (\d+) registers", report)[0]
    about = f"{constants.get('FORM', '')} {constants.get('CLIP', '')} {query if name[0] in 'hp' else ''}".strip()
    print(f"{name} {about}: {registers} registers, {spilled} spilled, {compiled.metadata.shared} shared")


if __name__ == "__main__":
    compile_one(decode.history_kernel, HISTORY)
    compile_one(decode.history_kernel, HISTORY | {"KEY_OFFSET": True, "VALUE_OFFSET": True}, "*fp16")
    compile_one(decode.plain_kernel, PLAIN)
    compile_one(decode.merge_kernel, MERGE)
    for form, clip in (("levels", "none"), ("offset", "rank"), ("zero-point", "bisect")):
        compile_one(quantize.quantize_kernel, QUANTIZE | {"FORM": form, "CLIP": clip}, enable_fp_fusion=False)
