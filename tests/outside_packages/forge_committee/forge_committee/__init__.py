"""A committee: an output layer of several members that vote, spread over ranks."""
