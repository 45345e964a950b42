"""This process, the other processes, and how they are started."""
