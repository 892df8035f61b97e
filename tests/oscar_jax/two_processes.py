"""One of two processes that decode together: `python -m tests.oscar_jax.two_processes RANK PORT FOLDER`.

Each has two devices, and a row of the 2 x 2 mesh has one of either process, so each process holds half of the heads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax

from calib import artifact
from oscar_jax.engine import Engine, Request, Shapes
from oscar_jax.models import hf
from oscar_jax.models.decoder import Decoder
from oscar_jax.sharding import codes_sharding, make_mesh
from pallas_kernels.tiers import Tiers
from tests import tiny_model

CONFIG = hf.config_from_dict(tiny_model.CONFIG | {"hidden_act": "silu"})
PROMPTS = [list(b"a mesh of two processes tells "), list(b"nothing but the truth")]


def decoded(decoder: Decoder, codes, mesh=None) -> list[list[int]]:
    """New tokens of both prompts by an engine with a row for each."""
    rows = 2 if mesh is None else 1
    engine = Engine(
        decoder, codes, max_length=48, tiers=Tiers(sink=4, recent=8, group=4, page=8), plain_dtype="float32",
        shapes=Shapes(rows, (rows,), (1,), (16,)), tails=2, mesh=mesh,
    )  # fmt: skip
    return engine.complete(Request(prompt, max_tokens=8) for prompt in PROMPTS)


def main() -> None:
    rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    read = {"bytes": 0, "largest": 0}
    original = hf._reader

    def counting(*place):
        def part(index):
            found = original(*place)(index)
            read["bytes"] += found.nbytes
            read["largest"] = max(read["largest"], found.nbytes)
            return found

        return part

    hf._reader = counting
    devices = sorted(jax.devices(), key=lambda device: (device.id % 2, device.process_index))
    mesh = make_mesh(data=2, tensor=2, devices=devices)
    decoder = hf.read_decoder(folder / "model", CONFIG, dtype="float32", mesh=mesh)
    codes, _ = artifact.load(folder / "artifact", sharding=codes_sharding(mesh, kv_heads=CONFIG.kv_heads))
    heads = sorted({shard.index[1].start or 0 for shard in codes.key.encode.addressable_shards})
    print(json.dumps({"heads": heads, "read": read, "tokens": decoded(decoder, codes, mesh)}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
