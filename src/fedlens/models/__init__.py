"""Models: plain `nn.Module` factories."""
