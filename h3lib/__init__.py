"""h3lib: one arithmetic, every layout. Bitwise parallelism for the MiniMax-H3 transformer."""

__all__ = ["H3Transformer"]


def __getattr__(name: str):
    """`H3Transformer` on demand: the layers below it do not need what it needs."""
    if name == "H3Transformer":
        from h3lib.pretrained import H3Transformer

        return H3Transformer
    raise AttributeError(f"module 'h3lib' has no attribute {name!r}")
