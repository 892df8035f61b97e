"""How long a sequence may get before its quality is unknown, and the warning about it."""

from __future__ import annotations

import warnings

from calib.manifest import Manifest

MEASURED_STRETCH = 4
"""Longest sequences whose quality has been measured, in lengths of the calibration's sequences (docs/quality.md)."""
MEASURED_LENGTH = 8192
"""Longest sequence, in tokens, whose KL was at most 1.5 times that of short ones to its end; beyond, to 24576, 1.6."""


class BeyondCalibrationWarning(UserWarning):
    """A sequence will be longer than what an artifact's statistics cover, or than what has been measured."""


def warn_beyond(manifest: Manifest, length: int, *, what: str, stacklevel: int = 2) -> None:
    """Warns of sequences that outgrow an artifact.

    Args:
        length: tokens of the longest sequence.
        what: the artifact and the sequence in words, the message's beginning.
        stacklevel: as for `warnings.warn`, of the caller.

    Warns:
        BeyondCalibrationWarning: `length` is beyond the manifest's `max_position`, more than `MEASURED_STRETCH` times
            the length of its calibration sequences, or beyond `MEASURED_LENGTH`.
    """
    if manifest.max_position is not None and length > manifest.max_position:
        message = (
            f"{what} more than the {manifest.max_position} positions its statistics cover: quality may drop beyond; "
            f"calibrate with max_position={length}."
        )
    elif manifest.sequence is not None and length > MEASURED_STRETCH * manifest.sequence:
        message = (
            f"{what} more than {MEASURED_STRETCH} times the {manifest.sequence} of its calibration sequences, up to "
            f"which quality has been measured; calibrate with sequence={-(-length // MEASURED_STRETCH)}."
        )
    elif length > MEASURED_LENGTH:
        message = (
            f"{what} more than the {MEASURED_LENGTH} tokens up to which the error was measured to stay within 1.5 "
            "times that of short sequences: 1.6 times from there to 24576 tokens, with calibration sequences of 8192."
        )
    else:
        return
    warnings.warn(message, BeyondCalibrationWarning, stacklevel=stacklevel + 1)
