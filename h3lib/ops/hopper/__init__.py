"""Back end `triton` for sm_90: importing this package registers its kernels with their ops.

**Raises:** BackendError at import for a Triton that was not tested.
"""

from h3lib.ops.hopper import (  # noqa: F401
    attention_dkv,
    attention_dq,
    attention_forward,
    attention_statistics,
    embedding,
    fold,
    gemm_chain,
    gemm_fold,
    gemm_tree,
    row_product,
    rowwise,
    rowwise_fold,
    rowwise_norm,
)
