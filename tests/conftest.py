"""Settings of every test: one thread, repeatable examples, tests of what is here only."""

import os
import shutil

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("h3lib", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("h3lib")


SLURM = ("slurmctld", "slurmd", "munged", "srun", "sbatch")


def pytest_collection_modifyitems(items):
    devices = torch.cuda.device_count()
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])
    absent = [name for name in SLURM if shutil.which(name, path=path) is None]
    for item in items:
        wanted = item.get_closest_marker("gpus")
        needed = wanted.args[0] if wanted else int(item.get_closest_marker("gpu") is not None)
        if needed > devices:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, has {devices}"))
        if absent and item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.skip(reason=f"not installed here: {', '.join(absent)}"))
