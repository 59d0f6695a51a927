"""Models of torch's own modules, and heads on pretrained backbones."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from tests.corpus.program import WIDTH, Block, Fit, Program, Programs, fitted, momentum, pictures, texts, vectors
from tests.corpus.stock import LENGTH, VOCABULARY, tokens_lost
from tests.training.harness import GptTask, samples

TEXTS = texts(VOCABULARY, LENGTH)


def gpt() -> Program:
    evaluation = rs.EvalConfig(data=samples(), every_steps=2, num_samples=7)
    return Program(task=GptTask(), data=samples(), evaluation=evaluation, microbatches=4)


class Translator(nn.Module):
    """nn.Transformer between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask)
        logits: torch.Tensor = self.head(hidden)
        return logits


def translated(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    return tokens_lost(model(batch[:, :5], batch[:, 5:-1]), batch[:, 6:])


class Encoder(nn.Module):
    """nn.TransformerEncoder: in an evaluation it may take its fast path."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return logits


class Recurrent(nn.Module):
    """An LSTM with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return logits


def next_of(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    return tokens_lost(model(batch[:, :-1]), batch[:, 1:])


def by_first(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch), batch[:, 0] % 3)


class Convolutions(nn.Module):
    """Two convolutions with norms between."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU())
        self.last = nn.Conv2d(out, out, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layers(x)
        y: torch.Tensor = self.last(x if time is None else x + time[:, : x.shape[1], None, None])
        return y


class UNet(nn.Module):
    """Stages of blocks, down and up again, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [nn.ModuleList([Convolutions(3, 8), Convolutions(8, 8)]), nn.ModuleList([Convolutions(8, 12)])]
        )
        self.middle = Convolutions(12, 12)
        self.up = nn.ModuleList([nn.ModuleList([Convolutions(24, 8)]), nn.ModuleList([Convolutions(16, 8)])])
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        skips = []
        for stage in self.down:
            for block in stage:  # type: ignore[attr-defined]  # a ModuleList
                x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for stage in self.up:
            x = torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), skips.pop()], 1)
            for block in stage:  # type: ignore[attr-defined]
                x = block(x, time)
        y: torch.Tensor = self.out(x)
        return y


def restored(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A picture from one with noise."""
    return (model(batch + 0.3 * torch.randn_like(batch)) - batch).square().mean()


class Diffusion(nn.Module):
    """A U-Net that receives the time as a table of sinusoids."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(100)[:, None] * torch.exp(-torch.arange(6) / 2)
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)
        self.time, self.net = nn.Linear(12, 12), UNet()

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x, self.time(self.table[step]))
        return y


def denoised(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The noise that was added, at times drawn here."""
    step, noise = torch.randint(0, 100, (len(batch),)), torch.randn_like(batch)
    share = (step / 100)[:, None, None, None]
    return (model(batch * (1 - share) + noise * share, step) - noise).square().mean()


class Autoencoder(nn.Module):
    """Draws between its halves; two heads give what it draws from."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mean, self.spread, self.out = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.blocks[0](x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        drawn = mean + torch.randn_like(mean) * (spread / 2).exp()
        return self.blocks[1](self.out(drawn)), mean, spread


def bounded(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    """The evidence's lower bound, its two parts as metrics."""
    made, mean, spread = model(batch)
    far, prior = (made - batch).square().sum(), -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
    return rs.Loss(far + prior, len(batch), {"far": (far, len(batch)), "prior": (prior, len(batch))})


# -- backbones --


class Backbone(nn.Module):
    """Blocks with dropout."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout=dropout) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Headed(nn.Module):
    """A backbone and a head, with dropout before it."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.dropout, self.head = backbone, nn.Dropout(0.2), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.dropout(self.backbone(x)))
        return y


def frozen() -> nn.Module:
    model = Headed(Backbone())
    model.backbone.requires_grad_(False).eval()
    return model


def thawed() -> nn.Module:
    return Headed(Backbone())


class Adapted(nn.Module):
    """A frozen linear layer, and a low-rank one beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.dropout = linear, nn.Dropout(0.2)
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) + self.up(self.down(self.dropout(x)))
        return y


def adapted() -> nn.Module:
    model = Headed(Backbone())
    model.backbone.requires_grad_(False)
    for block in model.backbone.blocks:  # type: ignore[union-attr]
        block.linear = Adapted(block.linear)
    return model


class Normed(nn.Module):
    """Batch norm with its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.norm.running_mean.fill_(0.3)  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x)).tanh()
        return y


def frozen_batch_norm() -> nn.Module:
    model = Headed(Normed())
    model.backbone.requires_grad_(False).eval()
    return model


@cache
def _saved() -> str:
    """A folder with a small BERT's weights. It goes with the process."""
    import transformers

    from tests.corpus.language_models import _BERT

    torch.manual_seed(3)
    folder = tempfile.TemporaryDirectory()
    _KEPT.append(folder)
    transformers.BertModel(transformers.BertConfig(**_BERT)).save_pretrained(folder.name)
    return folder.name


_KEPT: list[Any] = []


class Classifier(nn.Module):
    """A model of transformers with a new head."""

    def __init__(self, folder: str) -> None:
        import transformers

        super().__init__()
        self.body = transformers.BertModel.from_pretrained(folder)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(input_ids=tokens).last_hidden_state[:, 0])
        return logits


class Pretrained(Fit):
    """Reads the weights in build_model."""

    def __init__(self, folder: str) -> None:
        super().__init__(nn.Module, measure=by_first)
        self.folder = folder

    def build_model(self) -> nn.Module:
        assert (Path(self.folder) / "config.json").exists()
        return Classifier(self.folder)


def pretrained() -> Program:
    return Program(task=Pretrained(_saved()), data=TEXTS)


def _of(make: Any, measure: Any, data: Any, **others: Any) -> Any:
    return lambda: fitted(make, measure=measure, data=data, **others)


def _evaluated() -> Program:
    evaluation = rs.EvalConfig(data=TEXTS, every_steps=2, num_samples=5)
    return fitted(Encoder, measure=by_first, data=TEXTS, evaluation=evaluation)


PROGRAMS: Programs = {
    "gpt": gpt,
    "torch_transformer": _of(Translator, translated, TEXTS),
    "torch_encoder": _evaluated,
    "lstm": _of(Recurrent, next_of, TEXTS),
    "unet": _of(UNet, restored, pictures(3, 8)),
    "diffusion": _of(Diffusion, denoised, pictures(3, 8)),
    "vae": _of(Autoencoder, bounded, vectors()),
    "backbone_frozen": lambda: fitted(frozen),
    "backbone_thawed": lambda: fitted(thawed, optimize=momentum),
    "backbone_lora": lambda: fitted(adapted),
    "backbone_pretrained": pretrained,
    "backbone_batch_norm": lambda: fitted(frozen_batch_norm),
}
