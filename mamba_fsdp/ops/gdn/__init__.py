"""Computes the gated delta rule of Gated DeltaNet: a new value replaces the value that the state contains for its key; it
is not only added.

For every head, with the state S as a (d_state, headdim) matrix:

    S[t] = exp(g[t]) (I - beta[t] k[t] k[t]^T) S[t-1] + beta[t] k[t] v[t]^T
    y[t] = S[t]^T q[t] / sqrt(d_state)

with q[t] and k[t] divided by their lengths.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024, arXiv 2412.06464), section 3. In chunks (WY form), with
the decay from a chunk's start to position i as gamma[i], from position j to i as gamma[i] / gamma[j]:

    (I + M) U = beta (V - gamma K S),    M[i, j] = beta[i] gamma[i] / gamma[j] k[i] . k[j] for j < i

gives U, the rows that the chunk's keys add to the state S before the chunk.
"""

from torch import Tensor

from mamba_fsdp.ops.backends import modules

BACKENDS = modules(__name__)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    backend: str = "reference",
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns y, like v, for whole sequences of any length, or with `return_last_state` (y, last state in compute
    type).

    q, k (batch, length, groups, d_state), normed here; each group serves an equal number of consecutive heads; v (batch,
    length, heads, headdim); g, the logarithm of the decay, negative, and beta, in compute type, (batch, length, heads);
    seq_idx (batch, length): the state is reset to zero where it changes; initial_state (batch, heads, d_state,
    headdim), or None for zeros: the state before the first document of each row.
    """
    assert v.shape[2] % k.shape[2] == 0, f"{k.shape[2]} groups don't divide {v.shape[2]} heads"
    return BACKENDS[backend].gated_delta_rule(
        q, k, v, g, beta, seq_idx, initial_state, return_last_state
    )
