"""Evaluation of a trained model on tasks: log-likelihoods and generated answers, on any layout."""
