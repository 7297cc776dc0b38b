"""The model: a plain nn.Module that knows nothing of Fabric, devices or precision. Edit here."""

from torch import Tensor, nn


class Model(nn.Module):
    """A small convolutional classifier for images of any size.

    Args:
        in_channels: Channels of an image, 1 for grey.
        num_classes: Number of classes, that is of logits.
        width: Channels after the first layer; the later layers have twice as many. Default 32.
        dropout: Probability of dropping a feature before the last layer. Default 0.25.
    """

    def __init__(self, in_channels: int, num_classes: int, width: int = 32, dropout: float = 0.25):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        features = self.features(images).amax(dim=(2, 3))
        return self.head(self.dropout(features))
