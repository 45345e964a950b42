"""Forward-only jobs: the outputs of a trained model for each record of a data set, in the order of the records."""
