"""SSD by mamba-ssm's Triton kernels."""

from mamba_fsdp.ops import fused

why_unavailable = fused.need("mamba_ssm")
VARIES = "mamba-ssm's SSD takes sums that torch refuses then"


def ssd(x, dt, A, B, C, D, dt_bias, chunk_size, documents, initial_state, return_last_state):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, dt_softplus=True,
                                     initial_states=initial_state, seq_idx=fused.seq_idx(documents),
                                     return_final_states=return_last_state)
