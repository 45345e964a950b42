"""Parts of the plugin hf_datasets."""
