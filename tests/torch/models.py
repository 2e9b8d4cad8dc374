"""Models of the tests, with batches for each, as people write them in PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Example:
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[], nn.Module]
    value: Callable[[nn.Module, nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] = (
        lambda model, loss, x, y: loss(model(x), y)
    )
    # Of the learning rates, where PyTorch's own runs diverge from each other at the full ones.
    rate: float = 1.0


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int = 12, width: int = 16, words: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.02)
        self.layers = nn.ModuleList([Block(width, 2) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0][:, -1])


class Bag(nn.Module):
    """Embeddings, summed, with a layer norm and a tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12, padding_idx=0)
        self.norm = nn.LayerNorm(12)
        self.hidden = nn.Linear(12, 12)
        self.out = nn.Linear(12, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens).mean(1))
        return self.out(torch.tanh(self.hidden(x)))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        return self.head(self.encoder(x)[:, 0])


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def vectors(generator: torch.Generator) -> Batch:
    x = torch.randn(8, 6, generator=generator)
    return x, torch.randn(8, 3, generator=generator)


def images(channels: int, size: int, classes: int = 5) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        x = torch.randn(4, channels, size, size, generator=generator)
        return x, torch.randint(0, classes, (4,), generator=generator)

    return batch


def _sequences(generator: torch.Generator) -> Batch:
    x = torch.randn(4, 7, 6, generator=generator)
    return x, torch.randint(0, 4, (4,), generator=generator)


def _words(generator: torch.Generator) -> Batch:
    return (
        torch.randint(0, 20, (6, 5), generator=generator),
        torch.randint(0, 20, (6,), generator=generator),
    )


def tokens(generator: torch.Generator) -> Batch:
    x = torch.randint(0, 32, (2, 8), generator=generator)
    return x, torch.randint(0, 32, (16,), generator=generator)


EXAMPLES: dict[str, Example] = {
    "MLP": Example(_mlp, vectors, nn.MSELoss),
    "CNN with BatchNorm": Example(Cnn, images(1, 12), nn.CrossEntropyLoss),
    "transformer, 3 layers": Example(lambda: Transformer(3), tokens, nn.CrossEntropyLoss),
    "transformer, 12 layers": Example(Transformer, tokens, nn.CrossEntropyLoss),
    "GRU": Example(Gru, _sequences, nn.CrossEntropyLoss),
    "embedding, tied": Example(Bag, _words, nn.CrossEntropyLoss),
    "ViT": Example(Vit, images(3, 16), nn.CrossEntropyLoss),
}


_undefined = torch.library.Library("torchvision", "FRAGMENT")


def library_examples() -> dict[str, Example]:
    """Return models of torchvision and transformers, with random weights, as far as installed."""
    examples: dict[str, Example] = {}
    if importlib.util.find_spec("torchvision"):
        examples |= _torchvision()
    if importlib.util.find_spec("transformers"):
        examples |= _transformers()
    return examples


def _torchvision() -> dict[str, Example]:
    try:
        from torchvision import models
    except RuntimeError:  # a wheel for CUDA, whose C++ cannot be loaded; no classifier needs it
        for name in ("nms", "qnms"):
            _undefined.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from torchvision import models

    def vit() -> nn.Module:
        return models.VisionTransformer(16, 4, 2, 2, 16, 32, num_classes=5)

    return {
        "torchvision ResNet-18": Example(
            # Its last feature maps have one element: a batch of four is normalized to almost signs.
            lambda: models.resnet18(num_classes=5),
            images(3, 32),
            nn.CrossEntropyLoss,
            rate=0.01,
        ),
        "torchvision ViT": Example(vit, images(3, 16), nn.CrossEntropyLoss),
    }


def _transformers() -> dict[str, Example]:
    import transformers as tf

    size = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def language(generator: torch.Generator) -> Batch:
        x = torch.randint(0, 32, (2, 8), generator=generator)
        return x, x

    def labels(generator: torch.Generator) -> Batch:
        x = torch.randint(0, 32, (2, 8), generator=generator)
        return x, torch.randint(0, 2, (2,), generator=generator)

    def value(model: nn.Module, loss: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(input_ids=x, labels=y).loss

    def bert() -> nn.Module:
        config = tf.BertConfig(**size, **no_dropout, intermediate_size=32)
        return tf.BertForSequenceClassification(config)

    def gpt2() -> nn.Module:
        dropout: dict[str, float] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = tf.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, **dropout
        )
        return tf.GPT2LMHeadModel(config)

    def llama() -> nn.Module:
        config = tf.LlamaConfig(**size, intermediate_size=32, num_key_value_heads=1)
        return tf.LlamaForCausalLM(config)

    def t5() -> nn.Module:
        config = tf.T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0
        )
        config.decoder_start_token_id = 0
        return tf.T5ForConditionalGeneration(config)

    return {
        "transformers BERT": Example(bert, labels, nn.Identity, value),
        "transformers GPT-2": Example(gpt2, language, nn.Identity, value),
        "transformers Llama": Example(llama, language, nn.Identity, value),
        "transformers T5": Example(t5, language, nn.Identity, value),
    }


def all_examples() -> dict[str, Example]:
    """Return the models above, and those of other libraries that are installed."""
    return {**EXAMPLES, **library_examples()}
