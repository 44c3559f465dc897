"""Models: plain `nn.Module` factories by name, `factory(input_shape, classes, *, settings) -> nn.Module`."""

from fedlens.core.registry import Entry, Registry

MODELS = Registry(
    "model",
    {
        "linear": Entry("fedlens.models.simple:linear", "multinomial logistic regression on the pixels"),
        "mlp": Entry("fedlens.models.simple:mlp", "McMahan's 2NN: two hidden layers of 200 ReLU units"),
        "small-cnn": Entry(
            "fedlens.models.simple:small_cnn", "two 3x3 convolutions for small images such as digits"
        ),
        "mcmahan-cnn": Entry(
            "fedlens.models.simple:mcmahan_cnn", "McMahan's CNN, 1,663,370 parameters at 28x28x1"
        ),
        "hsu-cnn": Entry("fedlens.models.simple:hsu_cnn", "hsu2019's CNN, 1,756,426 parameters on CIFAR-10"),
        "projection": Entry(
            "fedlens.models.projection:projection",
            "another model with MOON's projection head before its last layer",
        ),
    },
)
