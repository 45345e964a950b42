"""One optimizer step: micro-batches, gradients, metrics, evaluation."""
