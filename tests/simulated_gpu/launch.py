"""Runs Python with simulated GPUs; what follows the options is what `python` takes: a script, -m module or -c code.

    python -m tests.simulated_gpu.launch [--devices N] [--free BYTES[,BYTES...]] [--largest BYTES] [--log FILE]
        -m fedlens run digits --set engine.device=cuda

--devices  how many GPUs there are (1)
--free     free bytes of all GPUs, or of each (70e9)
--largest  a tensor of more bytes is out of memory (inf)
--log      each process appends its counts to this file, one JSON object a line
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OPTIONS = {
    "--devices": "SIMGPU_DEVICES",
    "--free": "SIMGPU_FREE",
    "--largest": "SIMGPU_LARGEST",
    "--log": "SIMGPU_LOG",
}
COMPILERS = {"interpose.c": ("CC", "cc"), "guard.cpp": ("CXX", "g++")}


def missing() -> str | None:
    """Why this machine cannot simulate GPUs; None where it can. Does not import torch."""
    if not sys.platform.startswith("linux"):
        return "simulated GPUs need Linux"
    for variable, default in COMPILERS.values():
        compiler = os.environ.get(variable, default)
        if shutil.which(compiler) is None:
            return f"simulated GPUs need a C and a C++ compiler; {compiler!r} is missing: install it or set {variable}"
    if importlib.util.find_spec("torch") is None:
        return "simulated GPUs need PyTorch, and this Python has none"
    if not (_torch() / "lib" / "libtorch_cuda.so").is_file():
        return "simulated GPUs need a build of PyTorch with CUDA, such as the wheel of PyPI"
    return None


def libraries() -> Path:
    """The folder of the two compiled libraries, which is made below the folder of temporary files.

    Raises:
        PermissionError: another user has made the folder.
    """
    torch = _torch()
    parts = [(HERE / source).read_bytes() for source in COMPILERS]
    version = [str(torch).encode(), (torch / "version.py").read_bytes()]
    key = hashlib.sha256(b"\0".join(parts + version)).hexdigest()[:16]
    top = Path(tempfile.gettempdir()) / f"fedlens-simulated-gpu-{os.getuid()}"
    folder = top / key
    folder.mkdir(parents=True, exist_ok=True)
    top.chmod(0o700)  # PermissionError where it is not ours: libraries are loaded from it
    options = {
        "interpose.c": ["-Wl,-soname,libcuda.so.1"],
        "guard.cpp": ["-std=c++20", f"-I{torch}/include", f"-L{torch}/lib", "-lc10"],
    }
    for source, (variable, default) in COMPILERS.items():
        library = (folder / source).with_suffix(".so")
        if not library.exists():
            # Under a name of its own until it is whole: another process may compile it or look for it now.
            unfinished = library.with_suffix(f".{os.getpid()}")
            command = [os.environ.get(variable, default), "-O1", "-shared", "-fPIC", str(HERE / source)]
            subprocess.run([*command, "-o", str(unfinished), *options[source]], check=True)
            unfinished.replace(library)
    return folder


def environment(**options: str) -> dict[str, str]:
    """The variables under which a new Python process has simulated GPUs; options as in OPTIONS."""
    paths = [str(HERE / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])]
    simulated = {"SIMGPU": "1", "SIMGPU_LIBRARIES": str(libraries()), "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **options, **simulated}


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def main() -> None:
    """Replaces this process by Python with simulated GPUs."""
    rest, options = sys.argv[1:], {}
    while len(rest) > 1 and rest[0] in OPTIONS:
        options[OPTIONS[rest[0]]] = os.path.abspath(rest[1]) if rest[0] == "--log" else rest[1]
        rest = rest[2:]
    if not rest or rest[0] in ("-h", "--help"):
        sys.exit(__doc__)
    if reason := missing():
        sys.exit(reason)
    os.execve(sys.executable, [sys.executable, *rest], environment(**options))


if __name__ == "__main__":
    main()
