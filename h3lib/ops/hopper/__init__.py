"""Back end `triton` for sm_90: importing this package registers its kernels with their ops.

**Raises:** BackendError at import for a Triton that was not tested.
"""

from h3lib.ops.hopper import gemm_chain, gemm_fold, gemm_tree  # noqa: F401
