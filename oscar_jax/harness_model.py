"""`LM` of lm-evaluation-harness (the package `lm-eval`) over an `Answerer`."""

from __future__ import annotations

import dataclasses
from typing import Any

from lm_eval import utils  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

from oscar_jax.answering import Answerer, seeds
from oscar_jax.sampling import Sampling

_BUDGETS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the harness knows them all
_TAKEN = {"until", "do_sample", "temperature", "top_k", "top_p", *_BUDGETS}


@dataclasses.dataclass(frozen=True)
class Finished:
    """How one answer ended.

    Attributes:
        task, document: the harness's names.
        truncated, prompt_cut, tokens: as in `Answer`.
    """

    task: str
    document: int
    truncated: bool
    prompt_cut: int
    tokens: int


class OscarLM(TemplateLM):
    """One arm of a comparison.

    Attributes:
        seed: of all draws; the same requests with the same seed give the same answers.
        finished: one entry for each generated answer since the list was last emptied.
    """

    def __init__(self, answerer: Answerer, *, seed: int = 0):
        super().__init__()
        self.answerer, self.seed = answerer, seed
        self.tokenizer = answerer.model.tokenizer
        self.finished: list[Finished] = []

    @property
    def eot_token_id(self) -> int:
        ends = (self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, 0)
        return next(token for token in ends if token is not None)

    @property
    def prefix_token_id(self) -> int:
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    @property
    def max_length(self) -> int:
        return self.answerer.max_length

    @property
    def tokenizer_name(self) -> str:
        return str(self.answerer.model.identity.tokenizer_hash)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.tokenizer(string, add_special_tokens=bool(add_special_tokens), verbose=False)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs: Any) -> list[tuple[float, bool]]:
        return self.answerer.log_likelihoods([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        pairs, owners = [], []
        for number, request in enumerate(requests):
            windows = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for window in windows:
                pairs.append(utils.make_disjoint_window(window))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_p, _) in zip(owners, self.answerer.log_likelihoods(pairs), strict=True):
            totals[owner] += log_p
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        options = [_options(request.args[1], self.answerer.max_tokens) for request in requests]
        draws = seeds(self.seed, len(requests))
        found = self.answerer.answers(
            [self.tok_encode(request.args[0]) for request in requests],
            max_tokens=[each["max_tokens"] for each in options],
            stops=[each["stop"] for each in options],
            sampling=[Sampling(**each["sampling"], seed=draw) for each, draw in zip(options, draws, strict=True)],
        )
        for request, answer in zip(requests, found, strict=True):
            self.finished.append(
                Finished(request.task_name, request.doc_id, answer.truncated, answer.prompt_cut, answer.tokens)
            )
        return [answer.text for answer in found]


def _options(given: dict[str, Any], budget: int) -> dict[str, Any]:
    """A task's generation settings as budget, stop texts and `Sampling` fields; a task without a budget gets all of it.

    Raises:
        NotImplementedError: a setting that has no meaning here.
    """
    unknown = sorted(name for name in given if name not in _TAKEN)
    if unknown:
        raise NotImplementedError(
            f"generation setting {unknown[0]}={given[unknown[0]]!r} is not supported: expected only "
            f"{', '.join(sorted(_TAKEN))}; override the task's generation_kwargs."
        )
    until = given.get("until") or []
    sampled = given.get("do_sample", given.get("temperature", 0) > 0)
    sampling = {"temperature": float(given.get("temperature", 1.0)) if sampled else 0.0}
    sampling |= {name: given[name] for name in ("top_k", "top_p") if given.get(name) is not None}
    return {
        "max_tokens": int(next((given[name] for name in _BUDGETS if name in given), budget)),
        "stop": [each for each in ([until] if isinstance(until, str) else until) if each],
        "sampling": sampling,
    }
