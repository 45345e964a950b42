"""Who this process is, who the others are, and how they are started."""
