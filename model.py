"""The model: a plain nn.Module that knows nothing of Fabric, devices or precision. Edit here."""

from torch import Tensor, nn


class Model(nn.Module):
    """A small convolutional classifier.

    It has no ReLU and no max pooling: near their kinks a difference in rounding can change which branch is taken, and
    runs on different numbers of devices, which round differently, would diverge.

    Args:
        image_shape: (channels, height, width) of an image.
        num_classes: Number of classes.
        width: Channels after the first layer; the later layers have twice as many. Default 32.
        dropout: Probability of dropping a feature before the last layer. Default 0.25.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, width: int = 32, dropout: float = 0.25):
        super().__init__()
        channels, image_height, image_width = image_shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.GELU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, stride=2),
            nn.GELU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * ((image_height + 3) // 4) * ((image_width + 3) // 4), num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, channels, height, width) to logits (batch, num_classes)."""
        return self.layers(images)
