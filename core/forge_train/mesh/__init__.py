"""This process, the others, and the device meshes they form."""
