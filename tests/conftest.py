"""Settings of every test: one thread, repeatable examples, GPU tests only where a GPU is."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("h3lib", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("h3lib")


def pytest_collection_modifyitems(items):
    devices = torch.cuda.device_count()
    for item in items:
        wanted = item.get_closest_marker("gpus")
        needed = wanted.args[0] if wanted else int(item.get_closest_marker("gpu") is not None)
        if needed > devices:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, has {devices}"))
