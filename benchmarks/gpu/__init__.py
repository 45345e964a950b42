"""`make gpu`: everything that only a CUDA device can show, as cases of one table; at toy size it runs on a CPU."""
