"""Speed and memory, against the bare-PyTorch limit of the machine at hand."""
