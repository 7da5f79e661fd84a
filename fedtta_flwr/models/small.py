"""The two small networks of the federated-head benchmark: a plain CNN and a compact transformer.

References
----------
Zhou et al. BTFL. KDD 2025; Jiang, Lin. FedTHE. ICLR 2023 (arXiv 2205.10920): CNN, CCT-4.
Hassani et al. Escaping the big data paradigm with compact transformers. 2021 (arXiv 2104.05704):
CCT-4/3x2, table 1 and section 3.4.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtta_flwr.models.base import Classifier, initialise_convolutions
from fedtta_flwr.models.normalize import Normalize


class SmallCNN(Classifier):
    """Two 5x5 convolutions with max-pooling, one hidden layer of 64, a head without bias.

    Features [B, 64] are after a ReLU, so never negative. For images of 32x32 pixels.

    Parameters
    ----------
    normalize : Normalize
        Input normalisation.
    classes : int
        Number of classes, K.
    """

    def __init__(self, normalize: Normalize, classes: int) -> None:
        super().__init__(normalize)
        self.conv1 = nn.Conv2d(normalize.channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * 5 * 5, 64)
        self.head = nn.Linear(64, classes, bias=False)

    def embed(self, x: Tensor) -> Tensor:
        """Map normalised images [B, C, 32, 32] to features [B, 64]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.relu(self.fc1(x.flatten(1)))


class CCT(Classifier):
    """CCT-4/3x2: convolutional tokens, four encoder layers, attention-weighted pooling.

    Two 3x3 convolutions with max-pooling make 8x8 tokens of width 128 from a 32x32 image. The
    encoder layers (2 heads, MLP ratio 1, dropout 0.1) are torch's, in pre-norm order, which differ
    from the published ones in little (docs/two-heads.md); sequence pooling (the paper's eq. 2)
    stands for a class token.

    Parameters
    ----------
    normalize : Normalize
        Input normalisation.
    classes : int
        Number of classes, K.
    """

    DIM = 128
    TOKENS = 8 * 8

    def __init__(self, normalize: Normalize, classes: int) -> None:
        super().__init__(normalize)
        self.tokenizer = nn.Sequential(
            nn.Conv2d(normalize.channels, 64, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(64, self.DIM, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        self.position = nn.Parameter(torch.empty(1, self.TOKENS, self.DIM))
        nn.init.trunc_normal_(self.position, std=0.2)
        layers = [
            nn.TransformerEncoderLayer(
                self.DIM, 2, self.DIM, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(4)
        ]
        self.encoder = nn.TransformerEncoder(layers[0], 4, norm=nn.LayerNorm(self.DIM), enable_nested_tensor=False)
        self.encoder.layers = nn.ModuleList(layers)  # and not four copies of one, first weights and all
        self.pool = nn.Linear(self.DIM, 1)
        self.head = nn.Linear(self.DIM, classes)
        initialise_convolutions(self)

    def embed(self, x: Tensor) -> Tensor:
        """Map normalised images [B, C, 32, 32] to features [B, 128]."""
        tokens: Tensor = self.tokenizer(x).flatten(2).transpose(1, 2)
        tokens = self.encoder(tokens + self.position)
        weights: Tensor = self.pool(tokens).softmax(dim=1)
        return F.relu((weights * tokens).sum(dim=1))  # before the head, as BTFL's appendix B has it
