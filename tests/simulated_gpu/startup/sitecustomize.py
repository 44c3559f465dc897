"""Gives simulated GPUs to every Python process with SIMGPU=1, worker processes too, when it imports torch.

Python imports a module of this name when it starts. `launch.py` puts this folder first on PYTHONPATH.
"""

import os
import sys

if os.environ.get("SIMGPU") == "1":
    import ctypes
    import importlib.abc
    import importlib.machinery

    # Before torch, so that torch finds it in place of the driver's library.
    ctypes.CDLL(os.path.join(os.environ["SIMGPU_LIBRARIES"], "interpose.so"), ctypes.RTLD_GLOBAL)

    class AfterTorch(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                import simgpu

                simgpu.install()

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, AfterTorch())
