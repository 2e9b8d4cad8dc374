"""Trains a small convolutional classifier of flax nnx with nnx.jit, dropout and batch norm."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.convolution = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(8 * 4 * 4, 10, rngs=rngs)

    def __call__(self, images):
        hidden = nnx.relu(self.norm(self.convolution(images)))
        hidden = nnx.avg_pool(hidden, (2, 2), strides=(2, 2))
        return self.head(self.dropout(hidden.reshape(hidden.shape[0], -1)))


def loss_of(model, images, labels):
    logits = model(images)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, logits


@nnx.jit
def train_step(model, optimizer, metrics, images, labels):
    (loss, logits), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model, images, labels)
    metrics.update(loss=loss, logits=logits, labels=labels)
    optimizer.update(model, gradients)


model = Classifier(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
model.train()
key = jax.random.key(1)
for epoch in range(3):
    for _ in range(4):
        key, of_images, of_labels = jax.random.split(key, 3)
        labels = jax.random.randint(of_labels, (16,), 0, 10)
        images = jax.random.normal(of_images, (16, 8, 8, 1)) + labels[:, None, None, None] / 3
        train_step(model, optimizer, metrics, images, labels)
    print(epoch, {name: f"{value:.4f}" for name, value in metrics.compute().items()})
    metrics.reset()

model.eval()
graph, state = nnx.split(model)
copy = nnx.merge(graph, state)
print("parameters", sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))))
print("same outputs", bool(jnp.allclose(copy(images), model(images))))
