"""The released pipeline's steps, from diffusers, without its transformers dependency."""

import importlib

import diffusers.loaders

# diffusers has this mixin only beside transformers; packing and noise do not need either.
if not hasattr(diffusers.loaders, "MiniMaxH3LoraLoaderMixin"):
    diffusers.loaders.MiniMaxH3LoraLoaderMixin = type("MiniMaxH3LoraLoaderMixin", (), {})

released_steps = importlib.import_module("diffusers.modular_pipelines.minimax_h3.before_denoise")
