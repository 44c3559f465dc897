"""fedlens: federated learning for computer vision.

Describe how the data is scattered and how the clients learn; fedlens trains it and shows what the scatter cost.
"""

__version__ = "0.1.0"
