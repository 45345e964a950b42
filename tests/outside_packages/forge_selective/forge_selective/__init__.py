"""How well does a model know what it does not know?"""
