"""Models: plain `nn.Module` factories by name, `factory(input_shape, classes, *, settings) -> nn.Module`."""
