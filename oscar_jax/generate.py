"""Text from a prompt: `stream` and `complete`, and the command `generate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from oscar_jax.cache import expected_bits
from oscar_jax.layer_codes import LayerCodes
from oscar_jax.limits import warn_beyond
from oscar_jax.models import LoadedModel
from oscar_jax.sampling import Sampling
from oscar_jax.session import Session, check_not_empty
from oscar_jax.step import cache_config, make_step
from oscar_jax.text_stream import TextStream
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

if TYPE_CHECKING:
    import jax

    from calib.manifest import Manifest

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens that end an answer although some tokenizer files name another one as theirs."""

CONTEXT_TOKENS = 8
"""Prompt tokens that the first generated one is decoded after."""

PROGRESS_TOKENS = 1024
"""Prompts of at least so many tokens show a progress bar."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text: what was generated, without stop texts and stop tokens.
        tokens: generated token ids, an ending stop token included.
        prompt_tokens: tokens of the prompt, chat template included.
        finish: "stop" (a stop token or text) or "length" (`max_tokens`).
        cache_bytes: bytes of the cache's arrays, measured.
        bits_per_element: of K and V at the final length, scales and windows counted.
        seconds: from the prompt's first token to the last generated one, compilation included.
        tokens_per_second: from the second generated token on, so without compilation; None for fewer than three.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    finish: str
    cache_bytes: int
    bits_per_element: float
    seconds: float
    tokens_per_second: float | None


def complete(model: LoadedModel, prompt: str | Sequence[int], **options: Any) -> Completion:
    """`stream`, all at once."""
    generation = stream(model, prompt, **options)
    for _ in generation:
        pass
    return generation.completion()


def stream(
    model: LoadedModel,
    prompt: str | Sequence[int],
    *,
    codes: TransformCodes | LayerCodes | None = None,
    tiers: Tiers | None = None,
    plain_dtype: str | None = None,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    chat: bool | None = None,
    manifest: Manifest | None = None,
    implementation: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    checked: bool = False,
    progress: bool = False,
) -> Generation:
    """Continues a prompt.

    Args:
        model: with a tokenizer.
        prompt: text, or token ids that are taken as they are.
        codes: transform codes of this model; None keeps every token plain, whatever `tiers` says.
        tiers: windows beside the 2-bit history; None for the default ones.
        plain_dtype: of sinks and recents; None is the dtype of the model's weights.
        max_tokens: most new tokens.
        sampling: None is greedy.
        stop: texts that end it, beside the model's own stop tokens.
        chat: put a text into the model's chat template; None does if there is one.
        manifest: of the artifact that the codes are from, to warn of sequences that outgrow it.
        implementation: of a 2-bit cache's attention and writes; None is the best one here.
        mesh: of `sharding.make_mesh`, over whose "tensor" axis heads and weights are divided; None is one device.
        checked: verify the cache after every step, slowly.
        progress: a bar on stderr for a long prompt.

    Returns:
        An iterator of pieces of text, to be iterated once; nothing runs before the first piece is asked for.

    Raises:
        ValueError: an empty prompt, one that does not fit the model's context, or settings out of range; while it
            runs, in checked mode, a damaged cache.

    Warns:
        BeyondCalibrationWarning: the sequence may outgrow the artifact (`limits.warn_beyond`).
    """
    if model.tokenizer is None:
        raise ValueError("model has no tokenizer, expected one to write text with; use Session with token ids.")
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: expected at least 1.")
    tokens = encode_prompt(model, prompt, chat=chat) if isinstance(prompt, str) else [int(token) for token in prompt]
    _check_prompt(tokens, max_tokens, context=model.config.max_position, vocab_size=model.config.vocab_size)
    total = len(tokens) + max_tokens
    if codes is not None and manifest is not None:
        what = f"artifact: {len(tokens)} prompt tokens and up to {max_tokens} new ones are"
        warn_beyond(manifest, total, what=what)
    tiers = Tiers() if tiers is None else tiers
    length = -(-total // tiers.page) * tiers.page  # few different lengths, few compilations
    if codes is None:
        tiers, implementation = dataclasses.replace(tiers, sink=0, recent=length), None
    config = cache_config(
        model.config, max_length=length, tiers=tiers, plain_dtype=plain_dtype, implementation=implementation, mesh=mesh
    )
    session = Session(make_step(model.decoder, config, codes, checked=checked))
    text = TextStream(model.tokenizer, stop=stop, context=tokens[-CONTEXT_TOKENS:])
    return Generation(
        session,
        tokens,
        text=text,
        sampling=sampling or Sampling(),
        max_tokens=max_tokens,
        stops=stop_tokens(model.tokenizer),
        progress=progress and len(tokens) >= PROGRESS_TOKENS,
    )


class Generation:
    """One prompt being continued, an iterator of pieces of text; see `stream`.

    Attributes:
        session: the sequence's cache.
        tokens: generated so far, an ending stop token included.
        finish: "stop", "length", or "" while it runs.
    """

    def __init__(
        self,
        session: Session,
        prompt: list[int],
        *,
        text: TextStream,
        sampling: Sampling,
        max_tokens: int,
        stops: Collection[int],
        progress: bool,
    ):
        self.session, self.finish = session, ""
        self.tokens: list[int] = []
        self._prompt, self._sampling, self._max_tokens, self._stops = prompt, sampling, max_tokens, stops
        self._stream, self._progress = text, progress
        self._text, self._times = "", [0.0]
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = next(self._pieces)
        self._text += piece
        return piece

    def completion(self) -> Completion:
        """What was generated so far."""
        step, times = self.session.step, self._times
        timed = len(times) - 3  # tokens after the second one
        return Completion(
            text=self._text,
            tokens=list(self.tokens),
            prompt_tokens=len(self._prompt),
            finish=self.finish,
            cache_bytes=self.session.bytes(),
            bits_per_element=expected_bits(step.config, step.codes, max(1, int(self.session.lengths[0]))),
            seconds=times[-1] - times[0],
            tokens_per_second=timed / (times[-1] - times[2]) if timed > 0 else None,
        )

    def _run(self) -> Iterator[str]:
        self._times = [time.perf_counter()]
        logits = self.session.prefill([self._prompt], progress=self._progress)
        decoded = self.session.decode(logits, [self._sampling], max_tokens=[self._max_tokens], stop_tokens=self._stops)
        ended = False
        for (token,) in decoded:
            assert token is not None  # only a sequence that waits for others of its batch gets None
            self.tokens.append(token)
            self._times.append(time.perf_counter())
            ended = token in self._stops
            if not ended and (piece := self._stream.push(token)):
                yield piece
            if self._stream.stopped:
                break
        if piece := self._stream.finish():
            yield piece
        self.finish = "stop" if ended or self._stream.stopped else "length"


def encode_prompt(model: LoadedModel, prompt: str, *, chat: bool | None = None) -> list[int]:
    """Token ids of a prompt.

    Args:
        model: with a tokenizer.
        prompt: text.
        chat: as one user message in the chat template; None if there is one.

    Raises:
        ValueError: no text, one with lone surrogates (as the shell's bytes that are not UTF-8 arrive), or `chat`
            without a chat template.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt is not valid Unicode (character {error.start}): expected UTF-8 text; convert it with iconv."
        ) from None
    if not prompt.strip():
        raise ValueError("prompt is empty: expected some text.")
    template = getattr(model.tokenizer, "chat_template", None)
    if chat and not template:
        raise ValueError("chat=True: this model's tokenizer has no chat template; give the prompt as plain text.")
    applied = bool(template) and chat is not False
    if applied:
        message = [{"role": "user", "content": prompt}]
        prompt = model.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    # verbose=False: a prompt longer than the model's context is refused later, in our own words.
    return list(model.tokenizer(prompt, add_special_tokens=not applied, verbose=False)["input_ids"])


