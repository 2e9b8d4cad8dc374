"""Train the same network on JAX arrays, lazily."""

import torch
from torch import nn

import snaprt
import snaprt.torch

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4))
loss_of = nn.CrossEntropyLoss()
model, loss_of = snaprt.torch.wrap(model), snaprt.torch.wrap(loss_of)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
generator = torch.Generator().manual_seed(1)
centers = torch.randn(4, 16, generator=generator)

with snaprt.torch.lazy():
    for step in range(1, 41):
        labels = torch.randint(0, 4, (32,), generator=generator)
        inputs = centers[labels] + torch.randn(32, 16, generator=generator)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        snaprt.mark_step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.4f}")

torch.save(model.state_dict(), "train.pt")
print("programs compiled", snaprt.metrics.counter_value("PersistentCacheMiss") or 0)
