"""ViT: a transformer that classifies images (Dosovitskiy et al., 2021, arXiv:2010.11929).

    b images   p patches of an image   s = p + 1 tokens with a class token, else p   n = b s
    h hidden   c classes

An image is cut into square patches; a token is a patch's pixels through a linear layer, plus the
embedding of its position. The layers are pre-LN without a mask. The classifier reads the class
token, or the mean of all patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import HALF, ViTConfig
from megatron.data.images import CHANNELS, ImageBatch
from megatron.models.gpt import Sequences, Transformer, make_norm
from megatron.parallel.dropout import row_keys
from megatron.parallel.factory import LayerFactory

CLASS_TOKEN, PATCH = 0, 1  # rows of the embedding of token types


def crop_and_flip(batch: ImageBatch) -> Tensor:
    """The images of a batch after its crops and flips: uint8 [b, size, size, 3]."""
    images, shifts, flips = batch.images, batch.shifts, batch.flips
    if shifts is None and flips is None:
        return images
    b, size, device = len(images), images.shape[1], images.device
    rows = columns = torch.arange(size, device=device).expand(b, -1)
    if flips is not None:
        columns = torch.where(flips[:, None], size - 1 - columns, columns)
    if shifts is not None:
        rows, columns = rows + shifts[:, :1], columns + shifts[:, 1:]
    samples = torch.arange(b, device=device)[:, None, None]
    last = size - 1
    taken = images[samples, rows.clamp(0, last)[:, :, None], columns.clamp(0, last)[:, None]]
    is_row, is_column = (each == each.clamp(0, last) for each in (rows, columns))
    return taken * (is_row[:, :, None] & is_column[:, None])[..., None]


class ViT(nn.Module):
    terms: ClassVar = ("loss",)

    def __init__(self, config: ViTConfig, factory: LayerFactory, vocab_size: int) -> None:
        """vocab_size: the number of classes."""
        super().__init__()
        self.vocab_size, self.config, heads = vocab_size, config, factory.whole()
        h, std = config.hidden_size, config.init_method_std
        self.has_class_token = config.pooling == "class-token"
        # The class token has no pixels, so it must not get the patches' bias: each is a row of the
        # embedding of token types, which adds one of them to every row of the stream.
        self.patch_embedding = factory.input(
            CHANNELS * config.patch_size**2, h, bias=not self.has_class_token, std=std
        )
        if self.has_class_token:
            self.token_type_embedding = factory.position_embedding(2, h, std=std)
        self.position_embedding = factory.position_embedding(config.positions, h, std=std)
        self.embedding_dropout = factory.dropout(config.dropout_of_embeddings, "embedding")
        self.transformer = Transformer(config, factory)
        self.exchange, self.stream_ranks = factory.exchange, factory.stream.size
        self.context = factory.context
        self.tokens = config.positions // factory.context.axis.size  # of an image, on this rank
        self.final_norm = make_norm(config, factory)
        self.gather = factory.gather()
        self.head = heads.output(h, vocab_size, std=std)
        self.measured = Accuracy(self)

    def stages(self) -> list[list[str]]:
        """See Decoder."""
        first = ["patch_embedding", "position_embedding", "embedding_dropout"]
        first += ["token_type_embedding"] * self.has_class_token
        layers = [[f"transformer.layers.{number}"] for number in self.transformer.layers]
        return [first, *layers, ["final_norm", "gather", "head"]]

    def denominators(self, batch: ImageBatch) -> list[float]:
        return [float(len(batch.labels) * self.context.counts_samples)]

    def stream(self, batch: ImageBatch, number: int) -> Tensor:
        """Input of layer `number` for a batch of arrays, as a tensor on meta."""
        return self.transformer.stream_like(self.filled(batch) * self.tokens)

    def filled(self, batch: ImageBatch) -> int:
        """Images of the batch, and black ones after them for equally many rows on each rank of
        sequence parallelism: the last batch of an evaluation may be smaller than those of
        training, for which this is checked."""
        step = self.stream_ranks // gcd(self.stream_ranks, self.tokens)
        return -(-len(batch.labels) // step) * step

    def embed(self, batch: ImageBatch) -> Tensor:
        """Sum of the embeddings, [n, h], without dropout, which is in `layers`."""
        config, b, device = self.config, self.filled(batch), batch.images.device
        images = F.pad(crop_and_flip(batch), (0, 0) * 3 + (0, b - len(batch.images)))
        x = self.patch_embedding(self.context.take(self.patches(images)).flatten(0, 1))
        positions = self.context.positions(config.positions, device).expand(b, -1)
        x = x + self.position_embedding(positions.flatten())
        if self.has_class_token:
            types = torch.where(positions == 0, CLASS_TOKEN, PATCH)
            x = x + self.token_type_embedding(types.flatten())
        return x

    def patches(self, images: Tensor) -> Tensor:
        """Maps images [b, size, size, 3], uint8, to the normalised pixels of each token, [b, s, 3 x
        patch x patch], channel by channel; those of a class token are 0."""
        config, dtype = self.config, next(self.parameters()).dtype
        colors = images.to(torch.promote_types(dtype, torch.float32)).div(255).unbind(3)
        facts = zip(colors, config.image_mean or HALF, config.image_std or HALF, strict=True)
        pixels = torch.stack([(color - mean) / std for color, mean, std in facts], 1).to(dtype)
        side, patch = config.image_size // config.patch_size, config.patch_size
        # [b, channel, row, y, column, x] to [b, row, column, channel, y, x]
        grid = pixels.view(-1, CHANNELS, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
        tokens = grid.reshape(len(images), config.patches, -1)
        return F.pad(tokens, (0, 0, int(self.has_class_token), 0))

    def layers(
        self, x: Tensor, batch: ImageBatch, *, numbers: Sequence[int] | None = None
    ) -> Tensor:
        """Hidden states after the last layer, or after the last of `numbers`."""
        keys = self.dropout_keys(batch)
        at = Sequences(
            count=self.filled(batch),
            mask=None,
            is_causal=False,
            dropout_keys=keys,
            attention_dropout_keys=self.context.attention_keys(
                self.exchange(keys), self.filled(batch)
            ),
        )
        if numbers is None or 0 in numbers:  # see Decoder
            x = self.embedding_dropout(x, keys)
        return self.transformer(x, at, numbers)

    def dropout_keys(self, batch: ImageBatch) -> Tensor | None:
        """See the function of this name."""
        if batch.numbers is None or not (self.training and self.transformer.drops):
            return None
        positions = self.context.positions(self.config.positions, batch.numbers.device)
        return row_keys(batch.numbers, positions)

    def scores(self, x: Tensor, batch: ImageBatch) -> Tensor:
        """Scores of the classes [b, c], fp32 or wider, from the output of `layers`."""
        x = self.gather(self.final_norm(x))
        x = x.view(-1, self.tokens, x.shape[1])[: len(batch.labels)]
        if self.has_class_token:
            pooled = self.context.of_first(x[:, 0])
        else:
            pooled = self.context.sum(x.mean(1) / self.context.axis.size)
        scores: Tensor = self.head(pooled)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def loss(self, x: Tensor, batch: ImageBatch, loss_scales: Tensor) -> Tensor:
        """Cross-entropy of each image's label: see Objective."""
        losses = self.losses(self.scores(x, batch), batch)
        return losses.sum() * loss_scales * self.context.counts_samples

    def losses(self, scores: Tensor, batch: ImageBatch) -> Tensor:
        """Loss of each image, [b]."""
        smoothing = self.config.label_smoothing
        return F.cross_entropy(scores, batch.labels, reduction="none", label_smoothing=smoothing)

    def forward(self, batch: ImageBatch, loss_scales: Tensor | None = None) -> Tensor:
        """Runs all stages. With loss_scales see `loss`; without, see `scores`."""
        x = self.layers(self.embed(batch), batch)
        return self.scores(x, batch) if loss_scales is None else self.loss(x, batch, loss_scales)


class Accuracy:
    """Objective of an evaluation: the loss, and the shares of images whose label has the highest
    score, or is among the five highest."""

    terms = ("loss", "top1", "top5")

    def __init__(self, model: Any) -> None:
        """model: a ViT."""
        self.model = model

    def denominators(self, batch: Any) -> list[float]:
        return self.model.denominators(batch) * len(self.terms)

    def loss(self, x: Tensor, batch: Any, loss_scales: Tensor) -> Tensor:
        scores = self.model.scores(x, batch)
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices
        hits = best == batch.labels[:, None]
        sums = [self.model.losses(scores, batch).sum(), hits[:, 0].sum(), hits.sum()]
        scales = loss_scales * self.model.context.counts_samples
        return torch.stack([each.to(torch.float64) for each in sums]) * scales
