"""Libraries for plugin authors: layers, optimizers, metrics, data, pipelines, trackers. The kernel never imports it."""
