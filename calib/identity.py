"""What an artifact remembers of its model and of its text, so that it refuses another model."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelIdentity:
    """Which model. The hashes decide: two models are the same when both are equal.

    Attributes:
        model_id: a name for people.
        architecture: "llama", "qwen2", ...
        config_hash: hex SHA-256 of everything about the model that is not a weight.
        tokenizer_hash: hex SHA-256 of the tokenizer, or None without one.
    """

    model_id: str
    architecture: str
    config_hash: str
    tokenizer_hash: str | None


@dataclasses.dataclass(frozen=True)
class TextIdentity:
    """Which calibration text.

    Attributes:
        description: for people.
        sha256: hex SHA-256 of the text as it was calibrated on.
        tokens: how many tokens were used.
    """

    description: str
    sha256: str
    tokens: int
