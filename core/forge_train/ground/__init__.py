"""The ground floor: errors, files, names, layouts, tensors. It imports nothing else of forge."""
