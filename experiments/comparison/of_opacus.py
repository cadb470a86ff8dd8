"""Opacus on PyTorch: `PrivacyEngine.make_private`. A mode is a way to compute gradients."""

import sys
import time
import warnings

import opacus
import torch
from torch import nn
from torch.nn import functional
from torch.utils import data

from experiments.comparison import cases, worker

warnings.simplefilter("ignore")


def versions():
    """Returns the versions of the libraries."""
    return {"opacus": opacus.__version__, "torch": torch.__version__}


class Block(nn.Module):
    """A block of a WRN: two convolutions, each after a normalization, and the skip path."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.norm1 = nn.GroupNorm(16, inputs, eps=1e-3)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = nn.GroupNorm(16, outputs, eps=1e-3)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        """Applies the block to x [batch, channels, height, width]."""
        y = self.conv1(functional.relu(self.norm1(x)))
        return self.skip(x) + self.conv2(functional.relu(self.norm2(y)))


class Depthwise(nn.Sequential):
    """A depthwise 3x3 convolution and a 1x1 convolution."""

    def __init__(self, inputs, outputs, stride):
        super().__init__(
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            *(nn.GroupNorm(16, inputs, eps=1e-3), nn.ReLU()),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            *(nn.GroupNorm(16, outputs, eps=1e-3), nn.ReLU()),
        )


class LoRALinear(nn.Module):
    """A dense layer with a frozen kernel and two trained factors of low rank."""

    def __init__(self, width, rank):
        super().__init__()
        self.frozen = nn.Linear(width, width)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        """Returns the sum of two products: `x` with the frozen kernel, and with both factors."""
        return self.frozen(x) + self.up(self.down(x))


class Encoder(nn.Module):
    """A pre-norm encoder block: attention, then an MLP."""

    def __init__(self, width, lora):
        super().__init__()
        make = (lambda: LoRALinear(width, cases.RANK)) if lora else lambda: nn.Linear(width, width)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-3) for _ in range(2))
        self.query, self.value = make(), make()
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Applies the block to x [batch, tokens, width]."""
        y = self.norm1(x)
        heads = [
            layer(y).unflatten(-1, (cases.HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Mean(nn.Module):
    """A layer that averages all tokens."""

    def forward(self, x):
        """Returns the mean of x [batch, tokens, width]."""
        return x.mean(1)


def build(case):
    """Returns the network of a case."""
    if case == "digits":
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 3, 1, 1), nn.GroupNorm(4, 32, eps=1e-3), nn.GELU()),
            *(nn.Conv2d(32, 32, 3, 2, 1), nn.GroupNorm(4, 32, eps=1e-3), nn.GELU()),
            *(nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(4, 64, eps=1e-3), nn.GELU()),
            *(nn.Flatten(), nn.Linear(256, 10)),
        )
    if case == "wrn_16_4":
        sizes = [
            (16, 64, 1),
            (64, 64, 1),
            (64, 128, 2),
            (128, 128, 1),
            (128, 256, 2),
            (256, 256, 1),
        ]
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False),
            *(Block(*size) for size in sizes),
            *(nn.GroupNorm(16, 256, eps=1e-3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(256, 10),
        )
    if case == "depthwise":
        inputs = [32, *(channels for channels, _ in cases.DEPTHWISE[:-1])]
        return nn.Sequential(
            *(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.GroupNorm(16, 32, eps=1e-3), nn.ReLU()),
            *(Depthwise(size, *block) for size, block in zip(inputs, cases.DEPTHWISE, strict=True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)),
        )
    lora = case == "transformer_lora"
    blocks = [Encoder(cases.WIDTH, lora) for _ in range(cases.BLOCKS)]
    model = nn.Sequential(*blocks, Mean(), nn.Linear(cases.WIDTH, 10))
    if lora:
        model[: cases.BLOCKS].requires_grad_(False)
        for layer in (module for module in model.modules() if isinstance(module, LoRALinear)):
            layer.down.requires_grad_(True)
            layer.up.requires_grad_(True)
    return model


def loader(x, y, batch_size):
    """Returns a loader of shuffled batches. Images have their channels first."""
    x = torch.from_numpy(x)
    x = x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x
    return data.DataLoader(data.TensorDataset(x, torch.from_numpy(y)), batch_size, shuffle=True)


def digits(seed, rate=cases.DIGITS_RATE):
    """Trains the digits by `make_private_with_epsilon` and returns a dict of results."""
    x, y, test_x, test_y = cases.digits()
    began = time.perf_counter()
    torch.manual_seed(seed)
    model = build("digits")
    engine = opacus.PrivacyEngine()
    model, optimizer, batches = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        data_loader=loader(x, y, cases.DIGITS_BATCH),
        target_epsilon=cases.EPSILON,
        target_delta=cases.DELTA,
        epochs=cases.DIGITS_UPDATES * cases.DIGITS_BATCH // len(x),
        max_grad_norm=cases.CLIP,
    )
    first, updates = None, 0
    while updates < cases.DIGITS_UPDATES:
        for images, labels in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            first = first or time.perf_counter() - began
            updates += 1
    seconds = time.perf_counter() - began
    [(images, labels)] = loader(test_x, test_y, len(test_x))
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    return {
        "accuracy": accuracy,
        "epsilon": float(engine.get_epsilon(cases.DELTA)),
        "accountant": "PRV",
        "sampling": "Poisson",
        "noise_multiplier": optimizer.noise_multiplier,
        "sampling_probability": 1 / len(batches),
        "updates": updates,
        "first_seconds": first,
        "seconds": seconds,
    }


class training:  # noqa: N801
    """Makes updates of a case. `mode` is a mode of this library or "ordinary" (without privacy)."""

    def __init__(self, case, mode):
        x, y = cases.examples(case)
        self._batches = loader(x, y, cases.BATCH)
        self._batch = next(iter(self._batches))
        self._model = build(case)
        trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=cases.RATE)
        self._loss = nn.CrossEntropyLoss()
        if mode != "ordinary":
            self._model, self._optimizer, *loss, self._batches = (
                opacus.PrivacyEngine().make_private(
                    module=self._model,
                    optimizer=self._optimizer,
                    data_loader=self._batches,
                    criterion=self._loss,
                    noise_multiplier=cases.SIGMA,
                    max_grad_norm=cases.CLIP,
                    grad_sample_mode=mode,
                )
            )
            self._loss = loss[0] if loss else self._loss

    def step(self):
        """Makes an update on one batch."""
        self._update(*self._batch)

    def epoch(self):
        """Makes an update on every batch."""
        for x, y in self._batches:
            self._update(x, y)

    def _update(self, x, y):
        self._optimizer.zero_grad()
        self._loss(self._model(x), y).backward()
        self._optimizer.step()


if __name__ == "__main__":
    worker.main(sys.modules[__name__])
