"""A transformer in plain PyTorch, with the device as an argument."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
device = torch.device(parser.parse_args().device)


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.device = device
        self.tokens = nn.Embedding(24, 16)
        self.positions = nn.Embedding(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 24)

    def forward(self, x):
        positions = torch.arange(x.size(1), device=self.device)
        hidden = self.tokens(x) + self.positions(positions).to(x.device)
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=device).triu(1)
        return self.head(self.encoder(hidden, mask=future))


torch.manual_seed(13)
model = Model(device).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-6)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
weight = torch.tensor([1.0] * 24, device=device.type)
generator = torch.Generator().manual_seed(4)
best = torch.full((), float("inf"), device=device)
for _ in range(5):
    x = torch.randint(0, 24, (4, 8), generator=generator).to(device, non_blocking=True)
    y = torch.roll(x, 1, dims=1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x).view(-1, 24), y.view(-1), weight=weight)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    warmup.step()
    best = torch.minimum(best, loss.detach())
    print(f"loss {loss.item():.9g}")
print(f"loss {best.cpu().item():.9g}")

model.eval()
with torch.no_grad():
    correct = sum((model(x).argmax(-1) == y).sum().item() for _ in range(2))
print(f"accuracy {correct}")
model.to("cpu")
with torch.inference_mode():
    print(f"loss {model(x.cpu()).abs().mean().item():.9g}")
