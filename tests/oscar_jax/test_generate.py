"""Text from a prompt: streaming, stopping, measurements, errors, and the command."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import jax
import numpy as np
import pytest

from calib import artifact
from oscar_jax import cli, download, generate, limits, models
from oscar_jax.generate import Completion, complete, encode_prompt, stop_tokens, stream
from oscar_jax.limits import BeyondCalibrationWarning
from oscar_jax.models import LoadedModel, random_decoder, tiny_config
from oscar_jax.sampling import Sampling
from oscar_jax.sharding import make_mesh
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes
from tests.oscar_jax.byte_tokenizer import EOS, byte_tokenizer
from tests.oscar_jax.tiny import TIERS, codes

CONFIG = tiny_config(vocab_size=257, max_position=128)
PROMPT = "Twenty bytes, or so."


@pytest.fixture
def model() -> LoadedModel:
    return LoadedModel.build(random_decoder(CONFIG), byte_tokenizer(), "tiny")


def test_pieces_are_the_text_of_the_tokens(model):
    run = stream(model, PROMPT, max_tokens=20, plain_dtype="bfloat16")
    pieces = list(run)
    done = run.completion()
    assert all(pieces)
    assert len(pieces) > 3
    assert done.text == "".join(pieces) == model.tokenizer.decode(done.tokens)
    assert (done.prompt_tokens, len(done.tokens), done.finish) == (len(PROMPT), 20, "length")
    assert done.seconds > 0
    assert done.tokens_per_second is not None
    assert done.tokens_per_second > 0
    # A plain bf16 cache of 128 tokens, and two int32 of bookkeeping at most.
    arrays = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 128 * 2
    assert arrays <= done.cache_bytes <= arrays + 8
    assert done.bits_per_element == 16
    assert complete(model, PROMPT, max_tokens=20).tokens == done.tokens
    assert complete(model, list(PROMPT.encode()), max_tokens=5).prompt_tokens == len(PROMPT)


def test_two_bit_cache_is_smaller_and_checked_mode_accepts_it(model):
    run = stream(model, PROMPT, codes=codes(), tiers=TIERS, max_tokens=20, plain_dtype="bfloat16", checked=True)
    text = "".join(run)
    done = run.completion()
    assert len(done.tokens) == 20
    assert text == done.text
    step, length = run.session.step, len(PROMPT) + 19
    assert step.checked
    history = TIERS.history_tokens(length)
    assert isinstance(step.codes, TransformCodes)
    row_bits = step.codes.key.row_bits + step.codes.value.row_bits
    expected = (16 * (length - history) + history * row_bits / (2 * CONFIG.head_dim)) / length
    assert done.bits_per_element == pytest.approx(expected)
    assert done.bits_per_element < 10
    assert done.cache_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(run.session.cache))


def test_a_mesh_reaches_the_step_and_its_cache(model):
    mesh = make_mesh(tensor=2)
    session = stream(model, PROMPT, codes=codes(), tiers=TIERS, max_tokens=20, mesh=mesh).session
    assert session.step.config.mesh == mesh
    for leaf in jax.tree.leaves((session.step.decoder, session.step.codes, session.cache)):
        assert leaf.sharding.device_set == set(mesh.devices.flat)
    with pytest.raises(ValueError, match=r"batch=1, pages=None on a mesh with data=2"):
        stream(model, PROMPT, max_tokens=20, mesh=make_mesh(data=2))


def test_stop_texts_and_stop_tokens_end_it(model):
    free = complete(model, PROMPT, max_tokens=20)
    letters = [model.tokenizer.decode([token]) for token in free.tokens]
    at = next(i for i in range(4, 18) if all(letter.isascii() for letter in letters[i : i + 2]))
    stop = letters[at] + letters[at + 1]
    stopped = complete(model, PROMPT, max_tokens=20, stop=["not there", stop])
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish == "stop"
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert len(stopped.tokens) <= at + 2

    ending = free.tokens[5]
    model.tokenizer.eos_token = model.tokenizer.convert_ids_to_tokens(ending)
    ended = complete(model, PROMPT, max_tokens=20)
    assert ended.tokens == free.tokens[: free.tokens.index(ending) + 1]
    assert ended.finish == "stop"
    assert ended.text == model.tokenizer.decode(ended.tokens[:-1])


def test_seeds_decide_what_is_drawn(model):
    def drawn(seed):
        return complete(model, PROMPT, max_tokens=12, sampling=Sampling(9.0, seed=seed)).tokens

    assert drawn(1) == drawn(1) != drawn(2)


def test_stop_tokens_are_the_eos_and_known_ends_of_a_turn():
    tokenizer = byte_tokenizer()
    assert stop_tokens(tokenizer) == {256}
    tokenizer.eos_token = "a"
    assert stop_tokens(tokenizer) == {256, tokenizer.get_vocab()["a"]}
    assert tokenizer.convert_tokens_to_ids(EOS) == 256


def test_chat_template_is_used_if_there_is_one(model):
    chat = LoadedModel.build(model.decoder, byte_tokenizer(chat=True), "chat")
    assert chat.tokenizer.decode(encode_prompt(chat, "hi")) == "[user]hi>"
    assert chat.tokenizer.decode(encode_prompt(chat, "hi", chat=False)) == "hi"
    assert model.tokenizer.decode(encode_prompt(model, "hi")) == "hi"


def test_wrong_requests_are_named(model):
    for options, message in [
        ({"prompt": " \n"}, r"prompt is empty: expected some text"),
        ({"prompt": "a\udcffb"}, r"prompt is not valid Unicode \(character 1\): expected UTF-8 text"),
        ({"prompt": []}, r"prompt is empty: expected at least one token"),
        ({"prompt": [3, 257]}, r"prompt has token 257: expected 0 to 256"),
        ({"prompt": "x" * 130}, r"prompt of 130 tokens: expected at most 127, .* context; shorten it by 3 tokens"),
        ({"prompt": "x" * 100}, r"max_tokens=40 after a prompt of 100 tokens: .* at most 128 .* use max_tokens=28"),
        ({"max_tokens": 0}, r"max_tokens=0: expected at least 1"),
        ({"chat": True}, r"chat=True: this model's tokenizer has no chat template"),
        ({"stop": [""]}, r"stop has an empty text"),
        ({"plain_dtype": "int8"}, r"plain_dtype='int8'"),
        ({"codes": codes(), "tiers": Tiers(page=24)}, r"bucket=16 with page=24: expected pages that divide"),
    ]:
        with pytest.raises(ValueError, match=message):
            stream(model, **{"prompt": PROMPT, "max_tokens": 40, **options})
    with pytest.raises(ValueError, match=r"model has no tokenizer"):
        stream(LoadedModel.build(model.decoder, None, "bare"), PROMPT)


def test_longer_than_the_statistics_warns(model):
    options: Any = {"tiers": TIERS, "max_tokens": 20}
    new = "20 prompt tokens and up to 20 new ones are more than"
    for manifest, limit in (
        (artifact.Manifest("test", max_position=39), "the 39 positions"),
        (artifact.Manifest("test", sequence=9), "4 times the 9 of its calibration"),
    ):
        with pytest.warns(BeyondCalibrationWarning, match=f"{new} {limit}"):
            stream(model, PROMPT, codes=codes(), manifest=manifest, **options)
        stream(model, PROMPT, manifest=manifest, **options)
    enough = artifact.Manifest("test", max_position=40, sequence=10)
    stream(model, PROMPT, codes=codes(), manifest=enough, **options)


def test_longer_than_what_was_measured_warns_whatever_the_calibration():
    manifest = artifact.Manifest("test", max_position=32768, sequence=8192)
    limits.warn_beyond(manifest, 8192, what="8192 tokens are")
    with pytest.warns(
        BeyondCalibrationWarning, match="8193 tokens are more than the 8192 tokens up to which the error"
    ):
        limits.warn_beyond(manifest, 8193, what="8193 tokens are")


class _Flushes(io.StringIO):
    """Stdout that remembers what was visible at each flush."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def flush(self):
        self.seen.append(self.getvalue())


