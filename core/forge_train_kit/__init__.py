"""Libraries for plugin authors: layers, optimizers, metrics, data, weights and more. The kernel never imports it."""
