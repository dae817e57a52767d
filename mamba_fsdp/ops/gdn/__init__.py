"""Computes the gated delta rule of Gated DeltaNet: a new value replaces the value that the state contains for its key,
instead of being added to it.

For every head, with the state S as a (d_state, headdim) matrix:

    S[t] = exp(g[t]) (I - beta[t] k[t] k[t]^T) S[t-1] + beta[t] k[t] v[t]^T
    y[t] = S[t]^T q[t] / sqrt(d_state)

with q[t] and k[t] divided by their lengths.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024, arXiv 2412.06464), section 3. The rule is
computed in chunks (WY form). gamma[i] is the decay from a chunk's start to position i, so that gamma[i] / gamma[j] is the
decay from position j to i. S is the state before the chunk. The equation

    (I + M) U = beta (V - gamma K S),    M[i, j] = beta[i] gamma[i] / gamma[j] k[i] . k[j] for j < i

determines U. Row i of U is what position i adds to the state for its key.
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
    """Returns y, in the shape and dtype of v. With return_last_state, returns (y, last state), the state in compute type.
    The sequences can have any length.

    q, k (batch, length, groups, d_state): they need not have length 1; each group serves an equal number of consecutive
    heads. v (batch, length, heads, headdim). g, beta (batch, length, heads), in compute type: g is the logarithm of the
    decay, and negative. seq_idx (batch, length): the state is reset to zero where seq_idx changes. initial_state (batch,
    heads, d_state, headdim): the state before the first document of each row; None stands for zeros.
    """
    assert v.shape[2] % k.shape[2] == 0, f"{k.shape[2]} groups don't divide {v.shape[2]} heads"
    return BACKENDS[backend].gated_delta_rule(
        q, k, v, g, beta, seq_idx, initial_state, return_last_state
    )
