"""A GRU, each step in a scope, with gradients of two batches added."""

import torch
import torch.nn as nn
import torch_xla
import torch_xla.core.xla_model as xm


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.gru = nn.GRU(8, 10, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, words):
        hidden, _ = self.gru(self.embedding(words))
        return self.head(hidden)


def main(index, steps):
    torch.manual_seed(7)
    device = torch_xla.device()
    model = Tagger().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    generator = torch.Generator().manual_seed(2)
    running = torch.zeros((), device=device)
    for _ in range(steps):
        with torch_xla.step():
            optimizer.zero_grad(set_to_none=True)
            for _part in range(2):
                words = torch.randint(0, 20, (3, 6), generator=generator).to(device)
                loss = loss_fn(model(words).flatten(0, 1), (words % 4).flatten()) / 2
                loss.backward()
                running += loss.detach()
            optimizer.step()
        xm.master_print(f"loss {loss.item():.9g}")
    torch_xla.sync()
    print(f"loss {running.item() / steps:.9g}")


if __name__ == "__main__":
    torch_xla.launch(main, args=(5,))
