"""What `fedlens bench` measures: fedlens beside bare PyTorch and its peers, and where a round's time goes."""
