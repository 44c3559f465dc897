"""The tests of the simulator run where it is installed, in the process that test_rows.py starts."""

import os

collect_ignore = ["startup", "test_rows.py" if os.environ.get("SIMGPU") == "1" else "test_simulator.py"]