def test_command_streams_then_measures(model, monkeypatch, capsys):
    monkeypatch.setattr(models, "load", lambda source: model)
    expected = complete(model, PROMPT, max_tokens=20).text
    out = _Flushes()
    monkeypatch.setattr("sys.stdout", out)
    assert cli.main(["generate", "--prompt", PROMPT, "--max-tokens", "20"]) == 0
    assert out.getvalue() == expected + "\n"
    assert len(set(out.seen)) > 3
    assert "[20 prompt tokens, 20 new in" in capsys.readouterr().err


def test_command_with_json_and_an_artifact(model, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(models, "load", lambda source: model)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    artifact.save(tmp_path / "codes", codes(), artifact.Manifest("test", model=model.identity, max_position=128))
    windows = ["--sink", "4", "--recent", "8"]
    monkeypatch.setattr(generate, "Tiers", lambda sink=4, recent=8: Tiers(sink, recent, 4, 8))
    command = ["generate", "--max-tokens", "20", "--json", "--artifact", str(tmp_path / "codes"), *windows]
    assert cli.main(command) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == set(Completion.__dataclass_fields__)
    assert found["prompt_tokens"] == len(PROMPT)
    assert found["bits_per_element"] < 10
    assert found["tokens"] == complete(model, PROMPT, codes=codes(), tiers=TIERS, max_tokens=20).tokens

    other = LoadedModel.build(random_decoder(tiny_config(layers=3)), byte_tokenizer(), "other")
    monkeypatch.setattr(models, "load", lambda source: other)
    assert cli.main([*command, "--prompt", "x"]) == 2
    assert "other" in capsys.readouterr().err


def test_command_refuses_input_that_is_not_utf8(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb"), encoding="utf-8"))
    assert cli.main(["generate"]) == 2
    assert "prompt on standard input is not UTF-8 (byte 0xff at position 1)" in capsys.readouterr().err


def test_a_long_prompt_brings_no_warning_of_the_tokenizer(model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model.tokenizer.model_max_length = 8
    assert len(encode_prompt(model, PROMPT)) == len(PROMPT)
    assert not caplog.records


def test_command_refuses_windows_without_an_artifact(capsys):
    assert cli.main(["generate", "--prompt", "x", "--recent", "32"]) == 2
    assert "--recent 32 without --artifact: a plain cache keeps every token" in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2_answers_alike_with_float32_and_bfloat16_tiers():
    if download.find("smollm2-135m") is None:
        pytest.skip("smollm2-135m is not downloaded: run `oscar-jax download smollm2-135m`")
    model = models.load("smollm2-135m")
    question = "What is the capital of France? Answer in one word."
    answers = [complete(model, question, max_tokens=12, plain_dtype=dtype) for dtype in ("float32", "bfloat16")]
    for answer in answers:
        assert "Paris" in answer.text
        assert answer.finish == "stop"
    assert np.isclose(answers[0].cache_bytes, 2 * answers[1].cache_bytes, rtol=1e-3)
