"""What the TPU's interpreter found in the kernel that it ran last; nothing public of jax says so."""

from jax._src.pallas.mosaic.interpret import interpret_pallas_call


def found() -> bool:
    """Whether two accesses raced; needs `InterpretParams(detect_races=True)`."""
    races = interpret_pallas_call.races
    assert races is not None, "nothing ran with the race detector"
    return races.races_found
