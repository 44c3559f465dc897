"""A network of one's own with group normalization in place of its batch normalization, and a bottleneck."""

from torch import Tensor, nn

from fedlens import Experiment


class Net(nn.Module):
    """A convolution with batch normalization, the mean over the image, and a classifier."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.out = nn.Linear(16, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.bn(self.conv(images)).relu().mean((2, 3)))


def experiment(rounds: int = 5) -> Experiment:
    """FedAvg on the digits with that network."""
    return Experiment(
        rounds=rounds,
        data={"dataset": "digits", "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 20}},
        select={"clients_per_round": 5},
        model={"name": Net, "norm": "group", "bottleneck": 8},
        local={"lr": 0.1, "batch_size": 16},
    )


if __name__ == "__main__":
    experiment().run("net")
