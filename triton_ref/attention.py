"""Three-tier attention in eager PyTorch, from rows: the oracle in float64, or the same in a kernel's precision."""

from __future__ import annotations

import torch

from triton_ref.codec import full_precision


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_hat: torch.Tensor,
    v_hat: torch.Tensor,
    *,
    positions: torch.Tensor,
    history_end: torch.Tensor,
    sink: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sink_logits: torch.Tensor | None = None,
    rounded_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention of one sequence, `[T, N, D]` in q's dtype; zeros for queries that see nothing.

    Args:
        q: `[T, N, D]`, at `positions` `[T]`.
        k, v: plain rows `[n, K, D]` of positions 0 .. n - 1; k_hat, v_hat: what INT2 gives back. All in q's dtype.
        history_end: `[T]`, h of each query: it reads `sink <= j < h` from k_hat and v_hat, everything else plain.
        scale: factor on `q . k`. softcap: logits become `softcap tanh(logits / softcap)`.
        window: a query at t sees `j > t - window` only.
        sink_logits: `[N]`, learnt logits that take probability without a value.
        rounded_to: round rows and probabilities to this dtype before each product, as a kernel on tensor cores of
            that type must; sums stay in q's dtype.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x if rounded_to is None else x.to(rounded_to).to(x.dtype)

    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    j, t = torch.arange(k.shape[0], device=q.device), positions[:, None]
    history = (j >= sink) & (j < history_end[:, None])
    seen = j <= t
    if window is not None:
        seen &= j > t - window
    k, v, k_hat, v_hat = (rounded(x) for x in (k, v, k_hat, v_hat))
    queries = rounded(q).reshape(tokens, kv_heads, -1, dim)
    with full_precision():
        plain_logits, history_logits = (torch.einsum("tkgd,jkd->kgtj", queries, x) for x in (k, k_hat))
        logits = scale * torch.where(history, history_logits, plain_logits)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = torch.where(seen, logits, -torch.inf)
        top = logits.amax(-1, keepdim=True) if k.shape[0] else logits.new_full((*logits.shape[:3], 1), -torch.inf)
        extra = torch.zeros_like(top)
        if sink_logits is not None:
            learnt = sink_logits.to(q.dtype).reshape(kv_heads, -1, 1, 1)
            top = torch.maximum(top, learnt)
            extra = torch.exp(learnt - top)
        top = torch.where(top == -torch.inf, 0, top)
        weights = torch.exp(logits - top)
        total = weights.sum(-1, keepdim=True) + extra
        weights = rounded(weights)
        out = torch.einsum("kgtj,jkd->tkgd", torch.where(history, 0, weights), v)
        out = out + torch.einsum("kgtj,jkd->tkgd", torch.where(history, weights, 0), v_hat)
    total = total[..., 0].permute(2, 0, 1)[..., None]
    return (out / torch.where(total > 0, total, 1)).reshape(tokens, heads, dim)