def stop_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokenizer's end of sequence, and the ends of a turn that its vocabulary has."""
    vocabulary = tokenizer.get_vocab()
    ends = {vocabulary[token] for token in END_OF_TURN if token in vocabulary}
    return frozenset(ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id})


def _check_prompt(tokens: Sequence[int], max_tokens: int, *, context: int, vocab_size: int) -> None:
    check_not_empty([tokens])
    bad = [token for token in tokens if not 0 <= token < vocab_size]
    if bad:
        raise ValueError(f"prompt has token {bad[0]}: expected 0 to {vocab_size - 1}, the model's vocabulary.")
    if len(tokens) >= context:
        raise ValueError(
            f"prompt of {len(tokens)} tokens: expected at most {context - 1}, one less than the model's context; "
            f"shorten it by {len(tokens) - context + 1} tokens."
        )
    if len(tokens) + max_tokens > context:
        raise ValueError(
            f"max_tokens={max_tokens} after a prompt of {len(tokens)} tokens: expected at most {context} together, the "
            f"model's context; use max_tokens={context - len(tokens)}."
        )


def run(args: argparse.Namespace) -> int:
    """`oscar-jax generate`: prints the text as it comes, then a line of measurements; errors are raised."""
    from oscar_jax import layer_plan, models

    tiers = Tiers(sink=args.sink, recent=args.recent)
    if args.artifact is None and tiers != Tiers():
        raise ValueError(
            f"--sink {tiers.sink} --recent {tiers.recent} without --artifact: a plain cache keeps every token; name an "
            "artifact, or leave the windows out."
        )
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    prompt = _read_prompt() if args.prompt is None else args.prompt
    model = models.load(args.model)
    codes, manifest = (None, None) if args.artifact is None else layer_plan.load(args.artifact, model=model.identity)
    pieces = stream(
        model,
        prompt,
        codes=codes,
        tiers=tiers,
        plain_dtype="bfloat16",  # whatever the model computes in: 16-bit tiers are what a 2-bit cache is compared with
        max_tokens=args.max_tokens,
        sampling=sampling,
        stop=args.stop,
        chat=args.chat,
        manifest=manifest,
        implementation=args.implementation,
        progress=sys.stderr.isatty(),
    )
    for piece in pieces:
        if not args.json:
            print(piece, end="", flush=True)
    done = pieces.completion()
    if args.json:
        print(json.dumps(dataclasses.asdict(done)))
        return 0
    print(flush=True)
    speed = "" if done.tokens_per_second is None else f", {done.tokens_per_second:.1f} tokens/s"
    print(
        f"[{done.prompt_tokens} prompt tokens, {len(done.tokens)} new in {done.seconds:.1f} s{speed}; cache "
        f"{done.cache_bytes / 1e6:.2f} MB, {done.bits_per_element:.2f} bits/element]",
        file=sys.stderr,
    )
    return 0


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("prompt, then Ctrl-D:", file=sys.stderr)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise ValueError(
            f"prompt on standard input is not UTF-8 (byte 0x{bad:02x} at position {error.start}): convert it with "
            "iconv."
        ) from None
