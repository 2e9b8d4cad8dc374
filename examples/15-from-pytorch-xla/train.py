"""Train a small network on random images with PyTorch/XLA, and write the fourth step to files."""

import torch
import torch.nn.functional as F
import torch_xla
from torch import nn
from write_step import write_step

torch.manual_seed(0)
device = torch_xla.device()
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.1),
    nn.Linear(8 * 13 * 13, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

for step in range(6):
    images = torch.randn(32, 1, 28, 28).to(device)
    labels = torch.randint(0, 10, (32,)).to(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    if step == 3:
        write_step("step-3", [loss, *model.parameters()])
    else:
        torch_xla.sync()
    print(f"step {step}: loss {loss.item():.4f}")
